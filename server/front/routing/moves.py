"""Moves of requests between ranks: when the front looks for them, and the ranks that it drains.

`Router` chooses the requests; this posts the withdrawals to their ranks. A rank answers with the request, or has begun one
that may only move while it waits. `Requests` submits what a rank released.

A draining rank gets no requests, and those that it has move to the other ranks as far as these have room. It serves its experts
as before. The drain ends when an operator undoes it, or when the rank is lost: the rank that returns is an ordinary one.
The front keeps this in memory only, so a restarted front drains no rank.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from scheduler.policy.request import Withdraw
from server.front.errors import ApiError, bad_request
from server.front.events import EventLog
from server.front.journal import Journal
from server.front.routing.loads import MoveCause
from server.front.routing.router import Router
from server.link.messages import ToRank

MOVE_EVERY_S = 0.05  # minimum time between two searches for moves
_POLL_S = 0.02  # while a drain is awaited


class RankMessages(Protocol):
    """Messages to ranks, implemented by `server.link.ranks.Ranks`."""

    def post(self, rank: int, message: ToRank) -> None:
        """Send a message to a rank, unless it is gone."""


class Drain(NamedTuple):
    """The state of a draining rank."""

    rank: int
    num_requests: int  # choices at the rank
    seconds: float  # since the drain began


class Moves:
    """Lets requests move, and drains ranks."""

    def __init__(
        self,
        router: Router,
        ranks: RankMessages,
        journal: Journal,
        *,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router, self._ranks, self._journal = router, ranks, journal
        self._events, self._clock = events or EventLog(), clock
        self._begun_s: dict[int, float] = {}  # by draining rank
        self._is_noted: set[int] = set()  # draining ranks with a noted end
        self._looked_s = -math.inf  # time of the last search
        # Returns whether the other fronts, if there are any, give a draining rank no requests any more.
        self.all_follow: Callable[[], bool] = lambda: True
        # Called with a request that its rank will release, the rank that has reserved a place for it, and whether the two ranks
        # run in lock-step.
        self.on_leaving: Callable[[str, int, bool], None] = lambda _request_id, _target, _in_step: None

    def num_open(self, rank: int) -> int:
        """Return the number of requests at a rank."""
        return self._router.num_open(rank)

    def look(self, *, is_urgent: bool = False) -> None:
        """Search for requests to move, at intervals, and post their withdrawals. `is_urgent` searches now."""
        now_s = self._clock()
        if now_s - self._looked_s < MOVE_EVERY_S and not is_urgent:
            return
        self._looked_s = now_s
        router = self._router
        for cause, moves in (
            (MoveCause.DRAIN, router.plan_drains()),
            (MoveCause.HAND_OVER, router.plan_hand_overs()),
            (MoveCause.QUEUE, router.plan_moves(self._prompt_of)),
            (MoveCause.MEMORY, router.plan_relief(self._prompt_of)),
        ):
            for request_id, rank in moves.items():
                leaves_surely = cause is not MoveCause.QUEUE
                target = router.target_of(request_id) if leaves_surely else None
                in_step = target is not None and router.are_in_step(rank, target)
                self._ranks.post(rank, Withdraw(request_id, even_if_begun=leaves_surely, in_step=in_step))
                if target is not None:
                    self.on_leaving(request_id, target, in_step)
        self._note_drained()

    def _prompt_of(self, request_id: str) -> Sequence[int]:
        return self._journal.open_entries[request_id].request.key_ids

    def drain(self, rank: int) -> None:
        """Move a rank's requests to the others, and give it no new ones. A rank that is draining goes on.

        Raises:
            ApiError: The rank does not exist or is away, or no other rank could serve its requests.
        """
        self._check(rank)
        if self._router.is_draining(rank):
            return
        if not self._router.is_available(rank):
            raise ApiError(409, f"Rank {rank} is away, so it has no requests to move.")
        if not self._router.can_spare(rank):
            raise ApiError(
                409,
                f"Rank {rank} is the last rank that takes requests: the others are away or draining. Undo a drain first.",
            )
        self._router.drain(rank)
        self._begun_s[rank] = self._clock()
        self._is_noted.discard(rank)
        self._events.note("draining", f"rank {rank} is draining", rank=rank)
        self.look(is_urgent=True)

    def undo(self, rank: int) -> None:
        """Let a rank take requests again. Does nothing if it is not draining.

        Raises:
            ApiError: The rank does not exist.
        """
        self._check(rank)
        if self._router.is_draining(rank):
            self._router.undrain(rank)
            self._events.note("undrained", f"rank {rank} takes requests again", rank=rank)

    def _check(self, rank: int) -> None:
        num_ranks = self._router.num_ranks
        if not 0 <= rank < num_ranks:
            raise bad_request(f"Rank {rank} does not exist; the ranks are 0 to {num_ranks - 1}.", "rank")

    async def wait(self, rank: int, timeout_s: float) -> None:
        """Wait until a draining rank has no requests, its drain has ended, or the time is up."""
        until_s = self._clock() + timeout_s
        while self._router.is_draining(rank) and self._clock() < until_s:
            if self.all_follow() and not self._router.num_open(rank):
                break
            await asyncio.sleep(min(_POLL_S, until_s - self._clock()))
        self._note_drained()

    def takes_requests(self, rank: int) -> bool:
        """Return whether a rank may get requests."""
        return self._router.is_receiver(rank)

    def drains(self) -> list[Drain]:
        """Return the draining ranks."""
        now_s = self._clock()
        return [
            Drain(rank, self._router.num_open(rank), now_s - begun_s)
            for rank, begun_s in sorted(self._begun_s.items())
            if self._router.is_draining(rank)
        ]

    def _note_drained(self) -> None:
        for rank, num_requests, seconds in self.drains() if self._begun_s else ():
            if not num_requests and rank not in self._is_noted:
                self._is_noted.add(rank)
                self._events.note("drained", f"rank {rank} has no requests left", rank=rank, seconds=seconds)
