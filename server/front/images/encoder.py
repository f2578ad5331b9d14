"""The front's client of the encoder process: sends images, keeps their rows in bounded memory, restarts a dead process.

Everything here runs in the front's event loop and waits only for the process. Rows lie in files in memory that this process
owns (memfd), so they vanish with it, and ranks of this host map them by a path to its descriptor. Recent ones stay in a cache by
digest: of the image's bytes and of all that changes its rows. Equal images that arrive together are encoded once. A file
that left the cache stays open while a request holds it, so that a replay finds it.
Rejected: files in /dev/shm, which is small in containers and keeps what a killed process leaves.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import os
import signal
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from kvcache.images import Image
from server.front.errors import ApiError, bad_request
from server.front.helper_processes import kill_helper, start_helper
from server.front.images.seeing import ImageTokens
from server.machine.roots import WIDEEP_COMMAND

ENCODER_COMMAND = (*WIDEEP_COMMAND, "image-encoder")
START_S = 600.0  # for a large tower on a slow disk
ENCODE_S = 120.0  # for one image on a busy machine
MOST_AT_ONCE = 32  # images with their bytes in memory
MOST_WAITING = 256  # those, and images that wait for them
_MOST_FILES = 512  # in the cache: each takes a descriptor
_RETRY = {"Retry-After": "1"}
_LOG = logging.getLogger("wideep.front")


class _Unusable(Exception):  # noqa: N818 - not a fault
    """The process refused an image; the message gives the reason."""


class _Failed(Exception):  # noqa: N818 - as above
    """An image that may be good was not encoded; the message gives the reason, in a form that follows "the image"."""

    def __init__(self, reason: str, *, may_retry: bool = True) -> None:
        """Args: may_retry means that the same image may be encoded later."""
        super().__init__(reason)
        self.may_retry = may_retry


class EncoderSettings(NamedTuple):
    """Settings of the encoder process. Those that change rows are part of their meaning."""

    directory: str  # the model's
    most_pixels: int  # largest width times height of an image
    device: str = "cpu"  # of the tower: cpu, cuda or cuda:N
    threads: int = 1
    # Settings of the image processor that replace the checkpoint's.
    processor: Mapping[str, Any] = MappingProxyType({})


class EncodedImage:
    """An image's rows, in a file that exists as long as this object."""

    def __init__(self, descriptor: int, digest: str, answer: dict[str, Any]) -> None:
        """Take over a descriptor of the file, and the process's answer."""
        weakref.finalize(self, os.close, descriptor)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.digest = digest
        self.num_rows: int = answer["num_rows"]
        self.num_bytes: int = answer["num_bytes"]
        self.height: int = answer["height"]
        self.width: int = answer["width"]
        self.part: int = answer["part"]
        self.columns: int = answer["columns"]
        self.times_s = {name: float(answer[name]) for name in ("decode_s", "process_s", "tower_s")}

    def placed(self, start: int, tokens: ImageTokens) -> tuple[list[int], list[Image]]:
        """Return the image's tokens from a place of a prompt on, and its ranges of the prompt, one per part."""
        ids, ranges = list(tokens.before), []
        length = self.part or self.num_rows
        last = self.num_rows // length - 1
        for number in range(last + 1):
            if number == last:
                ids += tokens.before_last
            place = start + len(ids)
            ranges.append(
                Image(self.digest, place, length, number * length, self.height, self.width, self.path)
            )
            ids += [tokens.row] * length
            if number < last:
                ids += tokens.after_part if (number + 1) % self.columns else tokens.after_line
        ids += tokens.after
        return ids, ranges


@dataclass(slots=True)
class _Underway:
    """An image that is being encoded, or waits for its turn."""

    task: asyncio.Task[EncodedImage]
    num_waiting: int = 0  # requests
    has_begun: bool = False


class EncoderCounts(NamedTuple):
    """Counters since the start."""

    num_encoded: int = 0
    num_repeated: int = 0  # found in the cache, or encoded for another request at the same time
    num_refused: int = 0
    num_starts: int = 0  # of the process
    fetch_s: float = 0.0  # until the bytes of an image are here
    decode_s: float = 0.0
    process_s: float = 0.0  # in the model's image processor
    tower_s: float = 0.0


class Encoder:
    """Encodes images for one model."""

    def __init__(
        self, settings: EncoderSettings, *, cache_bytes: int, command: Sequence[str] = ENCODER_COMMAND
    ) -> None:
        """The process starts with `start`, or with the first image.

        Args:
            cache_bytes: Memory for the rows of recent images.
        """
        self._settings = settings
        self._cache_bytes, self._command = cache_bytes, command
        self.counts = EncoderCounts()
        self._cache: OrderedDict[str, EncodedImage] = OrderedDict()
        self._num_bytes = 0  # of the cache
        self._underway: dict[str, _Underway] = {}  # by digest
        self._room, self._num_waiting = asyncio.Semaphore(MOST_AT_ONCE), 0
        self._turn, self._starting = asyncio.Lock(), asyncio.Lock()
        self._numbers = itertools.count()
        self._process: asyncio.subprocess.Process | None = None
        self._meaning = ""

    async def start(self) -> None:
        """Start the process, so that the first image does not wait for it. A failure is logged, and an image tries again."""
        try:
            await self._running()
        except ApiError as error:
            _LOG.error("%s", error.message)

    @contextlib.asynccontextmanager
    async def room(self, where: str) -> AsyncIterator[None]:
        """Wait for memory for the bytes of an image. Hold it until the image is encoded.

        Raises:
            ApiError: 429 if too many images wait.
        """
        if self._num_waiting >= MOST_WAITING:
            raise ApiError(429, "Too many images are waiting to be encoded.", param=where, headers=_RETRY)
        self._num_waiting += 1
        try:
            async with self._room:
                yield
        finally:
            self._num_waiting -= 1

    async def encode(self, content: bytes, where: str) -> EncodedImage:
        """Return the rows of an image.

        Args:
            content: The image's file.
            where: The image's field, for errors.

        Raises:
            ApiError: 400 if the image cannot be used; 503 if the process fails.
        """
        if not self._meaning:
            await self._running()
        digest = await asyncio.to_thread(_digest_of, self._meaning, content)
        if (known := self._cache.get(digest)) is not None:
            self._cache.move_to_end(digest)
            self.count(num_repeated=1)
            return known
        underway = self._underway.get(digest)
        if underway is not None:
            self.count(num_repeated=1)
        else:
            underway = self._underway[digest] = _Underway(asyncio.create_task(self._encode(digest, content)))
            underway.task.add_done_callback(lambda done: self._end(digest, done))
        underway.num_waiting += 1
        try:
            return await asyncio.shield(underway.task)  # other requests may wait for it
        except _Unusable as error:
            self.count(num_refused=1)
            raise bad_request(f"{where}: the image cannot be used: {error}.", where) from None
        except _Failed as error:
            message = f"{where}: the image {error}."
            if error.may_retry:
                raise ApiError(503, message, param=where, headers=_RETRY) from None
            raise ApiError(500, message, param=where) from None
        except asyncio.CancelledError:
            if underway.num_waiting == 1 and not underway.has_begun:
                underway.task.cancel()  # frees the image's bytes, because `room` counts them no more
                self._underway.pop(digest, None)
            raise
        finally:
            underway.num_waiting -= 1

    async def close(self) -> None:
        """End the process and drop the cache."""
        tasks = [each.task for each in self._underway.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kill()
        self._cache.clear()
        self._num_bytes = 0

    def count(self, **more: float) -> None:
        """Add to counters."""
        counts = self.counts._asdict()
        self.counts = self.counts._replace(**{name: counts[name] + value for name, value in more.items()})

    def _end(self, digest: str, task: "asyncio.Task[EncodedImage]") -> None:
        if task.cancelled():
            return
        del self._underway[digest]
        if task.exception() is not None:
            return
        image = task.result()
        self.count(num_encoded=1, **image.times_s)
        if image.num_bytes > self._cache_bytes:
            return
        self._cache[digest] = image
        self._num_bytes += image.num_bytes
        while self._num_bytes > self._cache_bytes or len(self._cache) > _MOST_FILES:
            _, oldest = self._cache.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    async def _encode(self, digest: str, content: bytes) -> EncodedImage:
        async with self._turn:  # one image at a time, so that a dead process accuses the right one
            self._underway[digest].has_begun = True
            process = await self._running()
            source = os.memfd_create("wideep-image", os.MFD_CLOEXEC)
            rows = os.memfd_create("wideep-image-rows", os.MFD_CLOEXEC)
            try:
                await asyncio.to_thread(_write_all, source, content)
                answer = await self._ask(process, digest, source, rows)
                if "why_not" in answer:
                    raise _Unusable(answer["why_not"])
                if failure := answer.get("failure"):
                    if answer["is_broken"]:
                        await self._kill()
                    lacks_memory = answer["lacks_memory"]
                    raise _Failed(f"was not encoded: {failure}", may_retry=lacks_memory)
                return EncodedImage(os.dup(rows), digest, answer)
            finally:
                os.close(source)
                os.close(rows)

    async def _ask(
        self, process: asyncio.subprocess.Process, digest: str, source: int, rows: int
    ) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
        number, own = next(self._numbers), f"/proc/{os.getpid()}/fd"
        order = {"number": number, "content": f"{own}/{source}", "digest": digest, "rows": f"{own}/{rows}"}
        line = b""
        try:
            async with asyncio.timeout(ENCODE_S):
                with contextlib.suppress(OSError):  # the process has died; the empty answer shows it
                    process.stdin.write(json.dumps(order).encode() + b"\n")
                    await process.stdin.drain()
                    line = await process.stdout.readline()
        except TimeoutError:
            await self._kill()
            raise _Failed(
                f"was not encoded within {ENCODE_S:g} s. Send a smaller image; --mm-processor-kwargs, --image-encoder-threads and "
                "--image-encoder-device help on the server"
            ) from None
        except asyncio.CancelledError:  # the service ends; a later answer would be taken for another image's
            await self._kill()
            raise
        if not line:
            status = await process.wait()
            if status == -signal.SIGKILL:  # by the machine, if it is short of memory
                raise _Failed(
                    "was not encoded, because the process that encodes images was killed. Try again"
                )
            raise _Unusable("decoding it ended the process that encodes images")
        answer: dict[str, Any] = json.loads(line)
        assert answer["number"] == number, "answers come in the order of images"
        return answer

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._kill()
                self._process = await self._start()
            return self._process

    async def _start(self) -> asyncio.subprocess.Process:
        process = await start_helper(self._command, shows_errors=True)
        assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
        self.count(num_starts=1)
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                with contextlib.suppress(OSError):  # its reason may be there although it ends
                    process.stdin.write(json.dumps(self._settings._asdict(), default=dict).encode() + b"\n")
                    await process.stdin.drain()
                line = await process.stdout.readline()
        answer = json.loads(line) if line else {"failure": "it ended"}
        if failure := answer.get("failure"):
            await kill_helper(process)
            raise ApiError(503, f"The process that encodes images failed to start: {failure}.")
        self._meaning = answer["meaning"]
        return process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        await kill_helper(process)


def _digest_of(meaning: str, content: bytes) -> str:
    return hashlib.sha256(meaning.encode() + content).hexdigest()


def _write_all(descriptor: int, content: bytes) -> None:
    with open(os.dup(descriptor), "wb") as file:
        file.write(content)
