"""The way of a choice to a rank: its rank, the place of its adapter, the node that has its prefix, and the rank that comes next.

A choice is submitted with its delivered tokens, so a rank that continues it generates the same rest of the answer. If its rank
will hand it over or release it, the next rank expects it and loads its blocks meanwhile. The module keeps no choices: those
without a rank are the caller's.
"""

from dataclasses import replace
from typing import NamedTuple

from server.front.adapters.places import RequestAdapters
from server.front.generations import Generation
from server.front.journal import Journal
from server.front.routing.prefix_sources import PrefixSources
from server.front.routing.router import Router
from server.link.messages import Expect
from server.link.ranks import Ranks


class Resubmission(NamedTuple):
    """How a choice that a rank had goes to a rank again. The defaults are those of a new choice."""

    is_moved: bool = False  # pick a rank regardless of the session, which then follows to that rank
    target: int | None = None  # the rank that reserved a place for it; None lets the router pick one
    previous: int | None = None  # the rank that had begun it
    saved_tokens: int = 0  # first tokens that its last rank is saving to the tiers of its host


NEW = Resubmission()


class Submissions:
    """Submits choices to ranks."""

    def __init__(
        self,
        ranks: Ranks,
        router: Router,
        journal: Journal,
        sources: PrefixSources,
        adapters: RequestAdapters | None,
    ) -> None:
        """Args: sources has the serving ranks; adapters has the places of adapters, None if no request has one."""
        self._ranks, self._router, self._journal = ranks, router, journal
        self._sources, self._adapters = sources, adapters

    def submit(self, generation: Generation, now_s: float, again: Resubmission = NEW) -> bool:
        """Submit a choice to the best rank. Returns False if no rank is there or its adapter has no place.

        Raises:
            ImageRowsError: The rows of its images cannot be read.
        """
        request_id, params = generation.ask.request.request_id, generation.ask.request.params
        place = self._adapter_place(generation) if self._router.has_ranks else None
        if place is None:
            self.expect_no_more(generation)
            return False
        request = replace(self._journal.request_so_far(request_id), adapter_place=place)
        token_ids = [*request.key_ids, *request.replayed_ids]
        session = generation.asker.session
        num_more = max(0, params.max_tokens - len(request.replayed_ids))
        if again.target is not None and request.replayed_ids:  # it was running
            rank, next_rank = again.target, None
        else:
            rank, next_rank = self._router.assign(
                token_ids, "" if again.is_moved else session, most_tokens=num_more, rank=again.target
            )
        is_near = self._router.share_host(generation.rank, rank)
        if self._sources.has_several:
            held = self._router.held_tokens(token_ids)
            request = replace(request, prefix_at=self._sources.address_for(rank, held, again.previous))
        self._journal.move(request_id, rank)
        generation.move(rank, now_s)
        self._router.admit(
            request_id,
            rank,
            token_ids,
            num_more,
            session,
            priority=request.priority,
            key_id=request.key_id,
            num_moves=generation.num_moves,
            is_resumed=bool(request.replayed_ids),
            next_rank=next_rank,
        )
        if next_rank is not None or again.saved_tokens:
            request = replace(
                request,
                hands_over=next_rank is not None,
                num_awaited_tokens=again.saved_tokens if is_near or request.prefix_at else 0,
            )
        self.expect_no_more(generation, rank)
        self._ranks.submit(rank, request, now_s=now_s)
        if next_rank is not None and self._router.share_host(rank, next_rank):
            generation.expected_at = next_rank
            self._ranks.expect(next_rank, request, now_s=now_s)
        return True

    def announce(self, generation: Generation, target: int, now_s: float, *, in_step: bool) -> None:
        """Let a rank load the blocks of a begun choice that its rank will release, if both are on one host.

        `in_step`: whether they run in lock-step.
        """
        request = self._journal.request_so_far(generation.ask.request.request_id)
        if request.replayed_ids and self._router.share_host(generation.rank, target):
            self.expect_no_more(generation, target)
            generation.expected_at = target
            self._ranks.expect(target, request, now_s=now_s, in_step=in_step)

    def expect_no_more(self, generation: Generation, rank: int | None = None) -> None:
        """Let the rank that expects a request give its blocks back, unless the request comes there: to `rank`."""
        expected_at, generation.expected_at = generation.expected_at, None
        if expected_at not in (None, rank):
            assert expected_at is not None
            self._ranks.post(expected_at, Expect(generation.ask.request.request_id, None))

    def _adapter_place(self, generation: Generation) -> int | None:
        """Return the place of a choice's adapter, -1 if it has none; None if it must wait for one."""
        request = generation.ask.request
        if not request.adapter:
            return -1
        assert self._adapters is not None, "the service has no adapters"
        return self._adapters.admit(request.adapter, request.request_id)
