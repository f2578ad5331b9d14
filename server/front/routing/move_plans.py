"""Which requests move to another rank, and where to (`MoveCause`).

The length of answers is unknown in advance, so queues drift apart; a rank that returns has no queue at all. One that has not
begun costs nothing to move, and moves to a rank where it can begin at once. A rank that is short of blocks gives its newest
running requests to a rank with room instead of preempting them (Llumnix, arXiv 2406.03243). All requests of a draining rank
move. A new rank is assumed to compute a moved request's tokens again, except a prefix that it holds.

Roles are kept: a waiting prompt moves to ranks that run prompts, and a running request to ranks that decode.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from server.front.routing.loads import (
    EXPECTED_OUTPUT_TOKENS,
    STEP_PROMPT_TOKENS,
    MoveCause,
    RankLoads,
    RankRoom,
    RequestLoad,
)

MOVE_GAIN_TOKENS = 512  # minimum gain of a move, so that requests do not move back and forth
MAX_MOVES = 3  # of one request
MOST_CANDIDATES = 8  # requests of a rank that are considered at once: each may take a millisecond


class MovePlans(RankLoads):
    """Chooses requests that move."""

    def plan_moves(self, prompt_of: Callable[[str], Sequence[int]]) -> dict[str, int]:
        """Choose waiting requests that could begin at once at another rank, the most urgent first.

        A move must save at least MOVE_GAIN_TOKENS, counting seats and the parts of the prompt that both ranks hold. The
        caller asks the present rank to release the request, because it may have begun meanwhile. Until `begin`, `take_back`
        or `retire` the request is not chosen again, and its new place stays reserved.

        Args:
            prompt_of: Returns a request's tokens by id.

        Returns:
            The ranks where the chosen requests wait, by request id.
        """
        rooms, receivers = self._rooms(), self._receivers()
        crowded = {rank for rank, stats in self._stats.items() if stats.num_waiting and receivers[rank]}
        if not rooms or not crowded:
            return {}
        waiting = self._in_order_of_begin(crowded)
        # Load ahead of a request: at first all load except that of the requests that wait at crowded ranks.
        totals = self._totals()
        before, num_before = totals.outstanding.copy(), totals.num_open.copy()
        for _, load in waiting:
            before[load.rank] -= load.num_tokens
            num_before[load.rank] -= 1
        moves: dict[str, int] = {}
        for request_id, load in waiting:
            if load.cause is not None:
                continue
            left = before + self._seat_tokens(num_before)
            target = self._better_rank(load, prompt_of(request_id), rooms, left)
            if target is None:
                before[load.rank] += load.num_tokens
                num_before[load.rank] += 1
                continue
            moves[request_id] = self._reserve(load, target, MoveCause.QUEUE, rooms)
            before[target] += load.num_tokens
            num_before[target] += 1
        return moves

    def plan_relief(self, prompt_of: Callable[[str], Sequence[int]]) -> dict[str, int]:
        """Choose a running request of each rank that is short of blocks, for a rank with room, as `plan_moves` does.

        It is the newest one that fits: the new rank has a seat, and blocks for its tokens, for those that it will probably
        generate, and for those that the new rank's requests will. So the new rank will hardly be short of blocks next. A rank
        gives one request at a time. If a preempted request waits there, tokens are computed again in any case. Otherwise the
        place must be worth more than the tokens that the new rank computes again: as many as pass before a running request ends.
        """
        moves: dict[str, int] = {}
        loads = self._loads.values() if self._has_preempted else ()
        num_fresh = Counter(load.rank for load in loads if load.waits)
        preempted = {rank for rank in self._has_preempted if self._stats[rank].num_waiting > num_fresh[rank]}
        short = self._short_ranks(preempted)
        rooms = (
            {rank: room for rank, room in self._rooms_to_decode().items() if rank not in short}
            if short
            else {}
        )
        if not rooms:
            return moves
        for load in self._loads.values():
            if load.rank in rooms and load.next_rank is None:
                rooms[load.rank].tokens -= load.output_tokens
        giving = {load.rank for load in self._loads.values() if load.cause is MoveCause.MEMORY}
        for rank in sorted(short - giving):
            worth = EXPECTED_OUTPUT_TOKENS * STEP_PROMPT_TOKENS // self._stats[rank].num_running
            for request_id, load in self._least_urgent(rank)[:MOST_CANDIDATES]:
                target = _roomiest(rooms, load)
                if target is None or load.num_moves >= MAX_MOVES:
                    continue
                num_over = load.context_tokens - worth  # if nothing of it is cached there
                if (
                    rank in preempted
                    or num_over < 0
                    or self._prefixes.held_tokens(prompt_of(request_id)).get(target, 0) > num_over
                ):
                    moves[request_id] = self._reserve(load, target, MoveCause.MEMORY, rooms)
                    break
        return moves

    def _reserve(
        self, load: RequestLoad, target: int, cause: MoveCause, rooms: Mapping[int, RankRoom]
    ) -> int:
        """Reserve a place for a request that will move. Returns its present rank."""
        load.cause, load.target = cause, target
        rooms[target].take(load.room_tokens)
        return load.rank

    def _rooms_to_decode(self, *, with_queues: bool = False) -> dict[int, RankRoom]:
        """Return `_rooms` of the ranks that may get requests to decode."""
        takers = self._takers(self._runs_decodes)
        return {rank: room for rank, room in self._rooms(with_queues=with_queues).items() if takers[rank]}

    def _short_ranks(self, preempted: Collection[int]) -> set[int]:
        """Return the ranks that lack blocks: they have preempted, will soon, or have a seat for a waiting request but no blocks.

        Args:
            preempted: Ranks where preempted requests wait.
        """
        short: set[int] = set()
        free_tokens: dict[int, int] = {}  # of ranks with a seat for a waiting request
        for rank, stats in self._stats.items():
            block_tokens = self._block_tokens.get(rank)
            if block_tokens is None or not stats.num_running or self._is_draining[rank]:
                continue
            free_blocks = stats.num_free_blocks - stats.num_running
            if free_blocks < 0 or rank in preempted:
                short.add(rank)
            elif stats.num_waiting and stats.num_running < self._seats[rank]:
                free_tokens[rank] = free_blocks * block_tokens
        for _, load in self._in_order_of_begin(free_tokens) if free_tokens else ():
            free = free_tokens.pop(load.rank, None)
            if free is not None and load.prompt_tokens > free:  # the rank's first one
                short.add(load.rank)
        return short

    def _least_urgent(self, rank: int) -> list[tuple[str, RequestLoad]]:
        """Return a rank's requests that have begun and stay, in the order in which it would preempt them."""
        begun = [each for each in reversed(self._loads.items()) if each[1].rank == rank and _stays(each[1])]
        return sorted(begun, key=lambda each: -each[1].priority)

    def plan_pause(self) -> dict[str, int]:
        """Choose all requests. While the router is paused, nothing is picked for them. As `plan_moves` otherwise."""
        for load in self._loads.values():
            load.cause, load.target = MoveCause.SLEEP, None
        return {request_id: load.rank for request_id, load in self._loads.items()}

    def plan_drains(self) -> dict[str, int]:
        """Choose requests of draining ranks: all that wait, and the others as far as other ranks have room for them.

        As `plan_moves`. Requests that wait go wherever `pick` sends them. A rank gets as many running ones at a time as it
        computes in one step, so that a stream pauses for its own tokens and not for those of the streams before it.
        """
        if not self._is_draining.any() or not (self._is_available & ~self._is_draining).any():
            return {}
        leaving = [(name, load) for name, load in self._loads.items() if self._is_draining[load.rank]]
        moves = {}
        for request_id, load in leaving:
            if load.waits and load.cause is None:
                load.cause, moves[request_id] = MoveCause.DRAIN, load.rank
        return moves | self._plan_running(leaving, MoveCause.DRAIN)

    def plan_hand_overs(self) -> dict[str, int]:
        """Choose requests that prefill ranks decode, as far as other ranks have room for them now. As `plan_drains`.

        They stayed because no rank had room, or because their rank's role has changed. None of them moves back.
        """
        if not (self._receivers() & self._runs_decodes).any():
            return {}
        loads = self._loads.items() if not self._are_alike else ()
        return self._plan_running(
            [(name, load) for name, load in loads if not self._runs_decodes[load.rank]], MoveCause.HAND_OVER
        )

    def _plan_running(self, leaving: Sequence[tuple[str, RequestLoad]], cause: MoveCause) -> dict[str, int]:
        """Choose those of some requests that have begun and that other ranks have room for, and reserve their places."""
        moves: dict[str, int] = {}
        leaving = [(request_id, load) for request_id, load in leaving if _stays(load)]
        if not leaving:
            return moves
        rooms = self._rooms_to_decode(with_queues=True)
        coming: Counter[int] = Counter()  # by rank: tokens of begun requests that have not begun there yet
        for load in self._loads.values():
            if load.target is not None or (load.waits and load.is_resumed):
                coming[load.rank if load.target is None else load.target] += load.context_tokens
        for request_id, load in leaving:
            most = self._step_tokens - load.context_tokens
            free = {rank: room for rank, room in rooms.items() if coming[rank] <= max(0, most[rank])}
            target = _roomiest(free, load)
            if target is not None and target != load.rank:
                coming[target] += load.context_tokens
                moves[request_id] = self._reserve(load, target, cause, rooms)
        return moves

    def _has_part(self, load: RequestLoad) -> np.ndarray:
        """Return the ranks with a role for the part of a waiting request that its present rank runs: [ranks] bool."""
        is_resumed = load.is_resumed and self._runs_decodes[load.rank]
        return self._runs_decodes if is_resumed or not self._runs_prompts[load.rank] else self._runs_prompts

    def _in_order_of_begin(self, ranks: Collection[int]) -> list[tuple[str, RequestLoad]]:
        """Return requests that wait at some ranks: the most urgent first, then alternating keys, in order of arrival."""
        waiting = [each for each in self._loads.items() if each[1].waits and each[1].rank in ranks]
        waiting.sort(key=lambda each: each[1].priority)
        num_before: Counter[str] = Counter()  # by key
        places = {}
        for request_id, load in waiting:
            places[request_id] = load.priority, num_before[load.key_id]
            num_before[load.key_id] += 1
        return sorted(waiting, key=lambda each: places[each[0]])

    def _better_rank(
        self, load: RequestLoad, prompt_ids: Sequence[int], rooms: Mapping[int, RankRoom], before: np.ndarray
    ) -> int | None:
        """Return the rank where a waiting request would begin soonest, or None if it would gain too little."""
        fitting = [rank for rank in _fitting(rooms, load) if self._has_part(load)[rank]]
        if not fitting or load.num_moves >= MAX_MOVES:
            return None
        held = self._prefixes.held_tokens(prompt_ids)
        left = {rank: before[rank] - held.get(rank, 0) for rank in fitting}
        target = min(fitting, key=lambda rank: (left[rank], rank))
        gain = before[load.rank] - load.held_tokens - left[target]
        return target if gain >= MOVE_GAIN_TOKENS else None


def _stays(load: RequestLoad) -> bool:
    """Return whether a request has begun and neither moves nor will be handed over."""
    return not load.waits and load.cause is None and load.next_rank is None


def _fitting(rooms: Mapping[int, RankRoom], load: RequestLoad) -> list[int]:
    """Return the ranks with a seat and blocks for a request."""
    return [rank for rank, room in rooms.items() if room.fits(load.room_tokens)]


def _roomiest(rooms: Mapping[int, RankRoom], load: RequestLoad) -> int | None:
    """Return the rank with the most free blocks among those with room for a request, or None."""
    return max(_fitting(rooms, load), key=lambda rank: rooms[rank].tokens, default=None)
