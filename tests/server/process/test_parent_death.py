"""A process that asked for it dies with its parent, however that ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CHILD = (
    "import os, sys, time; sys.path.insert(0, sys.argv[1]);"
    "from server.parent_death import die_with_parent; die_with_parent();"
    "print(os.getpid(), flush=True); time.sleep(60)"
)
PARENT = (
    "import subprocess, sys, time;"
    "subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1]]); time.sleep(60)"
)


def test_the_child_of_a_killed_parent_dies() -> None:
    read_fd, write_fd = os.pipe()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(ROOT), CHILD], stdout=write_fd)
    os.close(write_fd)
    with os.fdopen(read_fd) as output:
        assert output.readline().strip().isdigit()
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        assert output.read() == "", "the pipe ends when the child, its last writer, is gone"


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from server.parent_death import die_with_parent; die_with_parent(parent_pid=2**22); print('lives')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=30)
    assert done.returncode != 0 and "is gone" in done.stderr and not done.stdout
