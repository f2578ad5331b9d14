"""Kept streams: where readers begin, what a slow one holds up, and how reading ends."""

import asyncio

from starlette.types import Message

from server.http.kept_stream import KeptStream


def test_readers_begin_anywhere_and_chunks_are_dropped_when_the_slowest_has_read_them_or_left() -> None:
    async def run() -> None:
        stream, left = KeptStream(), asyncio.Event()

        async def stay() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def read(place: int) -> bytes:
            return b"".join([chunk async for chunk in stream.follow(asyncio.Event().wait, place)])

        stream.add(b"a", b"b")
        reading = [asyncio.create_task(read(place)) for place in (0, 1, 9)]
        slow = stream.follow(stay)
        assert await anext(slow) == b"ab"
        dropping = asyncio.create_task(stream.drop_when_read())
        for _ in range(9):
            await asyncio.sleep(0)
        assert not dropping.done() and stream.content == b"ab"
        left.set()
        assert await anext(slow, None) is None
        await dropping
        assert stream.content == b"" and stream.num_bytes == 2
        stream.add(b"c")
        stream.end()
        assert await asyncio.gather(*reading) == [b"abc", b"bc", b""] and not stream.is_read

    asyncio.run(asyncio.wait_for(run(), 20))
