"""Become another program, one that ends when the process that started this one ends.

`python -P bound_exec.py PARENT SIGNAL COMMAND...`: PARENT is the pid of who started us, SIGNAL what the kernel sends us
when it ends; both outlive the exec. For parents that are not ours to know: `children.start_child` does the same
between fork and exec, where a script's other threads (gRPC's, torch's) may hold locks that nobody will ever release.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from server.process.parent_death import die_with_parent

if __name__ == "__main__":
    parent, number, *command = sys.argv[1:]
    die_with_parent(signal.Signals(int(number)), parent_pid=int(parent))
    os.execvp(command[0], command)
