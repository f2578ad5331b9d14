"""Kept streams: where readers begin, what a slow one holds up, and how reading ends."""

import asyncio

from starlette.types import Message

from server.http.kept_stream import KeptStream


class Client:
    """A client that stays until `left` is set."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def read(stream: KeptStream, client: Client, place: int = 0) -> bytes:
    return b"".join([chunk async for chunk in stream.follow(client.receive, place)])


def test_readers_begin_anywhere_and_end_with_the_stream() -> None:
    async def run() -> None:
        stream = KeptStream()
        stream.add([b"a", b"b"])
        reading = [asyncio.create_task(read(stream, Client(), place)) for place in (0, 1, 9)]
        await asyncio.sleep(0)
        stream.add([b"c"])
        stream.end()
        assert await asyncio.gather(*reading) == [b"abc", b"bc", b""]
        assert await read(stream, Client()) == stream.content == b"abc" and not stream.is_read

    asyncio.run(run())


def test_chunks_are_dropped_when_the_slowest_has_read_them_or_has_left() -> None:
    async def run() -> None:
        stream, client = KeptStream(), Client()
        stream.add([b"a"])
        slow = stream.follow(client.receive)
        fast = asyncio.create_task(read(stream, Client()))
        assert await anext(slow) == b"a"
        dropping = asyncio.create_task(stream.drop_when_read())
        for _ in range(9):
            await asyncio.sleep(0)
        assert not dropping.done() and stream.content == b"a"
        client.left.set()
        await asyncio.sleep(0)
        assert await anext(slow, None) is None
        await dropping
        assert stream.content == b"" and stream.num_bytes == 1
        stream.add([b"b"])
        stream.end()
        assert await fast == b"ab"

    asyncio.run(run())
