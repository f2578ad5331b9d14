"""Limit the number of open connections, and accept new ones.

Each connection costs a descriptor, which the front needs for its ranks as well. Connections are limited in total and per
address (an IPv4 address, or an IPv6 /64 network, which belongs to one customer). At a limit, the longest idle connection of
the address with the most connections is closed. If no connection is idle, the new one gets 503. An idle connection has no
request: it rests between two, or has not sent a whole head. So silent connections cannot lock out other clients.
Loopback, Unix sockets and trusted proxies serve many clients, so only the total limit applies to them.
Several fronts count the connections of an address together. Each of them closes only its own ones.

asyncio's own server accepts up to 2,048 connections in a row, and logs a traceback for each of them when descriptors run out
(bpo-27906). It also drops the connections in the backlog when it closes. `Listener` replaces it.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Protocol

OWN_DESCRIPTORS = 256  # for ranks, files and libraries; the rest is for connections
MOST_BY_DEFAULT = 16_384
_ACCEPTED_AT_ONCE = 64  # before other tasks run
_RETRY_S = 0.1  # after descriptors have run out
_LOG_EVERY_S = 1.0
_HANDSHAKE_S = 10.0  # for TLS
_EVICTED_AT_ONCE = 16
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG = logging.getLogger("wideep.front")


def default_most(num_descriptors: int) -> int:
    """Return the default limit of connections for a limit of descriptors."""
    room = num_descriptors - min(OWN_DESCRIPTORS, num_descriptors // 2)
    return max(1, min(room, MOST_BY_DEFAULT))


class Connection(Protocol):
    """One client's connection."""

    def make_room(self) -> None:
        """Close this idle connection, because others need its place."""


class SharedConnections(Protocol):
    """The connections of all fronts by address: one of several fronts counts its own in it."""

    num_fronts: int

    def count_connection(self, address: str, by: int) -> None:
        """Count a connection that opens, or with -1 one that closes."""

    def num_connections_of(self, address: str) -> int:
        """Return the number of open connections of an address."""


class ConnectionBound:
    """The open connections, and which of them are idle."""

    def __init__(
        self,
        most: int,
        most_per_address: int | None = None,
        exempt: Collection[str] = (),
        shared: SharedConnections | None = None,
    ) -> None:
        """Begin without connections.

        Args:
            most_per_address: At all fronts; half of all connections by default.
            exempt: Addresses and networks, or "*" for all.
            shared: The connections of all fronts if there are several.
        """
        self.most, self._shared = most, shared
        if most_per_address is None and shared is not None:
            most_per_address = most * shared.num_fronts // 2
        self._most_per_address = most_per_address or max(1, most // 2)
        self._exempts_all = "*" in exempt
        self._exempt = [ip_network(each, strict=False) for each in exempt if each != "*"]
        self._sources: dict[Connection, str] = {}  # of open connections
        self._counts: Counter[str] = Counter()  # by source
        self._idle: dict[str, dict[Connection, None]] = {}  # by source, the longest idle first

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._sources)

    def enter(self, connection: Connection, host: str | None) -> bool:
        """Add a new idle connection; return whether it may stay."""
        source = self._source_of(host)
        if source and self._num_of(source) >= self._most_per_address and not self._evict_of(source):
            return False
        if len(self._sources) >= self.most and not self.evict(1):
            return False
        self._sources[connection] = source
        self._count(source, 1)
        self.rest(connection)
        return True

    def leave(self, connection: Connection) -> None:
        """Remove a connection. May be called again."""
        self.work(connection)
        source = self._sources.pop(connection, None)
        if source is not None:
            self._count(source, -1)
            if not self._counts[source]:
                del self._counts[source]

    def rest(self, connection: Connection) -> None:
        """Mark a connection as idle."""
        source = self._sources.get(connection)
        if source is not None:
            self._idle.setdefault(source, {})[connection] = None

    def work(self, connection: Connection) -> None:
        """Mark a connection as busy with a request."""
        source = self._sources.get(connection)
        idle = None if source is None else self._idle.get(source)
        if source is not None and idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[source]

    def evict(self, num: int) -> int:
        """Close up to `num` idle connections of the largest sources; return how many were closed."""
        num_closed = 0
        while num_closed < num and self._idle:
            self._evict_of(max(self._idle, key=lambda source: self._counts[source]))
            num_closed += 1
        return num_closed

    def _count(self, source: str, by: int) -> None:
        self._counts[source] += by
        if source and self._shared is not None:
            self._shared.count_connection(source, by)

    def _num_of(self, source: str) -> int:
        return self._counts[source] if self._shared is None else self._shared.num_connections_of(source)

    def _evict_of(self, source: str) -> bool:
        connection = next(iter(self._idle.get(source, ())), None)
        if connection is None:
            return False
        self.leave(connection)
        connection.make_room()
        return True

    def _source_of(self, host: str | None) -> str:
        """Return the source that a connection counts for, or "" if it is exempt."""
        try:
            address = ip_address((host or "").partition("%")[0])
        except ValueError:  # a Unix socket
            return ""
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_loopback or self._exempts_all or any(address in each for each in self._exempt):
            return ""
        if isinstance(address, IPv6Address):
            return str(ip_network((address, 64), strict=False))
        return str(address)


class Listener:
    """Accepts connections from bound sockets."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        bound: ConnectionBound,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sockets, self._make_protocol, self._bound, self._tls = sockets, make_protocol, bound, tls
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], None] = {}  # in order; a TLS handshake takes time
        self._retries: set[asyncio.TimerHandle] = set()
        self._logged_s = -_LOG_EVERY_S
        self._num_unlogged = 0

    def start(self) -> None:
        """Start accepting."""
        for each in self._sockets:
            each.setblocking(False)
            self._loop.add_reader(each, self._accept, each)

    async def close(self) -> None:
        """Accept the connections that already wait, and no more. Returns when those are open."""
        for each in self._sockets:
            self._loop.remove_reader(each)
            with contextlib.suppress(OSError):
                each.listen(0)  # the kernel's queue accepts no more, so that it can be emptied
            while self._take_one(each):
                pass
            each.close()
        for timer in self._retries:  # also those that the last connections started
            timer.cancel()
        if self._opening:
            await asyncio.wait(self._opening, timeout=1.0)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if not self._take_one(listener):
                return

    def _take_one(self, listener: socket.socket) -> bool:
        """Accept one connection; return whether another may wait."""
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionAbortedError:
            return True
        except OSError as error:
            self._complain(error)
            if error.errno in _EXHAUSTED:
                self._bound.evict(_EVICTED_AT_ONCE)
                self._pause(listener)
            return False
        accepted.setblocking(False)
        task = self._loop.create_task(self._open(accepted))
        self._opening[task] = None
        task.add_done_callback(lambda done: self._opening.pop(done, None))
        if self._tls is not None and len(self._opening) > max(_ACCEPTED_AT_ONCE, self._bound.most // 2):
            next(iter(self._opening)).cancel()  # a client may never finish its handshake
        return True

    async def _open(self, accepted: socket.socket) -> None:
        seconds = None if self._tls is None else _HANDSHAKE_S
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, accepted, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError as error:  # the client is gone, or does not use TLS
            _LOG.debug("failed to open a connection: %s", error)
            accepted.close()

    def _pause(self, listener: socket.socket) -> None:
        """Stop accepting for a moment, because the kernel keeps reporting the waiting connection."""
        if listener.fileno() < 0:
            return
        self._loop.remove_reader(listener)

        def resume() -> None:
            self._retries.discard(timer)
            self._loop.add_reader(listener, self._accept, listener)

        timer = self._loop.call_later(_RETRY_S, resume)
        self._retries.add(timer)

    def _complain(self, error: OSError) -> None:
        """Log a failure to accept, at most once per second."""
        now_s = self._loop.time()
        if now_s - self._logged_s < _LOG_EVERY_S:
            self._num_unlogged += 1
            return
        more = f"; {self._num_unlogged} more since the last line" if self._num_unlogged else ""
        self._logged_s, self._num_unlogged = now_s, 0
        _LOG.error(
            "cannot accept a connection: %s (%d are open)%s", error.strerror, self._bound.num_open, more
        )
