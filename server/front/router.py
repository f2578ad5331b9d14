"""Route each request to the rank with the least work before the request's first token.

That work is the rank's outstanding tokens plus the part of the prompt that the rank does not hold. So with equal load the
longest known prefix decides, and a long prefix is worth a short queue. If a rank's seats are all taken, one must become free
first: the steps until then count as tokens, too. The idea of weighing cached prefix against load in tokens is Mooncake's
(arXiv 2407.00079) and Preble's (arXiv 2407.00023). Requests of one session go to the rank of its last request, while that
rank serves and has not much more work than the others. So they find their prefix even if a new turn rewrites earlier ones.

The length of answers is unknown in advance, so queues drift apart; a rank that returns has no queue at all. So requests
move (`MoveCause`). One that has not begun costs nothing to move, and moves to a rank where it can begin at once. A rank that
is short of blocks gives its newest running requests to a rank with room instead of preempting them (Llumnix, arXiv
2406.03243). All requests of a draining rank move. The router assumes that the new rank computes a moved request's tokens
again, except a prefix that it holds.

A pure state machine without IO or clock, tested alone. Rejected: strict least-loaded with affinity only on ties, which under
load never reuses a conversation's prefix; consistent hashing, which ignores load.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from scheduler.policy.request import RankStats
from server.front.prefixes import PrefixMemory

MAX_SESSIONS = 1 << 16  # the latest sessions, remembered over all ranks
# A session leaves its rank if its work exceeds this multiple of the least loaded rank's work plus these tokens.
SESSION_SHARE, SESSION_ROOM_TOKENS = 1.5, 4096
MOVE_GAIN_TOKENS = 512  # minimum gain of a move, so that requests do not move back and forth
MAX_MOVES = 3  # of one request
MOST_CANDIDATES = 8  # requests of a rank that are considered at once: each may take a millisecond
EXPECTED_OUTPUT_TOKENS = 256  # upper bound of the charge for max_tokens: its default is the whole context
# Prompt tokens that weigh as much as a step in which all running requests get a token; measured: docs/LOG.md.
STEP_PROMPT_TOKENS = 16
USUAL_STEP_TOKENS = 2048  # of a rank that has not reported its limit
_MANY_SEATS = 1 << 40  # of a rank that has not reported its seats


class MoveCause(Enum):
    """Why a request moves to another rank."""

    QUEUE = "queue"  # it waits, and could begin elsewhere
    MEMORY = "memory"  # it runs, and its rank is short of blocks
    DRAIN = "drain"  # its rank is draining


class ReleasedRequest(NamedTuple):
    """A request that its rank released."""

    cause: MoveCause
    # The rank that reserved a place for it. None if that rank is lost or draining. None also if requests wait there now, unless
    # this one has begun: it precedes them.
    target: int | None = None


@dataclass(slots=True)
class _Load:
    """The remaining work of one request for its rank."""

    rank: int
    prompt_tokens: int  # 0 once the first token has come
    output_tokens: int
    context_tokens: int  # prompt and delivered tokens, which its blocks hold
    most_tokens: int  # that may still be generated
    held_tokens: int  # of the prompt, seen by the rank before
    priority: int
    key_id: str
    num_moves: int
    is_resumed: bool  # begun on another rank, so that it precedes requests that wait
    waits: bool = True  # until the rank reports otherwise
    cause: MoveCause | None = None  # why it moves, once its rank has the withdrawal; None if it stays
    target: int | None = None  # the rank with a place reserved for it, if it moves

    @property
    def num_tokens(self) -> int:
        """Tokens that the rank still has to run for the request."""
        return self.prompt_tokens + self.output_tokens

    @property
    def room_tokens(self) -> int:
        """Tokens for which another rank needs free blocks: those of the prompt, or, once it has begun, also those that it will
        probably generate."""
        return self.context_tokens + (0 if self.waits else min(self.most_tokens, EXPECTED_OUTPUT_TOKENS))


@dataclass(slots=True)
class _Room:
    """The free capacity of a rank."""

    seats: int
    tokens: int  # that fit into its free blocks


class Router:
    """Tracks the ranks' outstanding tokens and the prefixes that they have seen."""

    def __init__(self, num_ranks: int) -> None:
        assert num_ranks >= 1, "a service has at least one rank"
        self._outstanding = np.zeros(num_ranks, dtype=np.int64)
        self._num_admitted = np.zeros(num_ranks, dtype=np.int64)
        self._num_open = np.zeros(num_ranks, dtype=np.int64)
        self._seats = np.full(num_ranks, _MANY_SEATS)  # until ranks report them
        self._step_tokens = np.full(num_ranks, USUAL_STEP_TOKENS)
        self._is_available = np.ones(num_ranks, dtype=bool)
        self._is_draining = np.zeros(num_ranks, dtype=bool)
        self._has_preempted: set[int] = set()  # ranks with requests that wait since a preemption
        self._loads: dict[str, _Load] = {}  # in order of arrival
        self._block_tokens: dict[int, int] = {}  # by rank, once reported
        self._stats: dict[int, RankStats] = {}  # by rank, the last report
        self._prefixes = PrefixMemory()
        self._sessions: OrderedDict[str, int] = OrderedDict()  # -> the rank of its last request

    @property
    def outstanding_tokens(self) -> tuple[int, ...]:
        """Tokens that each rank still has to run, according to the front."""
        return tuple(self._outstanding.tolist())

    @property
    def has_ranks(self) -> bool:
        """Whether any rank can be picked."""
        return bool(self._is_available.any())

    def enter(self, rank: int) -> None:
        """Make a rank available for picks."""
        self._is_available[rank] = True

    def leave(self, rank: int) -> None:
        """Make a rank unavailable, end its draining, and forget its prefixes."""
        self._is_available[rank] = self._is_draining[rank] = False
        self._has_preempted.discard(rank)
        self._stats.pop(rank, None)
        self._num_admitted[rank] = 0
        self._prefixes.leave(rank)

    def drain(self, rank: int) -> None:
        """Give a rank no new requests, and let `plan_drains` move those that it has."""
        self._is_draining[rank] = True

    def undrain(self, rank: int) -> None:
        """Make a draining rank an ordinary one again."""
        self._is_draining[rank] = False

    def is_available(self, rank: int) -> bool:
        """Return whether a rank serves, draining or not."""
        return bool(self._is_available[rank])

    def is_receiver(self, rank: int) -> bool:
        """Return whether a rank may get requests."""
        return bool(self._receivers()[rank])

    def is_draining(self, rank: int) -> bool:
        """Return whether a rank is draining. A lost rank is not."""
        return bool(self._is_draining[rank])

    def num_open(self, rank: int) -> int:
        """Return the number of requests at a rank."""
        return int(self._num_open[rank])

    def can_spare(self, rank: int) -> bool:
        """Return whether another rank is available and not draining."""
        others = self._is_available & ~self._is_draining
        others[rank] = False
        return bool(others.any())

    def held_tokens(self, prompt_ids: Sequence[int]) -> dict[int, int]:
        """Return the number of prefix tokens that each rank has seen, for ranks that have seen any."""
        return self._prefixes.held_tokens(prompt_ids)

    def _receivers(self) -> np.ndarray:
        """Return the ranks that may get requests: [ranks] bool. Draining ones only if no other rank is left."""
        receivers: np.ndarray = self._is_available & ~self._is_draining
        return receivers if receivers.any() else self._is_available

    def pick(self, prompt_ids: Sequence[int], session: str = "", *, untold: np.ndarray | None = None) -> int:
        """Return the session's rank if it can take more work. Otherwise return the rank that reaches this prompt's first token
        after the fewest tokens, among those that may get requests.

        Ties go to the rank with the fewest requests so far, then to the lowest number. Some rank must be available.

        Args:
            prompt_ids: Tokens of the request.
            session: Session of the request, or "" for none.
            untold: [ranks] Tokens delivered by ranks but not reported to `progress` yet, or None if there are none.
        """
        left = self._outstanding + self._seat_tokens(self._num_open)
        if untold is not None:
            left -= untold
        receivers = self._receivers()
        ranks = np.flatnonzero(receivers)
        own = self._sessions.get(session) if session else None
        if own is not None and receivers[own]:
            least = left[ranks].min()
            if left[own] <= SESSION_SHARE * least + SESSION_ROOM_TOKENS:
                return own
        for rank, num_tokens in self._prefixes.held_tokens(prompt_ids).items():
            left[rank] -= num_tokens
        left = left[ranks]
        ranks = ranks[left == left.min()]
        return int(ranks[self._num_admitted[ranks].argmin()])

    def admit(
        self,
        request_id: str,
        rank: int,
        prompt_ids: Sequence[int],
        max_tokens: int,
        session: str = "",
        *,
        priority: int = 0,
        key_id: str = "",
        num_moves: int = 0,
        is_resumed: bool = False,
    ) -> None:
        """Add a request to the load of `rank`, and bind its session to that rank.

        Args:
            num_moves: How often it has moved, except from draining ranks.
            is_resumed: Whether another rank has begun it.
        """
        assert request_id not in self._loads, f"request {request_id} is admitted already"
        held_tokens = self._prefixes.remember(prompt_ids, rank)
        load = _Load(
            rank,
            len(prompt_ids),
            min(max_tokens, EXPECTED_OUTPUT_TOKENS),
            context_tokens=len(prompt_ids),
            most_tokens=max_tokens,
            held_tokens=held_tokens,
            priority=priority,
            key_id=key_id,
            num_moves=num_moves,
            is_resumed=is_resumed,
        )
        self._loads[request_id] = load
        self._outstanding[rank] += load.num_tokens
        self._num_open[rank] += 1
        self._num_admitted[rank] += 1
        if session:
            self._sessions[session] = rank
            self._sessions.move_to_end(session)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def begin(self, request_id: str) -> None:
        """Record that a rank has begun a request. It stays there if it was to move because it waited."""
        load = self._loads.get(request_id)
        if load is not None:
            load.waits = False
            if load.cause is MoveCause.QUEUE:
                load.cause = load.target = None

    def progress(self, request_id: str, num_tokens: int) -> None:
        """Record `num_tokens` delivered tokens: the prompt is done, and less output remains."""
        load = self._loads.get(request_id)
        if load is None or num_tokens == 0:
            return
        spent = min(num_tokens, load.output_tokens)
        self._outstanding[load.rank] -= load.prompt_tokens + spent
        load.prompt_tokens = 0
        load.output_tokens -= spent
        load.context_tokens += num_tokens
        load.most_tokens -= num_tokens

    def retire(self, request_id: str) -> None:
        """Remove a request's remaining load from its rank. Does nothing for an unknown request."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._outstanding[load.rank] -= load.num_tokens
            self._num_open[load.rank] -= 1

    def take_back(self, request_id: str, prompt_ids: Sequence[int]) -> ReleasedRequest:
        """Record that a rank released a request. If it had not begun, forget the prefixes that only it brought there.

        Args:
            prompt_ids: Tokens of the request at its admission, or more.
        """
        load = self._loads[request_id]
        cause = load.cause or MoveCause.QUEUE
        self.retire(request_id)
        if load.waits:
            self._prefixes.forget(prompt_ids, load.rank)
        stats = None if load.target is None else self._stats.get(load.target)
        if stats is None or not self._receivers()[stats.rank] or (load.waits and stats.num_waiting):
            return ReleasedRequest(cause)
        return ReleasedRequest(cause, stats.rank)

    def note_size(
        self, rank: int, *, seats: int, block_tokens: int, step_tokens: int = USUAL_STEP_TOKENS
    ) -> None:
        """Record a rank's number of seats (requests that run at once), tokens per block, and most tokens per step."""
        self._seats[rank], self._block_tokens[rank] = seats, block_tokens
        self._step_tokens[rank] = step_tokens

    def note_stats(self, stats: RankStats) -> None:
        """Record a rank's state after a step."""
        last = self._stats.get(stats.rank)
        if last is not None and stats.num_preemptions > last.num_preemptions:
            self._has_preempted.add(stats.rank)
        if not stats.num_waiting:
            self._has_preempted.discard(stats.rank)
        self._stats[stats.rank] = stats

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
        before, num_before = self._outstanding.copy(), self._num_open.copy()
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
        rooms = {rank: room for rank, room in (self._rooms() if short else {}).items() if rank not in short}
        if not rooms:
            return moves
        for load in self._loads.values():
            if load.rank in rooms:
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

    def _reserve(self, load: _Load, target: int, cause: MoveCause, rooms: Mapping[int, _Room]) -> int:
        """Reserve a place for a request that will move. Returns its present rank."""
        load.cause, load.target = cause, target
        rooms[target].seats -= 1
        rooms[target].tokens -= load.room_tokens
        return load.rank

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

    def _least_urgent(self, rank: int) -> list[tuple[str, _Load]]:
        """Return a rank's requests that have begun and stay, in the order in which it would preempt them."""
        begun = [
            each
            for each in reversed(self._loads.items())
            if each[1].rank == rank and not each[1].waits and each[1].cause is None
        ]
        return sorted(begun, key=lambda each: -each[1].priority)

    def plan_drains(self) -> dict[str, int]:
        """Choose requests of draining ranks: all that wait, and the others as far as other ranks have room for them.

        As `plan_moves`. Requests that wait go wherever `pick` sends them. A rank gets as many running ones at a time as it
        computes in one step, so that a stream pauses for its own tokens and not for those of the streams before it.
        """
        moves: dict[str, int] = {}
        if not self._is_draining.any() or not (self._is_available & ~self._is_draining).any():
            return moves
        rooms = self._rooms(with_queues=True)
        coming: Counter[int] = Counter()  # by rank: tokens of begun requests that have not begun there yet
        for load in self._loads.values():
            if load.target is not None or (load.waits and load.is_resumed):
                coming[load.rank if load.target is None else load.target] += load.context_tokens
        for request_id, load in self._loads.items():
            if not self._is_draining[load.rank] or load.cause is not None:
                continue
            if load.waits:
                load.cause, moves[request_id] = MoveCause.DRAIN, load.rank
                continue
            most = self._step_tokens - load.context_tokens
            free = {rank: room for rank, room in rooms.items() if coming[rank] <= max(0, most[rank])}
            target = _roomiest(free, load)
            if target is not None:
                coming[target] += load.context_tokens
                moves[request_id] = self._reserve(load, target, MoveCause.DRAIN, rooms)
        return moves

    def _in_order_of_begin(self, ranks: Collection[int]) -> list[tuple[str, _Load]]:
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
        self, load: _Load, prompt_ids: Sequence[int], rooms: Mapping[int, _Room], before: np.ndarray
    ) -> int | None:
        """Return the rank where a waiting request would begin soonest, or None if it would gain too little."""
        fitting = _fitting(rooms, load)
        if not fitting or load.num_moves >= MAX_MOVES:
            return None
        held = self._prefixes.held_tokens(prompt_ids)
        left = {rank: before[rank] - held.get(rank, 0) for rank in fitting}
        target = min(fitting, key=lambda rank: (left[rank], rank))
        gain = before[load.rank] - load.held_tokens - left[target]
        return target if gain >= MOVE_GAIN_TOKENS else None

    def _rooms(self, *, with_queues: bool = False) -> dict[int, _Room]:
        """Return the ranks that may get requests, with the room that is left after submitted and planned ones.

        Args:
            with_queues: Include ranks with waiting requests. Requests that have begun precede those.
        """
        rooms, receivers = {}, self._receivers()
        for rank, stats in sorted(self._stats.items()):
            block_tokens = self._block_tokens.get(rank)
            if block_tokens is not None and receivers[rank] and (with_queues or not stats.num_waiting):
                # One block stays free for each running request, as in the rank's scheduler.
                free_blocks = stats.num_free_blocks - stats.num_running - 1
                rooms[rank] = _Room(int(self._seats[rank]) - stats.num_running, free_blocks * block_tokens)
        for load in self._loads.values():
            rank = load.rank if load.target is None else load.target
            if rank not in rooms or not (load.waits or load.target is not None):
                continue
            if load.is_resumed or load.target is not None or not self._stats[rank].num_waiting:
                rooms[rank].seats -= 1
                rooms[rank].tokens -= load.room_tokens
        return rooms

    def _seat_tokens(self, num_before: np.ndarray) -> np.ndarray:
        """Return the cost of waiting for a seat on each rank, in tokens. One running request ends every
        EXPECTED_OUTPUT_TOKENS / seats steps.

        Args:
            num_before: [ranks] Requests ahead of the one that needs a seat.
        """
        num_ends = np.maximum(num_before + 1 - self._seats, 0)
        tokens: np.ndarray = num_ends * EXPECTED_OUTPUT_TOKENS * STEP_PROMPT_TOKENS // self._seats
        return tokens


def _fitting(rooms: Mapping[int, _Room], load: _Load) -> list[int]:
    """Return the ranks with a seat and blocks for a request."""
    return [rank for rank, room in rooms.items() if room.seats > 0 and room.tokens >= load.room_tokens]


def _roomiest(rooms: Mapping[int, _Room], load: _Load) -> int | None:
    """Return the rank with the most free blocks among those with room for a request, or None."""
    return max(_fitting(rooms, load), key=lambda rank: rooms[rank].tokens, default=None)
