"""A stream between two fronts: messages go both ways, a foreign end is refused by name, and an end is noticed at both sides."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from server.link.front_peers import FrontPeer, PeerLostError, stream_to
from server.link.messages import MirrorOf, Tunnel, TunnelBytes
from server.link.ranks import PeerStream, Ranks

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


async def echo(stream: PeerStream[Any]) -> None:
    """Send back the first message and all others, until the bytes `end`."""
    await stream.send(stream.first)
    async for message in stream.received():
        if message.content.tobytes() == b"end":
            return
        await stream.send(message)


@asynccontextmanager
async def front(
    *, key: bytes | None = None, on_peer: Callable[[PeerStream[Any]], Awaitable[None]] | None = echo
) -> AsyncIterator[tuple[Ranks, str]]:
    """Run the port of a front for ranks and other fronts."""
    ranks = Ranks(1, "secret", cluster_key=key)
    ranks.on_peer = on_peer
    address = ranks.bind("127.0.0.1")
    await ranks.serve(Mock(), Mock(), Mock())
    try:
        yield ranks, address
    finally:
        await ranks.close()


def some_bytes(content: bytes) -> TunnelBytes:
    return TunnelBytes(np.frombuffer(content, np.uint8))


async def exchange(peer: FrontPeer, first: object) -> None:
    received = peer.received()
    assert await anext(received) == first
    for content in (b"a", b"x" * 300_000, b""):
        await peer.send(some_bytes(content))
        assert (await anext(received)).content.tobytes() == content
    await peer.send(some_bytes(b"end"))
    assert await anext(received, None) is None, "the other end has ended the stream"


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "a cluster key"])
def test_messages_go_both_ways_until_one_end_ends_the_stream(key: bytes | None) -> None:
    async def run() -> None:
        async with front(key=key) as (_, address):
            for first in (MirrorOf(3), Tunnel()):
                async with stream_to(address, "secret", first, cluster_key=key) as peer:
                    await exchange(peer, first)

    asyncio.run(run())


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "a cluster key"])
def test_a_stream_that_finishes_waits_until_the_other_end_has_taken_everything(key: bytes | None) -> None:
    taken: list[bytes] = []

    async def take(stream: PeerStream[Any]) -> None:
        async for message in stream.received():
            await asyncio.sleep(0)
            taken.append(message.content.tobytes())

    async def run() -> None:
        async with (
            front(key=key, on_peer=take) as (_, address),
            stream_to(address, "secret", MirrorOf(1), cluster_key=key) as peer,
        ):
            for content in (b"a", b"b"):
                await peer.send(some_bytes(content))
            await peer.finish()
            assert taken == [b"a", b"b"]
        async with front(on_peer=None) as (_, address):
            with pytest.raises(PeerLostError, match="fronts on one node only"):
                async with stream_to(address, "secret", MirrorOf(1), cluster_key=None) as peer:
                    await peer.finish()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("theirs", "ours", "token", "says"),
    [
        (None, None, "another", "the token is not this front's"),
        (KEY, OTHER_KEY, "secret", "the cluster keys differ"),
        (KEY, None, "secret", "the front has a cluster key, but it does not"),
        (None, KEY, "secret", "cluster key"),
    ],
)
def test_a_foreign_end_is_refused_with_the_reason(
    theirs: bytes | None, ours: bytes | None, token: str, says: str
) -> None:
    async def run() -> None:
        async with front(key=theirs) as (_, address):
            with pytest.raises(PeerLostError, match=says):
                async with stream_to(address, token, Tunnel(), cluster_key=ours) as peer:
                    await exchange(peer, Tunnel())

    asyncio.run(run())


def test_a_service_with_fronts_on_one_node_refuses_streams_of_other_nodes() -> None:
    async def run() -> None:
        async with front(on_peer=None) as (_, address):
            with pytest.raises(PeerLostError, match="fronts on one node only"):
                async with stream_to(address, "secret", MirrorOf(1), cluster_key=None) as peer:
                    await exchange(peer, MirrorOf(1))

    asyncio.run(run())


def test_a_lost_front_is_a_lost_peer_at_once_and_ever_after() -> None:
    async def run() -> None:
        async with front() as (ranks, address):
            async with stream_to(address, "secret", Tunnel(), cluster_key=None) as peer:
                received = peer.received()
                assert await anext(received) == Tunnel()
                await ranks.close()
                with pytest.raises(PeerLostError):
                    await anext(received)
                for _ in range(3):
                    with pytest.raises(PeerLostError):
                        await peer.send(some_bytes(b"a"))
            with pytest.raises(PeerLostError):
                async with stream_to(address, "secret", Tunnel(), cluster_key=None) as peer:
                    await exchange(peer, Tunnel())

    asyncio.run(run())
