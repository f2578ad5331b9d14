"""Doctors of several nodes meet at the rendezvous endpoint, in any order, and tell each other values, stage by stage.

The node whose address the endpoint has listens there, as torchrun will; the others try again until it does. From then on
there is one operation: `gather` gives every node what all nodes gave, by node. Lines of JSON on one TCP connection per node, and no
torch: its import takes seconds, in which a node that is missing should have been named. Who waits is told soon, and
repeatedly, who is here and what the way to the endpoint lacks.

Rejected: torch's store as the meeting point, which waits in silence; HTTP, whose requests would poll.
"""

import errno
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from server.doctor.interfaces import has_endpoint
from server.doctor.report import count

SAY_AFTER_S = 3.0  # of waiting; then whenever something has changed
_CONNECT_S = 3.0  # for one attempt
_RETRY_S = 0.3
_ANSWER_S = 5.0  # for a doctor to answer at all
_SEND_S = 10.0  # for a node to take a line
_MAX_LINE = 64 << 20  # bytes: the digests of some thousand files from each of some hundred nodes
_VERSION = 1  # of these lines

Say = Callable[[str], None]


class MeetingError(RuntimeError):
    """The nodes do not meet, or one has left; the message says which, and what to do."""


class Endpoint(NamedTuple):
    """Where the nodes meet."""

    host: str
    port: int

    def __str__(self) -> str:
        """As it was given."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Read HOST:PORT.

        Raises:
            MeetingError: it is none.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise MeetingError(f"--rdzv-endpoint is {text!r}; give HOST:PORT, such as 10.0.0.1:29400")
        return cls(host.strip("[]"), int(port))


class _Lines:
    """A connection that carries JSON lines."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._left = bytearray()

    def send(self, value: Any) -> None:
        self.connection.sendall(json.dumps(value).encode() + b"\n")

    def take(self) -> Any | None:
        """Return a value that has come whole; None: there is none yet."""
        at = self._left.find(b"\n")
        if at < 0:
            return None
        line, self._left = bytes(self._left[:at]), self._left[at + 1 :]
        return json.loads(line)

    def fill(self) -> bool:
        """Read what has come; False: the other end is gone."""
        content = self.connection.recv(1 << 16)
        self._left += content
        return bool(content) and len(self._left) <= _MAX_LINE


class _Guest:
    """A node, as the meeting point knows it."""

    def __init__(self, lines: _Lines) -> None:
        self.lines, self.name, self.is_head, self.number = lines, "", False, -1


class _Host(threading.Thread):
    """The meeting point: takes nodes until all are here, then hands round what they say."""

    def __init__(self, listener: socket.socket, num_nodes: int) -> None:
        super().__init__(daemon=True)
        self._listener, self._num_nodes = listener, num_nodes
        self._guests: list[_Guest] = []  # that have said who they are, and have not left
        self._refused: list[dict[str, Any]] = []  # notes of who was, for those who come later
        self._said: dict[str, dict[int, Any]] = {}  # by stage and number
        self._is_full = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until all have met and left."""
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
        except (OSError, ValueError, KeyError, TypeError):  # gone, or no doctor
            self._drop(guest)

    def _take(self, guest: _Guest, message: dict[str, Any]) -> None:
        if "doctor" in message:
            return self._welcome(guest, message)
        if guest not in self._guests:
            raise ValueError("a stage of somebody who has not said who they are")
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
            self._refused.append({"note": f"{guest.name} came and was refused: {refusal}"})
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
            return "its doctor is of another version of WideEP; install the same version on all nodes"
        if message["num_nodes"] != self._num_nodes:
            return (
                f"--nnodes is {message['num_nodes']} there and {self._num_nodes} where the endpoint is; give the same "
                "number on all nodes"
            )
        if self._is_full:
            return f"{count(self._num_nodes, 'node')} are here already; start the doctors of all nodes again"
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
                except OSError:  # its own event will say so
                    continue


class Meeting:
    """One node's place among all that have met."""

    def __init__(self, lines: _Lines, number: int, names: list[str], say: Say, host: _Host | None) -> None:
        self.number, self.names = number, names
        self._lines, self._say, self._host = lines, say, host

    @property
    def num_nodes(self) -> int:
        """How many have met."""
        return len(self.names)

    def gather(self, stage: str, value: Any, timeout_s: float) -> list[Any]:
        """Give a value, and return what all nodes gave, by number. Collective; also a barrier.

        Raises:
            MeetingError: a node has left, or not all came to this stage in time.
        """
        until_s = time.monotonic() + timeout_s
        try:
            self._lines.send({"stage": stage, "value": value})
            while True:
                message = _next(self._lines, until_s)
                if message.get("stage") == stage:
                    return list(message["values"])
                if "gone" in message:
                    raise MeetingError(f"{message['gone']} has ended early; see what its doctor says there")
                if "note" in message:
                    self._say(message["note"])
        except TimeoutError as error:
            raise MeetingError(f"not all nodes came to {stage!r} within {timeout_s:g} s") from error
        except OSError as error:
            raise MeetingError(f"the node of the endpoint has ended early ({error})") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.connection.close()
        if self._host is not None:  # others may still have to be told what all said
            self._host.join(_SEND_S)


def meet(endpoint: Endpoint, num_nodes: int, name: str, *, timeout_s: float, say: Say) -> Meeting:
    """Wait at the endpoint until all nodes are there.

    Args:
        name: this node's, for people.
        timeout_s: how long to wait.
        say: told who and what is waited for.

    Raises:
        MeetingError: they do not come, or the endpoint is no place to meet.
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
            f"--rdzv-endpoint is {endpoint}, whose host this node does not know ({error.strerror}); give an address, or a "
            "name that all nodes resolve"
        ) from error


def _listen(endpoint: Endpoint, num_nodes: int) -> _Host | None:
    """Be the meeting point; None: something listens here already, perhaps another node's doctor on this machine."""
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
            f"cannot listen on port {endpoint.port}: {error.strerror}; give another port"
        ) from error
    host = _Host(listener, num_nodes)
    host.start()
    return host


def connect(endpoint: Endpoint, until_s: float, say: Say) -> socket.socket:
    """Connect to the endpoint, as soon as somebody listens there.

    Raises:
        MeetingError: nobody did in time, or no way leads there.
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
    """Say why a connection was not made, and what to look at."""
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {where}; start the same line on the node whose address that is, and check the port"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return f"{where} does not answer; check the address, and that a firewall lets TCP through between the nodes"
    return f"no way leads to {where} ({error.strerror or error}); check this node's interfaces and routes"


def _wait_for_all(
    lines: _Lines, endpoint: Endpoint, num_nodes: int, until_s: float, timeout_s: float, say: Say
) -> tuple[int, list[str]]:
    """Return this node's number, and the names of all."""
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
                f"{who_is_here(here, num_nodes)} did not come within {timeout_s:g} s; start the same line there, and "
                f"check that they reach {endpoint}"
            )
        if here != said and now_s >= say_at_s and len(here) < num_nodes:
            say(f"waiting for {who_is_here(here, num_nodes)}; start the same line there")
            said = here


def who_is_here(here: Sequence[str], num_nodes: int) -> str:
    """Say how many are missing, and who is not."""
    return f"{num_nodes - len(here)} of {count(num_nodes, 'node')} (here: {', '.join(here)})"


def _no_doctor(endpoint: Endpoint) -> str:
    return f"what listens at {endpoint} is no doctor (a service that runs?); end it, or give another port in --rdzv-endpoint"


def _next(lines: _Lines, until_s: float) -> dict[str, Any]:
    """Return the next line.

    Raises:
        TimeoutError: none came in time. OSError: the other end is gone.
    """
    while (message := lines.take()) is None:
        lines.connection.settimeout(max(0.001, until_s - time.monotonic()))
        if not lines.fill():
            raise ConnectionResetError("the connection was closed")
    lines.connection.settimeout(_SEND_S)
    return dict(message)
