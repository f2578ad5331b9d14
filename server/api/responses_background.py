"""Responses that are made while nobody waits for them: background=true.

A run goes on to its end whoever leaves; it is polled by its id, followed as a stream of events from any event on, and
cancelled. Its events are kept beside the stored response, those of ended runs within a bound. Nothing survives a
restart: while the front drains, runs are open requests like others.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.drafts import DraftChunks, Event, named_events
from server.api.responses_output import ResponseDraft
from server.api.streaming import KEEP_ALIVE_S, Line, until_gone
from server.errors import ApiError, bad_request
from server.front.generations import Answer, ClientGone

MAX_RUNNING = 256
MAX_BYTES = 64 << 20  # of the events of all runs; ended ones are forgotten first


class BackgroundRun:
    """One response that is being made, or was; its events' places are their sequence numbers."""

    def __init__(self, answer: Answer, chunks: DraftChunks, draft: ResponseDraft) -> None:
        self.draft = draft
        self.is_ended = False
        self.num_bytes = 0
        self._answer, self._chunks = answer, chunks
        self._events: list[bytes] = []
        self._grown = asyncio.Event()
        self._add(chunks.begin())

    async def run(self) -> None:
        """Make the response."""
        try:
            while pieces := await self._answer.next():
                for _, piece in pieces:
                    self._add(self._chunks.feed(piece))
        except ApiError as failure:
            self._add(self.draft.fail(failure))
        except ClientGone:  # `cancel` closed the answer
            self._add(self.draft.cancel())
        finally:
            self._answer.close()
            self.is_ended = True
            self._tell()

    async def cancel(self) -> None:
        """End it, unless it has ended."""
        self._answer.close()
        while not self.is_ended:
            await self._grown.wait()

    async def events_from(self, number: int) -> Sequence[bytes]:
        """Wait for events, the first of them this one; none if it has ended before."""
        while len(self._events) <= number and not self.is_ended:
            await self._grown.wait()
        return self._events[number:]

    def _add(self, events: Sequence[Event]) -> None:
        worded = [named_events([event]) for event in events]
        self._events += worded
        self.num_bytes += sum(map(len, worded))
        self._tell()

    def _tell(self) -> None:
        """Wake all who wait."""
        self._grown.set()
        self._grown = asyncio.Event()


class BackgroundRuns:
    """The runs by their responses' ids."""

    def __init__(self, *, max_running: int = MAX_RUNNING, max_bytes: int = MAX_BYTES) -> None:
        self._max_running, self._max_bytes = max_running, max_bytes
        self._runs: OrderedDict[str, BackgroundRun] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def check_room(self) -> None:
        """Refuse one run too many.

        Raises:
            ApiError: 429.
        """
        if len(self._tasks) >= self._max_running:
            raise ApiError(
                429,
                f"{self._max_running} background responses are being made; wait for one to end, or cancel it.",
                param="background",
            )

    def start(self, run: BackgroundRun, on_end: Callable[[], None]) -> None:
        """Let a run go on by itself; `on_end` is called when it has ended."""
        self._runs[run.draft.response["id"]] = run
        task = asyncio.create_task(run.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: on_end())
        task.add_done_callback(lambda _: self._forget())

    def find(self, response_id: str) -> BackgroundRun | None:
        """Return a run; None: the response was made while its client waited, or so long ago that it is forgotten."""
        return self._runs.get(response_id)

    def follow(self, response_id: str, after: int) -> "Following":
        """Return a stream of a run's events.

        Args:
            after: the number of the last event that the client knows, -1 for none.

        Raises:
            ApiError: 400, there are no events of this response.
        """
        run = self.find(response_id)
        if run is None:
            raise bad_request(
                "stream is for responses made with background=true, as long as their events are kept: this one can "
                "only be retrieved whole.",
                "stream",
            )
        return Following(run, after + 1)

    async def delete(self, response_id: str) -> None:
        """End and forget a run, if there is one."""
        run = self._runs.pop(response_id, None)
        if run is not None:
            await run.cancel()

    def _forget(self) -> None:
        """Forget the oldest ended runs until the rest is within the bound."""
        num_bytes = sum(run.num_bytes for run in self._runs.values())
        for response_id, run in list(self._runs.items()):
            if num_bytes <= self._max_bytes:
                return
            if run.is_ended:
                num_bytes -= run.num_bytes
                del self._runs[response_id]


class Following(Response):
    """Streams a run's events as they come; a follower that leaves ends nothing but this."""

    def __init__(self, run: BackgroundRun, number: int) -> None:
        super().__init__()
        self._run, self._number = run, number

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the run has ended or the client is gone."""
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        with Line(send, KEEP_ALIVE_S) as line:
            while events := await self._run.events_from(self._number):
                self._number += len(events)
                await line.say(b"".join(events))
            await line.end(b"")
