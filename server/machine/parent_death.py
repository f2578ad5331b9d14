"""Die with the parent: the kernel kills a process when its parent ends, even by SIGKILL.

Linux only (prctl PR_SET_PDEATHSIG). Hazard: "parent" is the *thread* that forked, so a supervisor must start its
children from a thread that lives as long as itself (its main thread). Rejected: polling getppid(), which is late and needs a thread.

As a program, `python -P parent_death.py PARENT SIGNAL COMMAND...` executes another program that gets SIGNAL when the
process PARENT ends; both settings survive the exec. This is for parents with unknown threads, such as users' scripts:
`serve.children.start_child` does the same between fork and exec, where locks held by a script's other threads (gRPC's,
torch's) are never released.
"""

import ctypes
import os
import sys
from signal import SIGKILL, Signals

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(signal: Signals = SIGKILL, *, parent_pid: int | None = None) -> None:
    """Make the kernel send `signal` to this process when its parent ends.

    Args:
        signal: Signal to send.
        parent_pid: Expected parent. None means the parent at the time of the call; a caller that can pass the pid
            closes the gap between the fork and this call.

    Raises:
        OSError: The kernel refused.
        SystemExit: The parent has already ended.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal), 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: this process could outlive its parent"
        )
    # The parent may have died before the call above. In this case the signal never arrives.
    if os.getppid() != expected:
        raise SystemExit(f"the process that started this one ({expected}) is gone")


if __name__ == "__main__":
    parent, number, *command = sys.argv[1:]
    die_with_parent(Signals(int(number)), parent_pid=int(parent))
    os.execvp(command[0], command)
