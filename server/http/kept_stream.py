"""A stream that outlives its connections: its chunks are kept, and any number of clients follow it, from any chunk on.

Its producer adds chunks and never waits, unless it drops chunks because they became too many: then it waits for the slowest
client. A client that disconnects ends only its own reading.
"""

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import Receive


class KeptStream:
    """The chunks of a stream, and the places of its readers."""

    def __init__(self) -> None:
        self.num_bytes = 0  # added so far
        self.has_ended = False
        self._chunks: list[bytes] = []
        self._num_dropped = 0  # chunks
        self._places: dict[asyncio.Task[None], int] = {}  # by reader, the number of its next chunk
        self._changed = asyncio.Event()  # replaced after each set

    @property
    def is_read(self) -> bool:
        """Whether a client follows it."""
        return bool(self._places)

    @property
    def content(self) -> bytes:
        """The chunks that were not dropped."""
        return b"".join(self._chunks)

    def add(self, *chunks: bytes) -> None:
        """Add chunks."""
        self._chunks += chunks
        self.num_bytes += sum(map(len, chunks))
        self._wake()

    def end(self) -> None:
        """End the stream."""
        self.has_ended = True
        self._wake()

    async def wait_until_ended(self) -> None:
        """Wait for the end."""
        while not self.has_ended:
            await self._changed.wait()

    async def drop_when_read(self) -> None:
        """Wait until every reader has sent all chunks, and drop them. A new reader can no longer begin before them."""
        end = self._num_dropped + len(self._chunks)
        while any(place < end for place in self._places.values()):
            await self._changed.wait()
        self._chunks.clear()
        self._num_dropped = end

    async def follow(self, receive: Receive, place: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the chunks from number `place` on as they arrive, joined, until the end or the client's disconnect."""
        gone = asyncio.create_task(until_gone(receive))
        gone.add_done_callback(lambda _: self._wake())
        self._places[gone] = place
        try:
            while not gone.done():
                end = self._num_dropped + len(self._chunks)
                if place < end:
                    yield b"".join(self._chunks[place - self._num_dropped :])
                    self._places[gone] = place = end
                    self._wake()
                elif self.has_ended:
                    return
                else:
                    await self._changed.wait()
        finally:
            gone.cancel()
            del self._places[gone]
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def until_gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
