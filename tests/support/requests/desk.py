"""Accepted requests on stub ranks, with access to all objects that `Requests` uses."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from scheduler.policy.request import (
    FinishReason,
    MemoryOrder,
    Request,
    RequestOutput,
    SamplingParams,
    Withdraw,
)
from server.front.adapters.places import AdapterPlaces
from server.front.admission import Admission
from server.front.detokenizer import Decoder
from server.front.generations import NOBODY, Answer, Ask
from server.front.journal import Journal
from server.front.requests import Requests
from server.front.routing.moves import Moves
from server.front.routing.router import Router
from server.front.several.board import Board
from server.http.observability.metrics import Metrics
from server.link.messages import Abort, Expect
from server.options.pools import PREFILL_THRESHOLD
from tests.support.requests.answers import ByteDecoder


class StubRanks:
    """Stands in for `Ranks` and records the calls of `Requests`."""

    def __init__(self) -> None:
        self.attached: set[int] = set()  # ranks that live when requests leave them
        self.submitted: list[tuple[int, Request]] = []
        self.aborted: list[tuple[int, str]] = []
        self.withdrawn: list[tuple[int, str]] = []
        self.withdrawals: list[Withdraw] = []
        self.memory_orders: list[tuple[int, MemoryOrder]] = []
        self.expected: list[tuple[int, str, bool]] = []  # rank, request, and whether it comes
        self.in_step: list[bool] = []  # of those that come

    def submit(self, rank: int, request: Request, *, now_s: float) -> None:
        self.submitted.append((rank, request))

    def post_all(self, message: MemoryOrder) -> None:
        for rank in range(2):
            self.post(rank, message)

    def expect(self, rank: int, request: Request, *, now_s: float, in_step: bool = False) -> None:
        self.expected.append((rank, request.request_id, True))
        self.in_step.append(in_step)

    def post(self, rank: int, message: Abort | Expect | Withdraw | MemoryOrder) -> None:
        if isinstance(message, MemoryOrder):
            self.memory_orders.append((rank, message))
            return
        if isinstance(message, Expect):
            self.expected.append((rank, message.request_id, message.submit is not None))
            return
        posted = self.aborted if isinstance(message, Abort) else self.withdrawn
        posted.append((rank, message.request_id))
        if isinstance(message, Withdraw):
            self.withdrawals.append(message)


class Desk:
    """`Requests` and all objects that it uses."""

    def __init__(
        self,
        timeout_s: float = 0.0,
        *,
        most_open: int | None = None,
        num_ranks: int = 2,
        decoder: Decoder | None = None,
        prefill_threshold: int = PREFILL_THRESHOLD,
        shared: Board | None = None,
        adapters: AdapterPlaces | None = None,
    ) -> None:
        self.ranks, self.journal = StubRanks(), Journal()
        self.router = Router(num_ranks, prefill_threshold=prefill_threshold, shared=shared)
        self.moves = Moves(self.router, self.ranks, self.journal)  # type: ignore[arg-type]
        self.metrics = Metrics("m", num_ranks)
        self.why_not_ready: str | None = None
        self.asker = NOBODY
        self.requests = Requests(
            decoder=decoder or ByteDecoder(),
            ranks=self.ranks,  # type: ignore[arg-type]
            router=self.router,
            journal=self.journal,
            moves=self.moves,
            metrics=self.metrics,
            timeout_s=timeout_s,
            admission=Admission(most_open),
            why_not_ready=lambda: self.why_not_ready,
            who_asks=lambda: self.asker,
            shared=shared,
            adapters=adapters,
        )

    def open(
        self,
        *names: str,
        params: SamplingParams | None = None,
        prompt_ids: tuple[int, ...] = (65,),
        adapter: str = "",
        **how: Any,
    ) -> Answer:
        """Accept an answer with one choice per name."""
        params = params or SamplingParams(max_tokens=9)
        asked = Request(request_id="", prompt_ids=prompt_ids, params=params, arrival_s=0.0, adapter=adapter)
        asks = [Ask(request=replace(asked, request_id=name), **how) for name in names]
        return self.requests.open("answer", asks)

    def rank_of(self, name: str) -> int:
        """Return the rank that last received a choice."""
        return next(rank for rank, request in reversed(self.ranks.submitted) if request.request_id == name)

    def deliver(
        self,
        name: str,
        text: str = "",
        finish: FinishReason | None = None,
        error: str = "",
        *,
        rank: int | None = None,
        **how: Any,
    ) -> None:
        """Deliver an output for a choice from its rank, or from another one."""
        output = RequestOutput(
            request_id=name, token_ids=list(text.encode()), finish_reason=finish, error=error, **how
        )
        self.requests.deliver(self.rank_of(name) if rank is None else rank, [output])

    def reasons(self) -> list[FinishReason]:
        """Return the outcomes so far. Check that nothing is left open."""
        assert not self.journal.open_entries and not any(self.router.outstanding_tokens)
        assert self.journal.num_ended.total() == self.journal.num_accepted
        return [outcome.reason for outcome in self.journal.outcomes]


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in an event loop."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__ = test.__name__
    return run
