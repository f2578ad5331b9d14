"""`wideep front` as a fork of a process that has imported its modules: its start takes no second of a core.

One such process forks all fronts of a test process. An order has the front's flags, directory and environment, with the
descriptors of its output and of a socket for its pid and exit status. If the test process ends, so do its fronts.
`real_service` starts fronts as a service does.
"""

import contextlib
import gc
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

import wideep
from server.serve.children import LISTENER_VARIABLE
from server.serve.front import front_main

ROOT = Path(__file__).resolve().parents[3]
_ORDER_BYTES = 2**17


class ForkedFront:
    """A front, with the part of `subprocess.Popen`'s interface that tests need."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        ready_fd: int,
        stdout_fd: int,
        cwd: Path,
        environment: Mapping[str, str],
        listener: socket.socket | None = None,
    ) -> None:
        """Start a front that writes its addresses to `ready_fd`. `listener`: as it gets from its supervisor."""
        read_fd, stderr_fd = os.pipe()
        self.stderr: IO[str] = os.fdopen(read_fd)
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {"flags": list(flags), "cwd": str(cwd), "environment": dict(environment)}
        fds = [ready_fd, stdout_fd, stderr_fd, theirs.fileno()]
        fds += [] if listener is None else [listener.fileno()]
        socket.send_fds(_orders(), [json.dumps(order).encode()], fds)
        os.close(stderr_fd)
        theirs.close()
        self.pid = int(self._answers.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status; negative: the signal that killed it.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                self.returncode = int(self._answers.recv(64))
            except (TimeoutError, BlockingIOError) as error:  # the latter if the timeout is 0
                raise subprocess.TimeoutExpired("wideep front", timeout or 0.0) from error
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _orders() -> socket.socket:
    """Start the process that forks fronts; return the socket for its orders."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=(theirs.fileno(),), env={**os.environ, "PYTHONPATH": str(ROOT)})
    return ours


class _Order(NamedTuple):
    """What one front needs."""

    flags: list[str]
    cwd: str
    environment: dict[str, str]


def _serve(orders: socket.socket) -> tuple[_Order, list[int]] | None:
    """Fork fronts until `orders` closes. Returns the order and its descriptors in a front, and None in this process."""
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not orders:
                    pid, answers = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    _send(answers, os.waitstatus_to_exitcode(status))
                    answers.close()
                    continue
                content, fds, _, _ = socket.recv_fds(orders, _ORDER_BYTES, 5)
                if not content:
                    return None
                if (pid := os.fork()) == 0:
                    return _Order(**json.loads(content)), fds
                answers = socket.socket(fileno=fds.pop(3))
                for fd in fds:
                    os.close(fd)
                _send(answers, pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))


def _send(answers: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the test has ended
        answers.send(str(number).encode())


def _run(order: _Order, fds: list[int]) -> int:
    """Run a front in the process that was forked for it. Return its exit status."""
    ready_fd, stdout_fd, stderr_fd, _, *listening = fds
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (ready_fd, *listening):
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(fd)
    os.chdir(order.cwd)
    os.environ.clear()
    os.environ.update(order.environment)
    for fd in listening:
        os.environ[LISTENER_VARIABLE] = str(fd)
    random.seed()
    sys.argv = ["wideep", "front", *order.flags, "--ready-fd", str(ready_fd)]
    return wideep.main()


def main() -> int:
    """Import what fronts need, and fork them until the test process ends. A front returns from here, too."""
    front_main._import_http_service()
    gc.freeze()
    orders = socket.socket(fileno=int(sys.argv[1]))
    forked = _serve(orders)
    orders.detach()  # a front closes all descriptors
    return 0 if forked is None else _run(*forked)


if __name__ == "__main__":
    sys.exit(main())
