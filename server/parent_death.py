"""Die with the parent: the kernel kills a process when the one that started it ends, however that ended.

Linux only (prctl PR_SET_PDEATHSIG). Hazard: "parent" is the *thread* that forked, so a supervisor must start its
children from a thread that lives as long as itself (its main thread). Rejected: polling getppid(), which notices
late and needs a thread of its own.

As a program, `python -P parent_death.py PARENT SIGNAL COMMAND...` becomes another program that gets SIGNAL when the process PARENT ends;
both outlive the exec. For parents that are not ours to know: `process.children.start_child` does the same between fork and
exec, where a script's other threads (gRPC's, torch's) may hold locks that nobody will ever release.
"""

import ctypes
import os
import sys
from signal import SIGKILL, Signals

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(signal: Signals = SIGKILL, *, parent_pid: int | None = None) -> None:
    """Ask the kernel to send `signal` to this process when its parent ends.

    Args:
        signal: what to send.
        parent_pid: the parent expected; None is the parent at the time of the call. A caller that can pass it
            closes the gap between the fork and this call.

    Raises:
        OSError: the kernel refused.
        SystemExit: the parent is already gone.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal), 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: this process could outlive its parent"
        )
    # The parent may have died before the call above: then no signal will ever come.
    if os.getppid() != expected:
        raise SystemExit(f"the process that started this one ({expected}) is gone")


if __name__ == "__main__":
    parent, number, *command = sys.argv[1:]
    die_with_parent(Signals(int(number)), parent_pid=int(parent))
    os.execvp(command[0], command)
