"""Start child processes that cannot outlive us, notice their end, and stop them within a bound.

Everything is an event on a file descriptor (a signal, a process' end through a pidfd, a line on a pipe), so that
one `select` waits for all and nothing polls. Needs Linux 5.4. Rejected: SIGCHLD handlers, which tell neither who
died nor race-free; asyncio, which costs 40 ms of imports in a process that waits on five descriptors; killing
process groups, which would also kill multiprocessing's resource tracker before it has removed shared memory.
"""

import contextlib
import ctypes
import functools
import json
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

from server.parent_death import die_with_parent

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # those that torchrun forwards
DRAIN_SIGNAL = signal.SIGUSR1  # from serve to workers: stop when open requests have ended
# To a front: amid its imports it dies of it without a traceback, which SIGINT would print.
END_NOW_SIGNAL = signal.SIGUSR2
FRONT_VARIABLE = (
    "WIDEEP_FRONT"  # what a front announced, as JSON: for engines, and for the front that replaces it
)
KEPT_VARIABLE = "WIDEEP_KEPT"  # a folder: what a front keeps for one that replaces it
READY_VARIABLE = "WIDEEP_READY_FD"  # the descriptor on which an engine tells its supervisor how far it is
SUPERVISOR_STATE_VARIABLE = (
    "WIDEEP_SUPERVISOR_STATE"  # a file: what a supervisor knows, for one that replaces it
)
FRONT_IS_GONE = 3  # the exit status of an engine that has nobody left to serve for
_MOST_DESCRIPTORS = 1 << 20  # some programs walk over all that they may have
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, for this process and its children; returns the limit.

    1,024 is common outside containers, and as many clients keep a front from accepting anybody else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


class AdoptedProcess:
    """A child of ours that another process has started: what we need of `subprocess.Popen`."""

    stderr = None  # no pipe of ours

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal's number; None: it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end; return what `poll` returns then."""
        while (status := self._wait(0)) is None:
            pass
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Make it end."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, flags: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Child(NamedTuple):
    """A started process."""

    name: str  # how messages call it, e.g. "rank 1's engine"
    process: subprocess.Popen[bytes] | AdoptedProcess
    pidfd: int  # readable when the process has ended
    stop_signal: signal.Signals = signal.SIGTERM  # the one that makes it end at once


def start_child(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    kept_fds: Sequence[int] = (),
    stop_signal: signal.Signals = signal.SIGTERM,
) -> Child:
    """Start a process that the kernel kills when we end, in a process group of its own.

    Its own group keeps Ctrl-C and torchrun's killpg away from it: we decide when and in what order it stops. Call
    this from the main thread: the kernel takes the end of the calling thread for ours.

    Raises:
        OSError: the command cannot be run.
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
    """Say in one line how an ended child ended: name, pid, and the signal or exit status."""
    return describe_status(child.name, child.process.pid, child.process.wait())


def describe_status(name: str, pid: int, status: int) -> str:
    """Say in one line how a process ended; `status` is an exit status or, below 0, a signal's number."""
    who = f"{name} (pid {pid})"
    if status >= 0:
        return f"{who} ended with status {status}" + ("; it said why above" if status else "")
    signal_name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
    hint = "; if nobody did that, the machine may be out of memory" if -status == signal.SIGKILL else ""
    return f"{who} was killed by {signal_name}{hint}"


def has_ended(child: Child) -> bool:
    """Return whether a child has ended, reaped or not."""
    return bool(select.select([child.pidfd], [], [], 0)[0])


def is_gone(pid: int) -> bool:
    """Return whether a process that need not be our child has ended, reaped or not."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


def stop_children(children: Iterable[Child], *, grace_s: float) -> None:
    """Ask children to end, kill those that have not after `grace_s`, and reap all of them."""
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
    """A context in which the signals that ask us to stop make `fd` readable instead of ending the process."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._fd_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _ignore) for number in (*STOP_SIGNALS, DRAIN_SIGNAL)}
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
    """Stand in as the handler: the wake-up descriptor has already taken the signal down."""


class MessagePipe:
    """The reading end of a pipe on which a child reports one JSON object per line."""

    def __init__(self) -> None:
        self.fd, self.child_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        self._partial = b""
        self.at_end = False

    def close_child_end(self) -> None:
        """Drop our copy of the writing end, so that the child's end is the pipe's end."""
        os.close(self.child_fd)

    def close(self) -> None:
        """Close the reading end."""
        os.close(self.fd)

    def read(self) -> list[dict[str, Any]]:
        """Return the whole lines that have arrived.

        Raises:
            ValueError: a line is not a JSON object.
        """
        try:
            received = os.read(self.fd, 65536)
        except BlockingIOError:
            return []
        self.at_end = not received
        *lines, self._partial = (self._partial + received).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError(f"not JSON objects: {lines!r}")
        return messages


def kill_if_it_stays(pidfd: int, *, grace_s: float) -> None:
    """Leave a process behind that kills another one if that has not ended after `grace_s`, and ends then itself."""
    if os.fork():
        return
    try:
        os.setsid()  # what ends the caller's group must not end this one
        os.closerange(0, pidfd)  # nobody is to wait for the end of what the caller had open
        os.closerange(pidfd + 1, os.sysconf("SC_OPEN_MAX"))
        if not select.select([pidfd], [], [], grace_s)[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os._exit(0)


def adopt_orphans() -> frozenset[int]:
    """Make descendants whose parent ends our children from now on; return the pids of the children we have."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    return children_of(os.getpid())


def kill_orphans(*, spared: frozenset[int], grace_s: float) -> None:
    """Wait for all children but the spared to end, and kill those that have not after `grace_s`.

    What is killed may leave children of its own to us, so this goes on until none is left.
    """
    deadline = time.monotonic() + grace_s
    while pids := children_of(os.getpid()) - spared:
        pid = min(pids)
        pidfd = os.pidfd_open(pid)  # ours and not reaped, so no other process can have the pid
        left_s = max(0.0, deadline - time.monotonic())
        if not select.select([pidfd], [], [], left_s)[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        os.waitpid(pid, 0)


def signal_children_of(pid: int, number: signal.Signals) -> None:
    """Send a signal to the direct children of a child of ours that lives: of the launcher, the workers."""
    for child in sorted(children_of(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def children_of(pid: int) -> frozenset[int]:
    """Return the pids of a process' children, those that have ended and were not reaped included."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")  # a child belongs to the thread that started it
    return frozenset(int(child) for task in tasks for child in task.read_text().split())


def ended_children(*, spared: frozenset[int]) -> list[int]:
    """Return the pids of our children that have ended and were not reaped, but for the spared."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    pids = children_of(os.getpid()) - spared
    return [pid for pid in sorted(pids) if os.waitid(os.P_PID, pid, how) is not None]
