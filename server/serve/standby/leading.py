"""The leading front's part in a service with a standby: it copies the folder that outlives it to the standby's front.

The folder has everything that a front which replaces a killed one needs (`kept_answers`, `left_runs`, files and batches), and the
same of every other front of this node. The ranks keep the rest. So the standby's front starts as such a replacement, from the
copies. The kernel reports the changes of the folder; whole files are sent, and of long ones only the bytes that were appended. An
answer with the id of a later result (a background response, a batch, a file) is sent to its client when the standby has the files
behind it.
Rejected: sending the tokens of open requests, which would cost a message per step. A request that runs again draws the same tokens.
"""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import grpc.aio
import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.front.several.seat import FOLDER
from server.http.errors import route_path
from server.link.messages import Copied, FileGone, FilePart, Follow, ServiceEnds
from server.link.ranks import PeerStream
from server.machine.folder_watch import FolderWatch, status_of
from server.machine.whole_files import replace_text

# Uploaded weights are too large, and the ranks have them. What the fronts of one node share is of no use on another node.
LEFT_OUT = frozenset({"weights", FOLDER})
COPY_TIMEOUT_S = 2.0  # for the standby to write files; after that, answers do not wait for it
_NEAR = "ranks.json"
_PART_BYTES = 1 << 19
_GROWS_FROM = 1 << 16  # bytes; shorter files are sent as a whole
_PATHS = ("/v1/responses", "/v1/batches", "/v1/files")  # routes of answers with ids of later results
_LOG = logging.getLogger("wideep.front")


def ranks_near(folder: Path) -> list[int]:
    """Return the ranks on the node of the front that had this folder, or a copy of it."""
    try:
        return list(json.loads((folder / _NEAR).read_text()))
    except FileNotFoundError:
        return []


class _Sent(NamedTuple):
    inode: int
    num_bytes: int


class KeptFiles:
    """The files of the leading front, and the stream to the standby while it follows."""

    def __init__(self, folder: Path, note: Callable[[str, str], None], node: str = "") -> None:
        """Begin to watch the folder.

        Args:
            note: Called with the kind and the text of events.
            node: Identifies the torchrun of this front, as in `RankFacts`.

        Raises:
            OSError: The kernel permits no further watch.
        """
        self._folder, self._note, self._node = folder, note, node
        self.near = set(ranks_near(folder))  # ranks of this node
        self.on_replaced: Callable[[], None] = lambda: None  # called when the standby has taken over
        self._watch = FolderWatch(folder, left_out=LEFT_OUT)
        self._stream: PeerStream[Follow] | None = None
        self._tasks: list[asyncio.Task[None]] = []  # of the stream
        self._changed = asyncio.Event()
        self._is_new: dict[str, bool] = {}  # changed files that were not sent yet, as in `Changes`
        self._sent: dict[str, _Sent] = {}
        self._marks: list[int] = []  # to be sent behind the files
        self._newest_mark = 0
        self._waits: dict[int, asyncio.Future[None]] = {}  # by mark
        self._first_mark = 0  # the one behind all files with which the present stream begins
        self._has_all = False  # whether the standby has answered it
        self._is_behind = False  # an answer has waited in vain, so none waits until the standby has caught up
        self._is_over = False
        asyncio.get_running_loop().add_reader(self._watch.fd, self._look)

    async def serve(self, stream: PeerStream[Follow]) -> None:
        """Send all files, and then every change, until the stream ends."""
        if stream.first.has_taken_over:
            self.on_replaced()
            return
        for task in self._tasks:  # of a stream that broke without notice
            task.cancel()
        self._begin(stream)
        self._stream = stream
        self._tasks = tasks = [
            asyncio.create_task(self._send(stream)),
            asyncio.create_task(self._read(stream)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self._lose(stream)  # before the next await, where gRPC may cancel this once more
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(
                    result, grpc.RpcError | grpc.aio.BaseError
                ):
                    _LOG.error("the standby cannot follow: %s: %s", type(result).__name__, result)

    def note_rank(self, rank: int, node: str) -> None:
        """Record a rank that attaches. Those of this node are lost with it."""
        if self._node and node == self._node and rank not in self.near:
            self.near.add(rank)
            try:
                replace_text(self._folder / _NEAR, json.dumps(sorted(self.near)))
            except OSError as error:
                _LOG.error("cannot write the ranks of this node for the standby: %s", error)

    async def wait_until_copied(self) -> None:
        """Wait until the standby has every file as it is now, at most COPY_TIMEOUT_S. Does not wait if none follows or it is behind."""
        if self._stream is None or self._is_behind:
            return
        self._look()
        mark = self._mark()
        self._waits[mark] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(self._waits[mark], COPY_TIMEOUT_S)
        except TimeoutError:
            if not self._is_behind:
                self._is_behind = True
                text = f"the standby has not written its copies within {COPY_TIMEOUT_S:g} s; responses do not wait for it until it has"
                _LOG.warning(text)
                self._note("standby_lost", text)
        finally:
            self._waits.pop(mark, None)

    def _mark(self) -> int:
        """Send a mark behind the files that have changed, and return it."""
        self._newest_mark += 1
        self._marks.append(self._newest_mark)
        self._changed.set()
        return self._newest_mark

    def end(self) -> None:
        """Announce that the service ends, so that it does not take over."""
        self._is_over = True
        self._changed.set()

    def close(self) -> None:
        """Stop watching the folder."""
        asyncio.get_running_loop().remove_reader(self._watch.fd)
        self._watch.close()

    def _begin(self, stream: PeerStream[Follow]) -> None:
        """Compare the standby's copies with the files."""
        self._look()
        self._is_new.clear()
        self._sent.clear()
        copies = {each.path: (each.num_bytes, each.mtime_ns) for each in stream.first.files}
        for path in {*self._watch.files(), *copies}:
            if os.path.isabs(path) or ".." in path.split("/"):
                raise ValueError(f"{path!r} is outside of the folder")
            found = status_of(self._folder / path)
            if found is None or copies.get(path) != (found.st_size, found.st_mtime_ns):
                self._is_new[path] = True
            else:
                self._sent[path] = _Sent(found.st_ino, found.st_size)
        self._marks = list(self._waits)
        self._first_mark, self._has_all, self._is_behind = self._mark(), False, False

    def _look(self) -> None:
        """Take the kernel's reports."""
        changes = self._watch.take()
        paths = changes.is_new
        if changes.is_overrun:
            paths = dict.fromkeys([*self._watch.files(), *self._sent, *paths], True)
        for path, is_new in paths.items():
            self._is_new[path] = (
                self._is_new.pop(path, False) or is_new
            )  # behind those that changed before it
        if paths:
            self._changed.set()

    def _lose(self, stream: PeerStream[Follow]) -> None:
        """Note the end of a stream, unless a newer one has replaced it."""
        if self._stream is not stream:
            return
        self._stream = None
        self._release()
        if self._is_over:
            return
        text = "the standby is lost; unless it reconnects, the loss of HEAD ends the service"
        if self._has_all:
            self._note("standby_lost", text)
        else:  # it tries again every second
            text = "the standby is lost before it had all copies; see its log for the reason"
        _LOG.warning(text)

    def _release(self) -> None:
        for wait in self._waits.values():
            if not wait.done():
                wait.set_result(None)

    async def _read(self, stream: PeerStream[Follow]) -> None:
        async for message in stream.received():
            if not isinstance(message, Copied):
                raise ValueError(f"unexpected {type(message).__name__}")
            is_first = message.number == self._first_mark
            if is_first or (self._is_behind and message.number == self._newest_mark):
                self._has_all, self._is_behind = True, False
                self._note("standby_follows", "the standby follows, and has all copies")
            wait = self._waits.get(message.number)
            if wait is not None and not wait.done():
                wait.set_result(None)

    async def _send(self, stream: PeerStream[Follow]) -> None:
        while not self._is_over:
            await self._changed.wait()
            self._changed.clear()
            while self._is_new and not self._is_over:
                path = next(iter(self._is_new))
                await self._send_file(stream, path, is_new=self._is_new.pop(path))
            marks, self._marks = self._marks, []
            for mark in marks:
                await stream.send(Copied(mark))
        await stream.send(ServiceEnds())
        await asyncio.Event().wait()  # until the stream ends

    async def _send_file(self, stream: PeerStream[Follow], path: str, *, is_new: bool) -> None:
        try:
            fd = os.open(self._folder / path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if self._sent.pop(path, None) is not None or is_new:
                await stream.send(FileGone(path))
            return
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            sent = self._sent.get(path)
            grew = (
                sent is not None
                and sent.inode == status.st_ino
                and _GROWS_FROM < sent.num_bytes <= status.st_size
            )
            at = sent.num_bytes if sent is not None and grew and not is_new else 0
            file.seek(at)
            while True:
                content = file.read(min(_PART_BYTES, status.st_size - at))
                is_last = at + len(content) >= status.st_size or not content
                part = FilePart(path, at, np.frombuffer(content, np.uint8), status.st_mtime_ns, is_last)
                await stream.send(part)
                at += len(content)
                if is_last:
                    break
        self._sent[path] = _Sent(status.st_ino, at)


class CopiedFirst:
    """Holds back answers with the ids of later results until the standby has the files behind them."""

    def __init__(self, app: ASGIApp, wait_until_copied: Callable[[], Awaitable[None]]) -> None:
        """Wrap an application."""
        self._app, self._wait_until_copied = app, wait_until_copied

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and hold back the beginning of such an answer."""
        promises = (
            scope["type"] == "http" and scope["method"] != "GET" and route_path(scope).startswith(_PATHS)
        )

        async def send_later(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._wait_until_copied()
            await send(message)

        await self._app(scope, receive, send_later if promises else send)
