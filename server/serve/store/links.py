"""Measure the links between nodes, pair by pair: reachability at gloo's address, bandwidth, latency and clock skew.

Each node listens on a free port of the address that gloo will use, as gloo does. A firewall or a wrong interface is therefore
named within seconds, whereas gloo would wait for minutes. Then the nodes measure in pairs, each node in one pair at a time. A
figure is for one TCP connection; several, or RDMA, may be faster. No torch or cluster key is needed, and no data is exposed.
"""

import concurrent.futures
import contextlib
import ipaddress
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from server.machine.interfaces import Taken
from server.machine.report import Check, failure, ok, warning
from server.serve.preflight.equal import identity
from server.serve.store.meeting import why_unreachable

REACH_S = 5.0  # for an answer of a node
STAGE_S = 60.0  # for all nodes to reach a stage
_NUM_PINGS = 200
_PING_BYTES = 64
_CHUNK = 1 << 20
_PROBE_CHUNKS, _MOST_CHUNKS = 4, 512
_STREAM_S = 0.3  # target duration per direction
_MEASURE_S = 20.0  # for one pair
_SLOW_GBIT = 1.0
_SLOW_MS = 1.0
_MOST_SKEW_S = 1.0  # larger skew confuses readers of logs and traces from several nodes
_PING, _SEND, _RECEIVE, _CLOCK = b"p", b"s", b"r", b"c"


class Gathers(Protocol):
    """The part of `meeting.Meeting` that checks between nodes use."""

    @property
    def number(self) -> int: ...
    @property
    def names(self) -> Sequence[str]: ...
    def gather(self, stage: str, value: Any, timeout_s: float) -> list[Any]: ...


class LinkFigures(NamedTuple):
    """Measurements of one pair."""

    latency_ms: float  # median round trip of a small message
    latency_p99_ms: float
    there_gbit: float  # from the node with the lower number
    back_gbit: float
    skew_s: float  # the other node's clock minus this one's


class LinkListener:
    """Answers other nodes' measurements on background threads until closed."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of a local address.

        Raises:
            OSError: The address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


@contextlib.contextmanager
def listening(taken: Taken) -> Iterator[int]:
    """Listen on the address that gloo will use. Yields the port, or 0 if that fails, which the other nodes will notice."""
    try:
        listener = LinkListener(taken.address) if taken.address else None
    except OSError:
        listener = None
    try:
        yield 0 if listener is None else listener.port
    finally:
        if listener is not None:
            listener.close()


def _answer(connection: socket.socket) -> None:
    """Serve the other end's measurements until it disconnects."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(_MEASURE_S)
    with connection:
        try:
            while asked := connection.recv(1):
                amount = int.from_bytes(_take(connection, 8), "big")
                if asked == _PING:
                    connection.sendall(_take(connection, _PING_BYTES))
                elif asked == _SEND:
                    _drain(connection, amount)
                    connection.sendall(b"k")
                elif asked == _RECEIVE:
                    _pour(connection, amount)
                elif asked == _CLOCK:
                    connection.sendall(time.time_ns().to_bytes(8, "big"))
        except OSError:  # the other end has left and reports it
            return


def _take(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        piece = connection.recv(size - len(content))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        content += piece
    return bytes(content)


def _drain(connection: socket.socket, size: int) -> None:
    room = memoryview(bytearray(_CHUNK))
    while size > 0:
        got = connection.recv_into(room, min(size, _CHUNK))
        if not got:
            raise ConnectionResetError("the connection was closed")
        size -= got


def _pour(connection: socket.socket, size: int) -> None:
    chunk = bytes(_CHUNK)
    for _ in range(size // _CHUNK):
        connection.sendall(chunk)


def reach(gathers: Gathers, taken: Taken, port: int) -> list[Check]:
    """Connect every node to every other at gloo's address, and return failures by pair. Collective.

    Args:
        port: Port of this node's listener.
    """
    network = identity().network
    places = gathers.gather("places", [taken.address, port, taken.interface, network], STAGE_S)
    others = [number for number in range(len(places)) if number != gathers.number]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(others))) as threads:
        whys = list(threads.map(lambda number: _why_not_reached(places[number], network), others))
    problems = dict(zip(others, whys, strict=True))
    found = gathers.gather("reach", {str(number): why for number, why in problems.items() if why}, STAGE_S)
    wrong = [
        failure(
            "reach", f"{gathers.names[number]} cannot reach {gathers.names[int(other)]} on {places[int(other)][2]}: {why}",
            "allow TCP between the nodes (docs/nodes.md lists the ports), or set GLOO_SOCKET_IFNAME there",
        )
        for number, its in enumerate(found)
        for other, why in its.items()
    ]  # fmt: skip
    where = ", ".join(f"{name} on {place[2]}" for name, place in zip(gathers.names, places, strict=True))
    return wrong or [ok("reach", f"every node reaches every other: {where}")]


def _why_not_reached(place: Sequence[Any], own_network: str) -> str:
    address, port, interface, network = place
    if not address:
        return f"{interface} has no address there"
    if network != own_network and ipaddress.ip_address(address).is_loopback:
        return f"{address} is a loopback address"
    try:
        with socket.create_connection((address, port), timeout=REACH_S) as connection:
            connection.settimeout(REACH_S)
            connection.sendall(_CLOCK + bytes(8))
            _take(connection, 8)
            return ""
    except OSError as error:
        return why_unreachable(f"{address} port {port}", error).partition(";")[0]


def rounds_of_pairs(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds with at most one pair per node, such that each pair meets once (the circle method)."""
    seats = [*range(num_nodes), *([-1] if num_nodes % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure(gathers: Gathers, taken: Taken, port: int) -> list[Check]:
    """Measure every pair and return all results. Collective; all nodes must reach each other."""
    places = gathers.gather("measured places", [taken.address, port], STAGE_S)
    own: dict[str, Any] = {}
    for number, pairs in enumerate(rounds_of_pairs(len(places))):
        for one, other in pairs:
            if one == gathers.number:
                own[str(other)] = _measured(*places[other])
        gathers.gather(f"round {number}", None, STAGE_S + _MEASURE_S)
    found = gathers.gather("figures", own, STAGE_S)
    figures: dict[tuple[int, int], LinkFigures | str] = {
        (one, int(other)): each if isinstance(each, str) else LinkFigures(*each)
        for one, its in enumerate(found)
        for other, each in its.items()
    }
    return judge(gathers.names, figures)


def _measured(address: str, port: int) -> LinkFigures | str:
    """Measure the link to a node. Returns the reason as text if that fails."""
    try:
        with socket.create_connection((address, port), timeout=REACH_S) as connection:
            connection.settimeout(_MEASURE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = sorted(_ping_s(connection) for _ in range(_NUM_PINGS))
            there, back = (_gbit(connection, asked) for asked in (_SEND, _RECEIVE))
            return LinkFigures(
                statistics.median(trips) * 1e3, trips[int(_NUM_PINGS * 0.99)] * 1e3, there, back, _skew_s(connection)
            )  # fmt: skip
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def _ping_s(connection: socket.socket) -> float:
    begun_s = time.perf_counter()
    connection.sendall(_PING + bytes(8) + bytes(_PING_BYTES))
    _take(connection, _PING_BYTES)
    return time.perf_counter() - begun_s


def _skew_s(connection: socket.socket) -> float:
    """Return the other clock minus this one, from the fastest of 20 round trips (as in NTP)."""
    best_s, skew_s = float("inf"), 0.0
    for _ in range(20):
        sent_ns = time.time_ns()
        connection.sendall(_CLOCK + bytes(8))
        theirs_ns = int.from_bytes(_take(connection, 8), "big")
        came_ns = time.time_ns()
        if (came_ns - sent_ns) / 1e9 < best_s:
            best_s, skew_s = (came_ns - sent_ns) / 1e9, (theirs_ns - (sent_ns + came_ns) / 2) / 1e9
    return skew_s


def _gbit(connection: socket.socket, asked: bytes) -> float:
    """Return the bandwidth of one direction. A short probe determines how much to send in about `_STREAM_S`."""
    seconds = _stream_s(connection, asked, _PROBE_CHUNKS)
    chunks = max(_PROBE_CHUNKS, min(_MOST_CHUNKS, int(_PROBE_CHUNKS * _STREAM_S / max(seconds, 1e-6))))
    return chunks * _CHUNK * 8 / 1e9 / max(_stream_s(connection, asked, chunks), 1e-9)


def _stream_s(connection: socket.socket, asked: bytes, chunks: int) -> float:
    begun_s, size = time.perf_counter(), chunks * _CHUNK
    connection.sendall(asked + size.to_bytes(8, "big"))
    if asked == _SEND:
        _pour(connection, size)
        _take(connection, 1)
    else:
        _drain(connection, size)
    return time.perf_counter() - begun_s


def judge(names: Sequence[str], figures: dict[tuple[int, int], LinkFigures | str]) -> list[Check]:
    """Return a check for every pair, and checks of the clocks."""
    whole = [each for each in figures.values() if isinstance(each, LinkFigures)]
    typical = statistics.median([min(each.there_gbit, each.back_gbit) for each in whole]) if whole else 0.0
    checks = []
    for (one, other), each in sorted(figures.items()):
        pair = f"{names[one]} and {names[other]}"
        if isinstance(each, str):
            checks.append(failure("link", f"{pair}: the measurement failed: {each}", "run the doctor again and check both nodes"))  # fmt: skip
            continue
        checks.append(_judge_link(pair, each, typical))
        if abs(each.skew_s) > _MOST_SKEW_S:
            text = f"the clock of {names[other]} is {each.skew_s:+.1f} s off that of {names[one]}"
            checks.append(
                warning("clocks", text, "synchronise both with a time server (chrony)", skew_s=each.skew_s)
            )
    if whole and not any(check.name == "clocks" for check in checks):
        most = max(abs(each.skew_s) for each in whole)
        checks.append(ok("clocks", f"at most {most * 1e3:.0f} ms apart", skew_s=most))
    return checks


def _judge_link(pair: str, each: LinkFigures, typical_gbit: float) -> Check:
    text = (
        f"{pair}: {each.there_gbit:.1f} and {each.back_gbit:.1f} Gbit/s, round trip {each.latency_ms:.2f} ms "
        f"(p99 {each.latency_p99_ms:.2f} ms)"
    )
    slowest = min(each.there_gbit, each.back_gbit)
    measured = each._asdict()
    if slowest < _SLOW_GBIT or each.latency_ms > _SLOW_MS:
        return warning("link", f"{text}, which is slow", "see docs/nodes.md on slow links, and check the interface", **measured)  # fmt: skip
    if slowest < typical_gbit / 2:
        return warning("link", f"{text}; the median of all pairs is {typical_gbit:.1f} Gbit/s", "check the cable and the port", **measured)  # fmt: skip
    return ok("link", text, **measured)
