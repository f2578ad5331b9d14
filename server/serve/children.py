"""Start child processes that cannot outlive their parent, notice their end, and stop them within a time limit.

Every event arrives on a file descriptor: a signal, the end of a process (pidfd), a line on a pipe. One `select` waits for all
of them, without polling. Needs Linux 5.4. Rejected: SIGCHLD handlers, which are racy and do not identify the dead child;
asyncio, which costs 40 ms of imports in a process that waits on five descriptors; killing
process groups, which would also kill multiprocessing's resource tracker before it has removed shared memory.
"""

import contextlib
import ctypes
import functools
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

from server.machine.parent_death import die_with_parent

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the ones torchrun forwards
DRAIN_SIGNAL = signal.SIGUSR1  # from serve to workers: stop after open requests have ended
# From the kernel to a worker: its parent ended. Not a stop signal: the pid of the parent may change only after the signal has arrived.
PARENT_END_SIGNAL = signal.SIGPWR
# For a front. During its imports this signal kills it without a traceback; SIGINT would print one.
END_NOW_SIGNAL = signal.SIGUSR2
# A front's addresses, as JSON: for engines, and for a replacement front.
FRONT_VARIABLE = "WIDEEP_FRONT"
STANDBY_VARIABLE = "WIDEEP_STANDBY"  # the addresses of the standby's front, for the engine next to it
NODE_FRONTS_VARIABLE = "WIDEEP_NODE_FRONTS"  # the same for the fronts of a node that does not lead
KEPT_VARIABLE = "WIDEEP_KEPT"  # a folder that a front leaves to its replacement
LISTENER_VARIABLE = "WIDEEP_LISTENER_FD"  # the socket of --uds, on which several fronts listen
READY_VARIABLE = "WIDEEP_READY_FD"  # the descriptor on which a child reports
# A file with a supervisor's state, for its replacement.
SUPERVISOR_STATE_VARIABLE = "WIDEEP_SUPERVISOR_STATE"
FRONT_IS_GONE = 3  # exit status of an engine that lost its service
_MOST_DESCRIPTORS = 1 << 20  # some programs iterate over all descriptors up to the limit
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard limit, for this process and its children. Returns the limit.

    Outside containers the soft limit is often 1,024, too few for a front with a thousand clients.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


class AdoptedProcess:
    """A child that another process has started, with the part of `subprocess.Popen`'s interface that we need."""

    stderr = None  # not captured

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, the negative number of the signal that killed it, or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end and return the status, as from `poll`."""
        while (status := self._wait(0)) is None:
            pass
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, flags: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Child(NamedTuple):
    """A started process."""

    name: str  # for messages, e.g. "rank 1's engine"
    process: subprocess.Popen[bytes] | AdoptedProcess
    pidfd: int  # readable when the process has ended
    stop_signal: signal.Signals = signal.SIGTERM  # makes it stop immediately


def start_child(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    kept_fds: Sequence[int] = (),
    stop_signal: signal.Signals = signal.SIGTERM,
) -> Child:
    """Start a process in a new process group. The kernel kills it when this process ends.

    The group keeps Ctrl-C and torchrun's killpg away from it, so that we decide when and in what order processes stop. Call
    this from the main thread: the kernel treats the end of the calling thread as the end of the parent.

    Raises:
        OSError: The command cannot be run.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        pass_fds=kept_fds,
        process_group=0,
        preexec_fn=functools.partial(die_with_parent, parent_pid=os.getpid()),
    )
    return Child(name, process, os.pidfd_open(process.pid), stop_signal)


def describe_end(child: Child) -> str:
    """Describe in one line how a child ended: name, pid, and the signal or exit status."""
    return describe_status(child.name, child.process.pid, child.process.wait())


def describe_status(name: str, pid: int, status: int) -> str:
    """Describe in one line how a process ended. `status` is as from `AdoptedProcess.poll`."""
    who = f"{name} (pid {pid})"
    if status >= 0:
        return f"{who} exited with status {status}" + ("; see its messages above" if status else "")
    signal_name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
    hint = " (perhaps by the kernel because memory ran out)" if -status == signal.SIGKILL else ""
    return f"{who} was killed by {signal_name}{hint}"


def has_ended(child: Child, *, within_s: float = 0.0) -> bool:
    """Wait for the end of a child. Return whether it has ended, even if it was not reaped."""
    return bool(select.select([child.pidfd], [], [], within_s)[0])


def is_gone(pid: int) -> bool:
    """Return whether a process, child or not, has ended, even if it was not reaped."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


def stop_children(children: Iterable[Child], *, grace_s: float) -> None:
    """Send each child its stop signal, kill those that remain after `grace_s`, and reap all."""
    living = {child.pidfd: child for child in children}
    for child in living.values():
        child.process.send_signal(child.stop_signal)
    poll = select.poll()
    for pidfd in living:
        poll.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + grace_s
    while living and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left_s * 1000):
            poll.unregister(pidfd)
            _reap(living.pop(pidfd))
    for child in living.values():
        child.process.kill()
        _reap(child)


def _reap(child: Child) -> None:
    child.process.wait()
    os.close(child.pidfd)


class StopSignals:
    """A context in which stop signals, and that of the parent's end, make `fd` readable instead of ending the process."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._fd_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        recorded = (*STOP_SIGNALS, DRAIN_SIGNAL, PARENT_END_SIGNAL)
        self._before = {number: signal.signal(number, _ignore) for number in recorded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, action in self._before.items():
            signal.signal(number, action)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self.fd)
        os.close(self._write_fd)

    def take(self) -> list[int]:
        """Return the signals that have arrived since the last call, in order."""
        try:
            return list(os.read(self.fd, 4096))
        except BlockingIOError:
            return []


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the wake-up descriptor has recorded the signal."""


def kill_if_it_stays(pidfd: int, *, grace_s: float) -> None:
    """Fork a process that kills the process of `pidfd` if it still runs after `grace_s`, and then exits."""
    if os.fork():
        return
    try:
        os.setsid()  # signals to the caller's group must not reach this process
        os.closerange(0, pidfd)  # others may wait for the caller's pipes to close
        os.closerange(pidfd + 1, os.sysconf("SC_OPEN_MAX"))
        if not select.select([pidfd], [], [], grace_s)[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os._exit(0)


def adopt_orphans() -> frozenset[int]:
    """Become the parent of orphaned descendants. Returns the pids of the present children."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    return children_of(os.getpid())


def kill_orphans(*, spared: frozenset[int], grace_s: float) -> None:
    """Wait for all children except the spared ones to end, and kill those that remain after `grace_s`.

    A killed child may leave us its own children, so this repeats until no child remains.
    """
    deadline = time.monotonic() + grace_s
    while pids := children_of(os.getpid()) - spared:
        pid = min(pids)
        pidfd = os.pidfd_open(pid)  # an unreaped child of ours, so the pid is not reused
        left_s = max(0.0, deadline - time.monotonic())
        if not select.select([pidfd], [], [], left_s)[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        os.waitpid(pid, 0)


def signal_children_of(pid: int, number: signal.Signals) -> None:
    """Signal the direct children of a living child, such as the launcher's workers."""
    for child in sorted(children_of(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def children_of(pid: int) -> frozenset[int]:
    """Return the pids of a process's children, including unreaped ones."""
    found: set[int] = set()
    for task in list(
        Path(f"/proc/{pid}/task").iterdir()
    ):  # a child is listed under the thread that started it
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.update(map(int, (task / "children").read_text().split()))
    return frozenset(found)


def ended_children(*, spared: frozenset[int]) -> list[int]:
    """Return the pids of our children that have ended but were not reaped, except the spared ones."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    pids = children_of(os.getpid()) - spared
    return [pid for pid in sorted(pids) if os.waitid(os.P_PID, pid, how) is not None]
