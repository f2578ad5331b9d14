"""Keep the last responses and the background runs in memory, for later requests.

OpenAI keeps responses for a month unless store=false; vLLM keeps them only if configured to, and then never drops one. This
service keeps the last ones, so that previous_response_id works in a conversation and memory stays bounded. After a restart,
or once newer responses have replaced it, a response is a plain 404. With API keys, only the key that created a response can
read it: other keys get the same 404. Newer responses replace those of the key that stores most. Running responses stay, because
their clients have nothing but the ids. `BackgroundRuns` limits their number.

Background runs continue after clients disconnect. Clients poll a run by its id, stream its events from any number on, or cancel
it. An ended run consists of its events. They are dropped with the response, and those of the oldest runs above a limit. While the
front drains, runs count as open requests.
"""

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.blocks import DraftChunks, Event, event_pieces, named_events
from server.api.openai.responses.answer import ResponseDraft
from server.api.schemas import ChatMessage
from server.api.streaming import KEEP_ALIVE_S, EventSender
from server.front.errors import ApiError, FrontCutOffError, bad_request, failed
from server.front.generations import Answer, ClientGone
from server.http.json_writer import LONG_CHARS, is_larger, num_chars_of
from server.http.kept_stream import KeptStream
from server.http.shares import Shares

_LOG = logging.getLogger("wideep")
MAX_RESPONSES = 1000
MAX_CHARS = 64 << 20  # for all stored responses, each with its whole history
_RUNNING = ("queued", "in_progress")  # statuses


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A response and the conversation up to its end. Instructions are omitted: they apply to one response only."""

    owner: str
    response: dict[str, Any]
    messages: tuple[ChatMessage, ...]
    num_chars: int | None  # None if it was running when it was put

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.response["status"] in _RUNNING


class ResponseStore:
    """The last responses that have ended, and the running ones, by id.

    When full, drops the least recently used ended response of the owner that stores most. Running ones do not count.
    """

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_chars: int = MAX_CHARS) -> None:
        self._number, self._chars = Shares(max_responses), Shares(max_chars)
        self._by_id: OrderedDict[str, Stored] = OrderedDict()
        # Called with the id of each dropped response.
        self.on_dropped: Callable[[str], None] = lambda _response_id: None

    def put(self, response: dict[str, Any], messages: Sequence[ChatMessage], owner: str) -> None:
        """Store a response, replacing its earlier version. Drops it if it has ended and alone exceeds the limit."""
        self._remove(response["id"])
        num_chars = None
        if response["status"] not in _RUNNING:
            num_chars = num_chars_of([response, *messages])
            if num_chars > self._chars.total:
                self.on_dropped(response["id"])
                return
            self._number.take(owner, 1)
            self._chars.take(owner, num_chars)
        self._by_id[response["id"]] = Stored(
            owner=owner, response=response, messages=tuple(messages), num_chars=num_chars
        )
        for shares in (self._number, self._chars):
            while shares.is_over:
                self._evict_from(shares.largest)

    def has(self, response_id: str) -> bool:
        """Return whether a response is stored."""
        return response_id in self._by_id

    def is_running(self, response_id: str) -> bool:
        """Return whether a response is stored and has not ended."""
        stored = self._by_id.get(response_id)
        return stored is not None and stored.is_running

    def get(self, response_id: str, owner: str, param: str) -> Stored:
        """Return a response.

        Raises:
            ApiError: 404, naming `param`, if it was never stored, was deleted or replaced, or has another owner.
        """
        stored = self._by_id.get(response_id)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                f"Response with id {response_id!r} not found. This server keeps the last {self._number.total} "
                "responses in memory, except those with store=false, and shows each only to the API key that created it.",
                param=param,
            )
        self._by_id.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, owner: str) -> None:
        """Delete a response.

        Raises:
            ApiError: 404 if the response is not found, as for `get`.
        """
        self.get(response_id, owner, "response_id")
        self.discard(response_id)

    def discard(self, response_id: str) -> None:
        """Drop a response, if it is stored."""
        self._remove(response_id)
        self.on_dropped(response_id)

    def _remove(self, response_id: str) -> None:
        stored = self._by_id.pop(response_id, None)
        if stored is not None and stored.num_chars is not None:
            self._number.give_back(stored.owner, 1)
            self._chars.give_back(stored.owner, stored.num_chars)

    def _evict_from(self, owner: str) -> None:
        self.discard(
            next(
                each
                for each, stored in self._by_id.items()
                if stored.owner == owner and stored.num_chars is not None
            )
        )


MAX_RUNNING = 256
# For the events of all runs. Above it, the oldest ended run of the owner with most event bytes is dropped.
MAX_BYTES = 64 << 20
_PIECE_BYTES = 1 << 18  # of events, in one write


class _Making(NamedTuple):
    """The parts that make a response."""

    answer: Answer
    chunks: DraftChunks
    draft: ResponseDraft


class BackgroundRun:
    """A running or ended background response. The chunks of `events` are its events, by their sequence numbers."""

    def __init__(
        self,
        answer: Answer,
        chunks: DraftChunks,
        draft: ResponseDraft,
        owner: str = "",
        run_long: Callable[[Callable[[], list[bytes]]], Awaitable[list[bytes]]] = asyncio.to_thread,
    ) -> None:
        """Args: run_long runs work in a thread: it encodes long events."""
        self.response_id, self.owner = str(draft.response["id"]), owner
        self.events = KeptStream()
        self.is_cut_off = False  # it ended without a result, and must run again
        # None after the end, because it holds the prompt.
        self._making: _Making | None = _Making(answer, chunks, draft)
        self._run_long = run_long
        self.events.add(*map(_encoded, chunks.begin()))

    async def run(self) -> None:
        """Generate the response."""
        assert self._making is not None, "a run runs once"
        answer, chunks, draft = self._making
        try:
            has_ended = False  # after that, `cancel` must change nothing
            while not has_ended and (pieces := await answer.next()):
                for _, piece in pieces:
                    await self._add(chunks.feed(piece))
                    has_ended = piece.finish_reason is not None
        except FrontCutOffError:
            self.is_cut_off = True
        except ApiError as failure:
            await self._add(draft.fail(failure))
        except ClientGone:  # `cancel` closed the answer
            await self._add(draft.cancel())
        except Exception as error:  # noqa: BLE001 - otherwise its client would poll forever
            _LOG.exception("response %s failed", self.response_id)
            reason = f"its answer could not be generated: {type(error).__name__}: {error}"
            await self._add(draft.fail(failed(reason)))
        finally:
            answer.close()
            self._making = None
            self.events.end()

    async def cancel(self) -> None:
        """Stop the run, unless it has ended."""
        if self._making is not None:
            self._making.answer.close()
            await self.events.wait_until_ended()

    async def _add(self, events: Sequence[Event]) -> None:
        if is_larger(events, LONG_CHARS):
            self.events.add(*await self._run_long(lambda: [*map(_encoded_long, events)]))
        else:
            self.events.add(*map(_encoded, events))


def _encoded(event: Event) -> bytes:
    return named_events([event])


def _encoded_long(event: Event) -> bytes:
    return b"".join(event_pieces([event]))


class BackgroundRuns:
    """Background runs, by response id."""

    def __init__(
        self,
        *,
        max_running: int = MAX_RUNNING,
        max_bytes: int = MAX_BYTES,
        are_several: Callable[[], bool] = lambda: False,
    ) -> None:
        """Args: are_several returns whether several owners share the limits."""
        self._running = Shares(max_running, are_several)  # including runs in preparation
        self._max_bytes = max_bytes
        self._runs: OrderedDict[str, BackgroundRun] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def room(self, owner: str) -> Iterator[None]:
        """Reserve capacity for one run while it is prepared and started.

        Raises:
            ApiError: 429 if the limit is reached.
        """
        if not self._running.has_room(owner, 1):
            raise ApiError(
                429,
                f"{self._running.held} background responses are running, {self._running.held_by(owner)} of them yours; "
                f"this server runs up to {self._running.total} at once, and an API key may run only as many as stay "
                "free for other keys. Wait for one of yours to end, or cancel it.",
                param="background",
            )
        self._running.take(owner, 1)
        try:
            yield
        finally:
            self._running.give_back(owner, 1)

    def start(self, run: BackgroundRun, on_end: Callable[[], None]) -> None:
        """Start a run as a task and call `on_end` when it has ended."""
        self._runs[run.response_id] = run
        task = asyncio.create_task(run.run())
        self._tasks.add(task)
        self._running.take(run.owner, 1)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._running.give_back(run.owner, 1))
        task.add_done_callback(lambda _: on_end())
        task.add_done_callback(lambda _: self._drop_events())

    def find(self, response_id: str) -> BackgroundRun | None:
        """Return a run, or None if the response did not run in the background or its events were dropped."""
        return self._runs.get(response_id)

    def follow(self, response_id: str, after: int) -> "FollowedRun":
        """Return a stream of a run's events.

        Args:
            after: Number of the last event that the client has; -1 for none.

        Raises:
            ApiError: 400 if the response has no stored events.
        """
        run = self.find(response_id)
        if run is None:
            raise bad_request(
                "stream needs a response created with background=true, and its events must still be stored: retrieve "
                "this one without stream.",
                "stream",
            )
        return FollowedRun(run, after + 1)

    def forget(self, response_id: str) -> None:
        """Drop a run, if it exists and has ended."""
        run = self._runs.get(response_id)
        if run is not None and run.events.has_ended:
            del self._runs[response_id]

    async def delete(self, response_id: str) -> None:
        """Cancel and delete a run, if it exists."""
        run = self._runs.pop(response_id, None)
        if run is not None:
            await run.cancel()

    def _drop_events(self) -> None:
        """Drop ended runs until the limit holds, each time the oldest of the owner with the most event bytes in ended runs."""
        num_bytes = sum(run.events.num_bytes for run in self._runs.values())
        ended = {response_id: run for response_id, run in self._runs.items() if run.events.has_ended}
        while num_bytes > self._max_bytes and ended:
            held: Counter[str] = Counter()
            for run in ended.values():
                held[run.owner] += run.events.num_bytes
            most = max(held, key=held.__getitem__)
            response_id = next(each for each, run in ended.items() if run.owner == most)
            num_bytes -= ended.pop(response_id).events.num_bytes
            del self._runs[response_id]


class FollowedRun(Response):
    """Stream a run's events. The run continues if this client disconnects."""

    def __init__(self, run: BackgroundRun, number: int) -> None:
        super().__init__()
        self._run, self._number = run, number

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the run has ended or the client disconnects."""
        following = self._run.events.follow(receive, self._number)
        with contextlib.suppress(OSError), EventSender(send, KEEP_ALIVE_S) as sender:
            async with contextlib.aclosing(following) as chunks:
                async for events in chunks:
                    await sender.send_long(
                        events[start : start + _PIECE_BYTES] for start in range(0, len(events), _PIECE_BYTES)
                    )
            await sender.end(b"")
