"""A meeting of the doctors of several nodes at the rendezvous endpoint, in any order, where they exchange values by stage.

The node with the endpoint's address listens there, as torchrun will; the others retry until it does. The only operation is
`gather`, which returns the values of all nodes on every node. The protocol is JSON lines over one TCP connection per node,
without torch: its import takes seconds, and a missing node should be named sooner. A waiting node logs which nodes have joined
and why the endpoint cannot be reached, after SAY_AFTER_S and then after every change.

Rejected: torch's store as the meeting point, which waits silently; HTTP, which would need polling.
"""

import errno
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from server.machine.interfaces import has_endpoint
from server.machine.report import count

SAY_AFTER_S = 3.0  # of waiting before the first message; further ones follow changes
_CONNECT_S = 3.0  # for one attempt
_RETRY_S = 0.3
_ANSWER_S = 5.0  # for the first answer of a doctor
_SEND_S = 10.0  # for sending a line
_MAX_LINE = 64 << 20  # bytes: digests of some thousand files on some hundred nodes
_VERSION = 1  # of the protocol

Say = Callable[[str], None]


class MeetingError(RuntimeError):
    """The nodes do not meet, or one has left; the message names it and a remedy."""


class Endpoint(NamedTuple):
    """The address where the nodes meet."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return HOST:PORT."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Parse HOST:PORT.

        Raises:
            MeetingError: The text has another form.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise MeetingError(f"--rdzv-endpoint is {text!r}; it must be HOST:PORT, such as 10.0.0.1:29400")
        return cls(host.strip("[]"), int(port))


class _Lines:
    """A connection for JSON lines."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._left = bytearray()

    def send(self, value: Any) -> None:
        self.connection.sendall(json.dumps(value).encode() + b"\n")

    def take(self) -> Any | None:
        """Return the next complete value, or None if there is none yet."""
        at = self._left.find(b"\n")
        if at < 0:
            return None
        line, self._left = bytes(self._left[:at]), self._left[at + 1 :]
        return json.loads(line)

    def fill(self) -> bool:
        """Read available bytes. Returns False if the other end is gone."""
        content = self.connection.recv(1 << 16)
        self._left += content
        return bool(content) and len(self._left) <= _MAX_LINE


class _Guest:
    """A node's state at the meeting point."""

    def __init__(self, lines: _Lines) -> None:
        self.lines, self.name, self.is_head, self.number = lines, "", False, -1


class _Host(threading.Thread):
    """The meeting point: accepts nodes until all have joined, then shares their values."""

    def __init__(self, listener: socket.socket, num_nodes: int) -> None:
        super().__init__(daemon=True)
        self._listener, self._num_nodes = listener, num_nodes
        self._guests: list[_Guest] = []  # nodes that have joined and not left
        self._refused: list[dict[str, Any]] = []  # notes on refused nodes, for those that join later
        self._said: dict[str, dict[int, Any]] = {}  # values by stage and node number
        self._is_full = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until all nodes have met and left."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._is_full or self._guests:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection, selectors.EVENT_READ, _Guest(_Lines(connection)))

    def _read(self, guest: _Guest) -> None:
        try:
            if not guest.lines.fill():
                return self._drop(guest)
            while (message := guest.lines.take()) is not None:
                self._take(guest, message)
        except (OSError, ValueError, KeyError, TypeError):  # gone, or not a doctor
            self._drop(guest)

    def _take(self, guest: _Guest, message: dict[str, Any]) -> None:
        if "doctor" in message:
            return self._welcome(guest, message)
        if guest not in self._guests:
            raise ValueError("stage received before the node identified itself")
        stage = message["stage"]
        said = self._said.setdefault(stage, {})
        said[guest.number] = message["value"]
        if len(said) == self._num_nodes:
            del self._said[stage]
            self._tell_all({"stage": stage, "values": [said[each] for each in range(self._num_nodes)]})
        return None

    def _welcome(self, guest: _Guest, message: dict[str, Any]) -> None:
        guest.name, guest.is_head = str(message["name"]), bool(message["is_head"])
        if refusal := self._why_refused(message):
            guest.lines.send({"refused": refusal})
            self._refused.append({"note": f"{guest.name} was refused: {refusal}"})
            self._tell_all(self._refused[-1])
            return
        while guest.name in {each.name for each in self._guests}:
            guest.name += "'"
        for note in self._refused:
            guest.lines.send(note)
        self._guests.append(guest)
        self._tell_all({"here": [each.name for each in self._guests]})
        if len(self._guests) == self._num_nodes:
            self._is_full = True
            self._guests.sort(key=lambda each: (not each.is_head, each.name))
            names = [each.name for each in self._guests]
            for number, each in enumerate(self._guests):
                each.number = number
                each.lines.send({"number": number, "names": names})

    def _why_refused(self, message: dict[str, Any]) -> str:
        if message["doctor"] != _VERSION:
            return "the versions of WideEP differ; install the same version on all nodes"
        if message["num_nodes"] != self._num_nodes:
            return (
                f"--nnodes is {message['num_nodes']}, but {self._num_nodes} on the endpoint's node; use the same "
                "number on all nodes"
            )
        if self._is_full:
            return f"{count(self._num_nodes, 'node')} have already joined; restart the doctors of all nodes"
        return ""

    def _drop(self, guest: _Guest) -> None:
        self._selector.unregister(guest.lines.connection)
        guest.lines.connection.close()
        if guest in self._guests:
            self._guests.remove(guest)
            here = [each.name for each in self._guests]
            self._tell_all({"gone": guest.name} if self._is_full else {"here": here})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for each in self._guests:
            if each.lines.connection.fileno() >= 0:
                try:
                    each.lines.send(message)
                except OSError:  # its own event handles it
                    continue


class Meeting:
    """One node's membership in a meeting."""

    def __init__(self, lines: _Lines, number: int, names: list[str], say: Say, host: _Host | None) -> None:
        self.number, self.names = number, names
        self._lines, self._say, self._host = lines, say, host

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.names)

    def gather(self, stage: str, value: Any, timeout_s: float) -> list[Any]:
        """Send a value and return those of all nodes, by number. Collective; also a barrier.

        Raises:
            MeetingError: A node has left, or some did not reach this stage in time.
        """
        until_s = time.monotonic() + timeout_s
        try:
            self._lines.send({"stage": stage, "value": value})
            while True:
                message = _next(self._lines, until_s)
                if message.get("stage") == stage:
                    return list(message["values"])
                if "gone" in message:
                    raise MeetingError(f"{message['gone']} exited early; see its doctor's output")
                if "note" in message:
                    self._say(message["note"])
        except TimeoutError as error:
            raise MeetingError(f"not all nodes reached the stage {stage!r} within {timeout_s:g} s") from error
        except OSError as error:
            raise MeetingError(f"the endpoint's node exited early ({error})") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.connection.close()
        if self._host is not None:  # other nodes may still be waiting for values
            self._host.join(_SEND_S)


def meet(endpoint: Endpoint, num_nodes: int, name: str, *, timeout_s: float, say: Say) -> Meeting:
    """Wait at the endpoint until all nodes have joined.

    Args:
        name: This node's name in messages.
        timeout_s: Maximum time to wait.
        say: Function that receives messages about the wait.

    Raises:
        MeetingError: Not all nodes joined in time, or the endpoint is unusable.
    """
    until_s = time.monotonic() + timeout_s
    _check_resolves(endpoint)
    host = _listen(endpoint, num_nodes) if has_endpoint(endpoint.host) else None
    lines = _Lines(connect(endpoint, until_s, say))
    try:
        lines.send({"doctor": _VERSION, "num_nodes": num_nodes, "name": name, "is_head": host is not None})
        number, names = _wait_for_all(lines, endpoint, num_nodes, until_s, timeout_s, say)
        return Meeting(lines, number, names, say, host)
    except BaseException:
        lines.connection.close()
        raise


def _check_resolves(endpoint: Endpoint) -> None:
    try:
        socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MeetingError(
            f"--rdzv-endpoint is {endpoint}, but this node cannot resolve the host ({error.strerror}); use an address, or a "
            "name that all nodes resolve"
        ) from error


def _listen(endpoint: Endpoint, num_nodes: int) -> _Host | None:
    """Start the meeting point. Returns None if the port is in use, perhaps by another doctor on this machine."""
    try:
        if socket.has_dualstack_ipv6():
            listener = socket.create_server(
                ("::", endpoint.port), family=socket.AF_INET6, dualstack_ipv6=True
            )
        else:
            listener = socket.create_server(("", endpoint.port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise MeetingError(
            f"cannot listen on port {endpoint.port}: {error.strerror}; choose another port"
        ) from error
    host = _Host(listener, num_nodes)
    host.start()
    return host


def connect(endpoint: Endpoint, until_s: float, say: Say) -> socket.socket:
    """Connect to the endpoint, with retries.

    Raises:
        MeetingError: No connection succeeded in time.
    """
    begun_s, said = time.monotonic(), ""
    while True:
        try:
            connection = socket.create_connection(endpoint, timeout=_CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except OSError as error:
            why = why_unreachable(str(endpoint), error)
        if time.monotonic() > until_s:
            raise MeetingError(f"this node cannot reach the endpoint: {why}")
        if why != said and time.monotonic() - begun_s > SAY_AFTER_S:
            say(f"trying to reach the endpoint: {why}")
            said = why
        time.sleep(_RETRY_S)


def why_unreachable(where: str, error: OSError) -> str:
    """Return why a connection failed, and what to check."""
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {where}; run the same command on the node with this address, and check the port"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return f"{where} does not answer; check the address and firewalls (TCP between the nodes)"
    return f"{where} is unreachable ({error.strerror or error}); check this node's interfaces and routes"


def _wait_for_all(
    lines: _Lines, endpoint: Endpoint, num_nodes: int, until_s: float, timeout_s: float, say: Say
) -> tuple[int, list[str]]:
    """Return this node's number and the names of all nodes."""
    say_at_s, here, said = time.monotonic() + SAY_AFTER_S, list[str](), list[str]()
    answer_s = time.monotonic() + _ANSWER_S
    while True:
        limit_s = min(
            [until_s, *([] if said == here and here else [say_at_s]), *([] if here else [answer_s])]
        )
        try:
            message = _next(lines, max(limit_s, time.monotonic() + 0.01))
        except TimeoutError:
            message = {}
        except (OSError, ValueError) as error:
            raise MeetingError(_no_doctor(endpoint)) from error
        if "refused" in message:
            raise MeetingError(f"this node was refused: {message['refused']}")
        if "number" in message:
            return message["number"], message["names"]
        if "note" in message:
            say(message["note"])
        here = message.get("here", here)
        now_s = time.monotonic()
        if not here and now_s >= answer_s:
            raise MeetingError(_no_doctor(endpoint))
        if now_s >= until_s:
            raise MeetingError(
                f"{who_is_here(here, num_nodes)} did not join within {timeout_s:g} s; run the same command there, and "
                f"check that they can reach {endpoint}"
            )
        if here != said and now_s >= say_at_s and len(here) < num_nodes:
            say(f"waiting for {who_is_here(here, num_nodes)}; run the same command there")
            said = here


def who_is_here(here: Sequence[str], num_nodes: int) -> str:
    """Return the number of missing nodes and the names of those that have joined, as text."""
    return f"{num_nodes - len(here)} of {count(num_nodes, 'node')} (joined: {', '.join(here)})"


def _no_doctor(endpoint: Endpoint) -> str:
    return f"another program uses {endpoint} (perhaps a running service); stop it, or choose another port in --rdzv-endpoint"


def _next(lines: _Lines, until_s: float) -> dict[str, Any]:
    """Return the next message.

    Raises:
        TimeoutError: No message came in time. OSError: The other end is gone.
    """
    while (message := lines.take()) is None:
        lines.connection.settimeout(max(0.001, until_s - time.monotonic()))
        if not lines.fill():
            raise ConnectionResetError("the connection was closed")
    lines.connection.settimeout(_SEND_S)
    return dict(message)
