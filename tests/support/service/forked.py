"""`wideep` and torchrun as forks of a process that has imported their modules: a start costs no seconds of a core.

One such process per kind forks all commands of a test process. An order has the command, its directory, environment and
namespaces, with the descriptors of its output and of a socket for its pid and exit status. If the test process ends, so do its
commands.

Private services of scripts and the torchruns of recipes are `importing_once` instead: they import once, and fork their children.
Services of fake processes (`fake_service.py`) are forked in the same two ways, without torch.

A forked `serve` or torchrun forks its children too. Its fronts find torch imported, which real ones hide; a front of `FrontProcess`
comes from a process without torch, and so do fakes. All other commands start a new interpreter: those of docs, and benchmarks without
`forked_services`.
"""

import asyncio
import contextlib
import ctypes
import enum
import fcntl
import gc
import importlib
import io
import json
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import wideep
from server.front import helper_processes
from server.serve import children

ROOT = Path(__file__).resolve().parents[3]
WIDEEP = (sys.executable, "-P", str(ROOT / "server" / "__main__.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
FAKE_SERVICE = (sys.executable, str(Path(__file__).with_name("fake_service.py")))
FIRST_FD = 10  # number of the first descriptor that a forked command inherits
_ORDER_BYTES = 2**17
_ONCE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from tests.support.service import forked; "
    "sys.exit(forked.run_once(sys.argv[1], sys.argv[2:]))"
)
# OpenMP reads its variables when torch is imported.
_AS_ENGINE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GRPC_VERBOSITY": "NONE"}
# torch reads its level when it is imported, here before the options of a service are known. With `--log-format json`, a service
# silences it.
_SILENT = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
_FORKED_CHILDREN = ("launcher", "worker", "engine", "front")  # of a forked `serve` or torchrun
# The programs of a fake service, and their modules.
_FAKES = {
    str(Path(__file__).with_name(f"{name}.py")): f"tests.support.service.{name}"
    for name in ("fake_service", "fake_launcher", "fake_child")
}
_NEW_HOST_NAME, _NETWORK = 0x04000000, 0x40000000  # CLONE_NEWUTS, CLONE_NEWNET of linux/sched.h
_MOUNTS, _SLAVE = 0x00020000, 0x84000  # CLONE_NEWNS of linux/sched.h; MS_REC | MS_SLAVE of linux/mount.h
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14  # linux/prctl.h


class Kind(enum.StrEnum):
    """What the forking process has imported."""

    FRONT = "front"
    SERVICE = "service"
    FAKES = "fakes"


class Forked(children.AdoptedProcess):
    """A forked command. The process that forked it waits for it, and sends its status."""

    def __init__(
        self,
        kind: Kind,
        command: Sequence[str],
        *,
        stdout_fd: int,
        stderr_fd: int,
        cwd: Path,
        environment: Mapping[str, str],
        network: str = "",
        host_name: str = "",
        stdin_fd: int | None = None,
        kept_fds: Sequence[int] = (),
    ) -> None:
        """Start a command in a new session. It gets `kept_fds` as descriptors `FIRST_FD` and up.

        Args:
            command: `WIDEEP`, `TORCHRUN` or `FAKE_SERVICE` with its words.
            stdin_fd: None: the input of this process.
            network: Name of the network namespace; empty: this process's.
            host_name: In a namespace for it alone; empty: this machine's.
        """
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = _Order(list(command), str(cwd), dict(environment), network, host_name, stdin_fd is not None)
        with theirs:
            stdin = [] if stdin_fd is None else [stdin_fd]
            fds = [theirs.fileno(), stdout_fd, stderr_fd, *stdin, *kept_fds]
            socket.send_fds(_orders(kind), [json.dumps(order).encode()], fds)
        super().__init__(int(self._answers.recv(64)))

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
                raise subprocess.TimeoutExpired("wideep", timeout or 0.0) from error
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode


@cache
def can_fork_services() -> bool:
    """Return whether a process may change what /proc shows of it. Tests look for engines and ranks there."""
    return _MemoryMap.of_this_process().apply()


def importing_once(command: Sequence[str], kind: Kind = Kind.SERVICE) -> tuple[str, ...]:
    """Return the start of a command that runs `WIDEEP`, `TORCHRUN` or `FAKE_SERVICE` in its own process, and forks its children.

    If the kernel does not allow that, it is the command itself.
    """
    if not can_fork_services():
        return tuple(command)
    return (sys.executable, "-P", "-c", _ONCE, str(ROOT), kind.value, *command)


@cache
def _orders(kind: Kind) -> socket.socket:
    """Start the process that forks commands of a kind. Return the socket for its orders."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        more = _AS_ENGINE if kind == Kind.SERVICE else {}
        environment = {**os.environ, **_SILENT, **more, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-P", __file__, kind, str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment)
    return ours


class _Order(NamedTuple):
    """What one command needs."""

    command: list[str]
    cwd: str
    environment: dict[str, str]
    network: str
    host_name: str
    has_stdin: bool


def _serve(orders: socket.socket) -> tuple[_Order, list[int]] | None:
    """Fork commands until `orders` closes. Returns the order and its descriptors in a command, and None in this process."""
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
                    return _Order(*json.loads(content)), fds[1:]
                answers = socket.socket(fileno=fds.pop(0))
                for fd in fds:
                    os.close(fd)
                _send(answers, pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))


def _send(answers: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the test has ended
        answers.send(str(number).encode())


def _run(order: _Order, fds: list[int]) -> int:
    """Run a command in the process that was forked for it. Return its exit status."""
    os.setsid()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
    standard = (1, 2, 0) if order.has_stdin else (1, 2)
    places = (*standard, *range(FIRST_FD, FIRST_FD + len(fds) - len(standard)))
    for fd, place in zip(high, places, strict=True):
        os.dup2(fd, place)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # as in a new interpreter
    os.chdir(order.cwd)
    if order.network:
        enter_network(order.network)
        _see_network(order.network)
    if order.host_name:
        _call_libc("unshare", _NEW_HOST_NAME)
        socket.sethostname(order.host_name)
    return _become(order.command, order.environment, places)


def enter_network(namespace: str) -> None:
    """Move this thread to a network namespace of `ip netns`. Its later children are there, too."""
    with Path("/var/run/netns", namespace).open("rb") as file:
        _call_libc("setns", file.fileno(), _NETWORK)


def _see_network(namespace: str) -> None:
    """Let /sys show the interfaces of this process's network, as `ip netns exec` does. UCX looks there."""
    _call_libc("unshare", _MOUNTS)
    _call_libc("mount", b"", b"/", b"none", _SLAVE, None)
    _call_libc("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)


def _call_libc(function: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _become(command: Sequence[str], environment: Mapping[str, str], kept_fds: Sequence[int]) -> int:
    """Run `wideep`, torchrun or a fake in this forked process. Return its exit status."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept_fds:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    _show_as(command, environment)
    if tuple(command[: len(TORCHRUN)]) == TORCHRUN:
        sys.argv = list(command[len(TORCHRUN) - 1 :])
        importlib.import_module(TORCHRUN[-1]).main()
        return 0
    if _is_fake(command):
        sys.argv = list(command[1:])
        return int(importlib.import_module(_FAKES[command[1]]).main() or 0)
    sys.argv = list(command[len(WIDEEP) - 1 :])
    return wideep.main()


def _is_fake(command: Sequence[str]) -> bool:
    """Return whether a command runs one of the programs of a fake service."""
    return command[1] in _FAKES


def _in_full(command: Sequence[str]) -> Sequence[str]:
    """Return `WIDEEP` in place of its name, which recipes find in PATH."""
    return [*WIDEEP, *command[1:]] if command[0] == "wideep" else command


def _is_of_service(command: Sequence[str]) -> bool:
    """Return whether a command starts a process of a service."""
    return tuple(command[: len(WIDEEP)]) == WIDEEP and command[len(WIDEEP)] in _FORKED_CHILDREN


def _popen_of_torchrun(
    args: Sequence[str], *, env: Mapping[str, str], stdout: None, stderr: None, start_new_session: bool
) -> subprocess.Popen[bytes] | children.AdoptedProcess:
    """Fork a worker of torchrun, instead of starting a new interpreter."""
    assert start_new_session and stdout is None and stderr is None
    started = _popen(_in_full(args), env=env, pass_fds=(), process_group=None, preexec_fn=os.setsid)
    return _Worker(started.pid) if isinstance(started, children.AdoptedProcess) else started


class _Worker(children.AdoptedProcess):
    """A worker of torchrun."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, as `subprocess.Popen` does.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        if self.returncode is None:
            with os.fdopen(os.pidfd_open(self.pid)) as pidfd:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("wideep worker", timeout or 0.0)
        return super().wait()


def _popen(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    pass_fds: Sequence[int],
    process_group: int | None,
    preexec_fn: Callable[[], None],
    is_forked: Callable[[Sequence[str]], bool] = _is_of_service,
) -> subprocess.Popen[bytes] | children.AdoptedProcess:
    """Fork a child of a service, instead of starting a new interpreter. It has the arguments of `start_child`."""
    if not is_forked(command):
        return subprocess.Popen(
            command, env=env, pass_fds=pass_fds, process_group=process_group, preexec_fn=preexec_fn
        )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # A signal to the child must not reach the parent's wake-up descriptor, which a fork shares: the parent would stop, too.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return children.AdoptedProcess(pid)

    def prepare() -> None:
        if process_group is not None:
            os.setpgid(0, process_group)
        _reset_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        preexec_fn()

    _live_as(command, env, pass_fds, prepare)
    raise AssertionError("the process has ended")


async def _start_helper(*command: str, **how: Any) -> asyncio.subprocess.Process:
    """Fork the encoder of images, instead of starting a new interpreter: `preexec_fn` does not return."""
    if tuple(command[: len(WIDEEP)]) != WIDEEP or command[len(WIDEEP)] != "image-encoder":
        return await asyncio.create_subprocess_exec(*command, **how)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as above

    def prepare() -> None:
        _reset_signals()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in a new interpreter
        signal.pthread_sigmask(signal.SIG_SETMASK, held)

    try:
        return await asyncio.create_subprocess_exec(
            *command, **how, preexec_fn=lambda: _live_as(command, dict(os.environ), (), prepare)
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _live_as(
    command: Sequence[str],
    environment: Mapping[str, str],
    kept_fds: Sequence[int],
    prepare: Callable[[], None],
) -> None:
    """Run `wideep` in this process, which was forked for it, and end."""
    status = 1
    try:
        prepare()
        status = _become(command, environment, kept_fds)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except Exception:  # noqa: BLE001 - an interpreter would print it, too
        traceback.print_exc()
    finally:
        _exit(status)


def _reset_signals() -> None:
    """Undo the handlers of the parent."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(status: int) -> None:
    """Exit without the clean-up that belongs to the parents."""
    threading._shutdown()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack", "arg_start", "arg_end",
            "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip

    @classmethod
    def of_this_process(cls) -> Self:
        """Read the addresses from /proc."""
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        places = {
            "start_code": 26,
            "end_code": 27,
            "start_stack": 28,
            "start_data": 45,
            "end_data": 46,
            "start_brk": 47,
        }
        places |= {"arg_start": 48, "arg_end": 49, "env_start": 50, "env_end": 51}  # proc(5) counts from 1
        sbrk = ctypes.CDLL(None).sbrk
        sbrk.restype = ctypes.c_uint64
        values = {name: int(fields[place - 3]) for name, place in places.items()}
        return cls(**values, brk=sbrk(0), exe_fd=2**32 - 1)

    def apply(self) -> bool:
        """Return whether the kernel took it; it needs CONFIG_CHECKPOINT_RESTORE."""
        arguments = _PR_SET_MM_MAP, ctypes.byref(self), ctypes.c_ulong(ctypes.sizeof(self)), 0
        return bool(ctypes.CDLL(None).prctl(_PR_SET_MM, *arguments) == 0)


_shown: list[ctypes.Array[ctypes.c_char]] = []  # the memory that /proc shows


def _show_as(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make /proc show a command line and an environment."""
    parts = words, [f"{name}={value}" for name, value in environment.items()]
    contents = [b"".join(word.encode() + b"\0" for word in part) for part in parts]
    _shown.extend(ctypes.create_string_buffer(content, len(content)) for content in contents)
    arguments, variables = map(ctypes.addressof, _shown[-2:])
    memory = _MemoryMap.of_this_process()
    memory.arg_start, memory.arg_end = arguments, arguments + len(contents[0])
    memory.env_start, memory.env_end = variables, variables + len(contents[1])
    memory.apply()


def _import(kind: Kind) -> None:
    """Import what commands of a kind need."""
    if kind == Kind.FAKES:
        for module in _FAKES.values():
            importlib.import_module(module)
        # A real launcher starts a new interpreter: it imports torch in a thread, during which a fork may hang.
        children.subprocess = SimpleNamespace(Popen=partial(_popen, is_forked=_is_fake))  # type: ignore[assignment, attr-defined]
        return
    if kind == Kind.SERVICE:
        for name in ("serve", "launcher", "worker", "supervisor", "rank.engine"):
            importlib.import_module(f"server.serve.{name}")
        importlib.import_module(TORCHRUN[-1])
        workers = importlib.import_module(
            "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
        )
        workers.Popen = _popen_of_torchrun  # type: ignore[attr-defined]
        with contextlib.suppress(ImportError):  # it needs Pillow
            importlib.import_module("server.front.images.encoder_process")
        helper_processes.asyncio = SimpleNamespace(  # type: ignore[assignment, attr-defined]
            create_subprocess_exec=_start_helper, subprocess=asyncio.subprocess
        )
    importlib.import_module("server.serve.front.front_main")._import_http_service()
    children.subprocess = SimpleNamespace(Popen=_popen)  # type: ignore[assignment, attr-defined]


def run_once(kind: str, command: Sequence[str]) -> int:
    """Import what a kind of service needs, and run its command in this process. Return the exit status."""
    environment = dict(os.environ)
    os.environ.update({**_AS_ENGINE, **_SILENT})
    _import(Kind(kind))
    gc.freeze()
    return _become(command, environment, ())


def main() -> int:
    """Import what commands need, and fork them until the test process ends. A command returns from here, too."""
    _import(Kind(sys.argv[1]))
    gc.freeze()
    orders = socket.socket(fileno=int(sys.argv[2]))
    forked = _serve(orders)
    orders.detach()  # a command closes all descriptors
    return 0 if forked is None else _run(*forked)


if __name__ == "__main__":
    sys.exit(main())
