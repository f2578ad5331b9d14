"""The fronts of other nodes, as one of this node sees them (`--fronts per-node`): streams for their boards, and connections.

The first front of a node sends the changes of its node's board (`front.several.mirror`) to that of each other node and takes theirs.
A stream that breaks begins again with everything. While the first front of a node is away, the node's other fronts report to the
leading node that the node is there (`_keep_reporting`). Their requests continue, and decisions that every front must know wait.
Rejected: another front that exchanges boards meanwhile. Two fronts could then send the same cells in any order.

Requests that a front of another node must answer arrive at a Unix socket in this front, as if that front were on this node
(`http.several.forwarding`). This module carries the bytes of each such connection to the other front, which passes them on to its own
socket. All streams use the ports for ranks: they need the token, and with a cluster key every message is sealed.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc.aio
import numpy as np

from server.front.several.front_map import FENCE_S, LEADING_NODE, LOST_S, FrontMap
from server.front.several.mirror import Mirror, empty_change
from server.front.several.seat import Seat
from server.http.several.forwarding import WAIT_S
from server.link.front_peers import FrontPeer, PeerLostError, stream_to
from server.link.messages import BoardChange, MirrorOf, Tunnel, TunnelBytes
from server.link.ranks import PeerStream
from server.machine.tasks import logging_errors

EVERY_S = 0.02  # between two looks at changes of the board
_ALL_EVERY_S = 0.25  # the same for prefixes, sessions and the counts of connections by address
_BEAT_S = 0.5  # without changes, an empty one
_SILENT_S = 3.0  # without a message of that node, a stream to it begins again
_RETRY_S = 0.1
_CONNECT_S = 2.0  # for another front to accept a stream
_REPORT_AFTER_S = 1.5  # without a message of the leading node: at least two beats are missing
_REPORT_EVERY_S = 0.5
_MOST_PENDING = 1000  # changes; a receiver that is further behind gets everything
_CHUNK_BYTES = 1 << 17
_LOG = logging.getLogger("wideep.front")
Relay = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class OtherNodes:
    """The streams of this front to and from the fronts of other nodes."""

    def __init__(self, seat: Seat, fronts: FrontMap, cluster_key: bytes | None, *, is_again: bool) -> None:
        """Begin; `start` opens the streams.

        Args:
            is_again: Whether the service ran before this process, so that each node has been heard.
        """
        self._seat, self._fronts, self._key = seat, fronts, cluster_key
        self._mirror = Mirror(seat, fronts) if seat.number == fronts.near.start else None
        # By node: when a message came from it; None before the first one of the service.
        self._heard_s: dict[int, float | None] = dict.fromkeys(
            fronts.other_nodes, time.monotonic() if is_again else None
        )
        self._lost: set[int] = set()  # nodes
        self._outboxes: dict[int, asyncio.Queue[BoardChange]] = {}  # of open streams, by node
        self._tasks: list[asyncio.Task[None]] = []
        self._serving: set[asyncio.Task[None]] = set()  # streams that others have opened
        self._relays: list[asyncio.Server] = []
        self.on_lost: Callable[[int], None] = lambda _node: None
        self.on_back: Callable[[int], None] = lambda _node: None
        self._note_reached()

    @property
    def lost_fronts(self) -> tuple[int, ...]:
        """The fronts of nodes that do not answer."""
        return tuple(number for node in sorted(self._lost) for number in self._fronts.fronts_of(node))

    @property
    def ports(self) -> frozenset[int]:
        """The ports of other nodes' fronts."""
        far = (
            self._fronts.addresses[number]
            for node in self._fronts.other_nodes
            for number in self.fronts_of(node)
        )
        return frozenset(int(address.rpartition(":")[2]) for address in far)

    def fronts_of(self, node: int) -> range:
        """Return the numbers of a node's fronts."""
        return self._fronts.fronts_of(node)

    async def start(self) -> None:
        """Listen for connections to other nodes' fronts, and exchange boards if this is the first front of its node."""
        near = self._fronts.near
        for number in range(self._fronts.num_fronts):
            if number not in near:
                path = self._seat.socket_path(number)
                if os.path.lexists(path):
                    os.unlink(path)
                self._relays.append(await asyncio.start_unix_server(self._relay_to(number), path))
        if self._mirror is not None:
            work = [self._keep_sending(self._mirror, node) for node in self._fronts.other_nodes]
            self._tasks = [asyncio.create_task(each) for each in (self._keep_looking(self._mirror), *work)]
        elif self._fronts.node != LEADING_NODE:
            self._tasks = [asyncio.create_task(self._keep_reporting())]

    async def close(self) -> None:
        """End all streams."""
        for relay in self._relays:
            relay.close()
        tasks = [*self._tasks, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def serve(self, stream: PeerStream[MirrorOf | Tunnel]) -> None:
        """Serve a stream that a front of another node has opened, until it or this front ends."""
        serving = asyncio.create_task(self._serve(stream))
        self._serving.add(serving)
        try:
            await asyncio.wait([serving])  # not cancelled by `close`, so gRPC ends the stream in order
        finally:
            self._serving.discard(serving)
            serving.cancel()
        if not serving.cancelled():
            serving.result()

    async def _serve(self, stream: PeerStream[MirrorOf | Tunnel]) -> None:
        if isinstance(stream.first, Tunnel):
            await self._serve_tunnel(stream)
            return
        node, mirror = stream.first.node, self._mirror
        if mirror is None or node not in self._heard_s:
            raise ValueError(f"front {self._seat.number} has no use for the changes of node {node}")
        try:
            async for change in stream.received():
                if node in self._lost and not change.is_whole:
                    return  # its rows were cleared: it begins again with everything
                mirror.apply(node, change)
                self._hear(node)
        except (ValueError, OSError) as error:
            _LOG.error("cannot follow the fronts of node %d: %s", node, error)

    def _hear(self, node: int) -> None:
        self._heard_s[node] = time.monotonic()
        if node in self._lost:
            self._lost.discard(node)
            self.on_back(node)

    async def _keep_looking(self, mirror: Mirror) -> None:
        """Send the changes of this node's board to all open streams, and notice lost nodes."""
        all_s = sent_s = 0.0  # when everything was looked at, and when a change was sent
        while True:
            now_s = time.monotonic()
            is_due, beats = now_s - all_s >= _ALL_EVERY_S, now_s - sent_s >= _BEAT_S
            all_s = now_s if is_due else all_s
            with logging_errors("cannot send the changes of this node's fronts"):
                sent_s = now_s if self._send_changes(mirror, of_all=is_due, beats=beats) else sent_s
                self._look_for_lost(mirror, now_s)
            await asyncio.sleep(EVERY_S)

    def _send_changes(self, mirror: Mirror, *, of_all: bool, beats: bool) -> bool:
        """Send what has changed. Without changes, send an empty one if it `beats`. Returns whether something was sent."""
        change = mirror.take_changes(of_all=of_all) or (mirror.beat() if beats else None)
        if change is None:
            return False
        for outbox in self._outboxes.values():
            outbox.put_nowait(change)
        return True

    def _look_for_lost(self, mirror: Mirror, now_s: float) -> None:
        for node, heard_s in self._heard_s.items():
            if heard_s is not None and node not in self._lost and now_s - heard_s > LOST_S:
                self._lost.add(node)
                mirror.lose(node)
                self.on_lost(node)

    async def _keep_sending(self, mirror: Mirror, node: int) -> None:
        """Send this node's board to another node, over successive streams."""
        address = self._fronts.first_address(node)
        while True:
            with logging_errors(f"cannot send to the fronts of node {node}"):
                try:
                    await self._reach(node, address)
                    async with self._stream_to(address, MirrorOf(self._fronts.node)) as peer:
                        await self._send_all(mirror, node, peer)
                except OSError as error:
                    _LOG.debug("no stream to the fronts of node %d: %s", node, error)
                finally:
                    self._outboxes.pop(node, None)
            await asyncio.sleep(_RETRY_S)

    async def _reach(self, node: int, address: str) -> None:
        """Connect to the port of another front once. A machine that refuses is there: its front is being restarted.

        Raises:
            OSError: The port accepts no connection.
        """
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            if node == LEADING_NODE:
                self._note_reached()
            raise
        writer.close()

    def _note_reached(self) -> None:
        """Record that the leading node is there. If it was silent for too long, only its next message counts, which has the newest
        state: it may have decided without regard to this node."""
        if self._seat.board.leader_silent_s <= FENCE_S:
            self._seat.board.note_leader()

    async def _keep_reporting(self) -> None:
        """Report to the leading node that this one is there, while the first front of this node does not."""
        while True:
            with logging_errors("cannot report to the leading node"):
                if _REPORT_AFTER_S < self._seat.board.leader_silent_s <= FENCE_S:
                    await self._report()
            await asyncio.sleep(_REPORT_EVERY_S)

    async def _report(self) -> None:
        """Let the leading front hear of this node once, if it can be reached. A process that is stopped does not take the message."""
        address = self._fronts.first_address(LEADING_NODE)
        try:
            await self._reach(LEADING_NODE, address)
            async with (
                asyncio.timeout(_CONNECT_S),
                self._stream_to(address, MirrorOf(self._fronts.node)) as peer,
            ):
                await peer.send(empty_change())
                await peer.finish()
        except OSError as error:
            _LOG.debug("the leading node cannot be reached: %s", error)
        else:
            self._note_reached()

    async def _send_all(self, mirror: Mirror, node: int, peer: FrontPeer) -> None:
        """Send everything, and then every change until that node is silent.

        Raises:
            PeerLostError: It does not take or send messages any more.
        """
        outbox = self._outboxes[node] = asyncio.Queue()
        begun_s = time.monotonic()
        await peer.send(mirror.everything())
        while True:
            await peer.send(await outbox.get())
            heard_s = max(begun_s, self._heard_s[node] or 0.0)
            if outbox.qsize() > _MOST_PENDING or time.monotonic() - heard_s > _SILENT_S:
                raise PeerLostError("it does not read or send")

    def _relay_to(self, number: int) -> Relay:
        """Return the server of connections to a front of another node."""

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            until_s = time.monotonic() + WAIT_S
            try:
                while not await self._carry(number, reader, writer) and time.monotonic() < until_s:
                    await asyncio.sleep(_RETRY_S)
            finally:
                writer.close()

        return relay

    async def _carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Carry a connection's bytes to another front and back until it ends. Returns whether that front has accepted it."""
        is_accepted = False
        with contextlib.suppress(OSError):  # the stream broke, and so does the connection
            async with self._stream_to(self._fronts.addresses[number], Tunnel()) as peer:
                received = peer.received()
                is_accepted = isinstance(await anext(received, None), Tunnel)
                if is_accepted:
                    await _until_one_ends(_send_bytes(reader, peer), _write_bytes(received, writer))
        return is_accepted

    async def _serve_tunnel(self, stream: PeerStream[Any]) -> None:
        """Connect a front of another node to this front's socket for other fronts."""
        path = self._seat.socket_path(self._seat.number)
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:  # it does not listen yet
            return
        try:
            with contextlib.suppress(grpc.aio.BaseError):  # that front does not wait any more
                await stream.send(Tunnel())
            await _until_one_ends(_send_bytes(reader, stream), _write_bytes(stream.received(), writer))
        finally:
            writer.close()

    def _stream_to(self, address: str, first: object) -> contextlib.AbstractAsyncContextManager[FrontPeer]:
        return stream_to(address, self._fronts.token, first, cluster_key=self._key)


async def _send_bytes(reader: asyncio.StreamReader, stream: FrontPeer | PeerStream[Any]) -> None:
    while content := await reader.read(_CHUNK_BYTES):
        await stream.send(TunnelBytes(np.frombuffer(content, np.uint8)))


async def _write_bytes(messages: AsyncIterator[Any], writer: asyncio.StreamWriter) -> None:
    async for message in messages:
        writer.write(message.content.tobytes())
        await writer.drain()


async def _until_one_ends(*directions: Coroutine[Any, Any, None]) -> None:
    """Run both directions of a connection until one of them ends or breaks."""
    tasks = [asyncio.create_task(each) for each in directions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(
                result, OSError | grpc.RpcError | grpc.aio.BaseError
            ):
                raise result
