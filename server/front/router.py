"""Route each request to the rank with the least work before the request's first token.

That work is the rank's outstanding tokens plus the part of the prompt that the rank does not hold. So with equal load the
longest known prefix decides, and a long prefix is worth a short queue. If a rank's seats are all taken, one must become free
first: the steps until then count as tokens, too. The idea of weighing cached prefix against load in tokens is Mooncake's
(arXiv 2407.00079) and Preble's (arXiv 2407.00023). Requests of one session go to the rank of its last request, while that
rank serves and has not much more work than the others. So they find their prefix even if a new turn rewrites earlier ones.

The length of answers is unknown in advance, so queues drift apart; a rank that returns has no queue at all. A request
that has not begun costs nothing to move, and is moved to a rank where it can begin at once (Llumnix, arXiv 2406.03243, also
moves running requests with their cache).

A pure state machine without IO or clock, tested alone. Rejected: strict least-loaded with affinity only on ties, which under
load never reuses a conversation's prefix; consistent hashing, which ignores load.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.policy.request import RankStats

PREFIX_CHUNK_TOKENS = 64  # granularity of the prefix memory; a few blocks
MAX_PREFIX_CHUNKS = 1 << 16  # remembered over all ranks: 4 Mi tokens, some 20 MB
MAX_SESSIONS = 1 << 16  # the latest sessions, remembered over all ranks
# A session leaves its rank if its work exceeds this multiple of the least loaded rank's work plus these tokens.
SESSION_SHARE, SESSION_ROOM_TOKENS = 1.5, 4096
MOVE_GAIN_TOKENS = 512  # minimum gain of a move, so that requests do not move back and forth
MAX_MOVES = 3  # of one request
EXPECTED_OUTPUT_TOKENS = 256  # upper bound of the charge for max_tokens: its default is the whole context
# Prompt tokens that weigh as much as a step in which all running requests get a token; measured: docs/LOG.md.
STEP_PROMPT_TOKENS = 16
_MANY_SEATS = 1 << 40  # of a rank that has not reported its seats


@dataclass(slots=True)
class _Load:
    """The remaining work of one request for its rank."""

    rank: int
    prompt_tokens: int  # 0 once the first token has come
    output_tokens: int
    held_tokens: int  # of the prompt, seen by the rank before
    priority: int
    key_id: str
    num_moves: int
    waits: bool = True  # until the rank reports otherwise
    target: int | None = None  # the rank to move it to, after its own rank has released it

    @property
    def num_tokens(self) -> int:
        """Tokens that the rank still has to run for the request."""
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class _Room:
    """The free capacity of a rank without waiting requests."""

    seats: int
    tokens: int  # of prompts that fit into its free blocks


class Router:
    """Tracks the ranks' outstanding tokens and the prefixes that they have seen."""

    def __init__(self, num_ranks: int) -> None:
        assert num_ranks >= 1, "a service has at least one rank"
        self._outstanding = np.zeros(num_ranks, dtype=np.int64)
        self._num_admitted = np.zeros(num_ranks, dtype=np.int64)
        self._num_open = np.zeros(num_ranks, dtype=np.int64)
        self._seats = np.full(num_ranks, _MANY_SEATS)  # until ranks report them
        self._is_available = np.ones(num_ranks, dtype=bool)
        self._loads: dict[str, _Load] = {}  # in order of arrival
        self._block_tokens: dict[int, int] = {}  # by rank, once reported
        self._stats: dict[int, RankStats] = {}  # by rank, the last report
        # Chain hash of a prefix -> ranks that have seen it -> number of requests that brought it there.
        self._holders: OrderedDict[int, dict[int, int]] = OrderedDict()
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
        """Make a rank unavailable, and forget its prefixes."""
        self._is_available[rank] = False
        self._stats.pop(rank, None)
        self._num_admitted[rank] = 0
        for holders in self._holders.values():
            holders.pop(rank, None)

    def pick(self, prompt_ids: Sequence[int], session: str = "", *, untold: np.ndarray | None = None) -> int:
        """Return the session's rank if it can take more work. Otherwise return the available rank that reaches this prompt's
        first token after the fewest tokens.

        Ties go to the rank with the fewest requests so far, then to the lowest number. Some rank must be available.

        Args:
            prompt_ids: Tokens of the request.
            session: Session of the request, or "" for none.
            untold: [ranks] Tokens delivered by ranks but not reported to `progress` yet, or None if there are none.
        """
        left = self._outstanding + self._seat_tokens(self._num_open)
        if untold is not None:
            left -= untold
        ranks = np.flatnonzero(self._is_available)
        own = self._sessions.get(session) if session else None
        if own is not None and self._is_available[own]:
            least = left[ranks].min()
            if left[own] <= SESSION_SHARE * least + SESSION_ROOM_TOKENS:
                return own
        for rank, num_tokens in self._held_tokens(prompt_ids).items():
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
    ) -> None:
        """Add a request to the load of `rank`, and bind its session to that rank."""
        assert request_id not in self._loads, f"request {request_id} is admitted already"
        held_tokens = self._remember(prompt_ids, rank)
        load = _Load(
            rank,
            len(prompt_ids),
            min(max_tokens, EXPECTED_OUTPUT_TOKENS),
            held_tokens=held_tokens,
            priority=priority,
            key_id=key_id,
            num_moves=num_moves,
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
        """Record that a rank has begun a request, which therefore stays there."""
        load = self._loads.get(request_id)
        if load is not None:
            load.waits, load.target = False, None

    def progress(self, request_id: str, num_tokens: int) -> None:
        """Record `num_tokens` delivered tokens: the prompt is done, and less output remains."""
        load = self._loads.get(request_id)
        if load is None or num_tokens == 0:
            return
        spent = min(num_tokens, load.output_tokens)
        self._outstanding[load.rank] -= load.prompt_tokens + spent
        load.prompt_tokens = 0
        load.output_tokens -= spent

    def retire(self, request_id: str) -> None:
        """Remove a request's remaining load from its rank. Does nothing for an unknown request."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._outstanding[load.rank] -= load.num_tokens
            self._num_open[load.rank] -= 1

    def take_back(self, request_id: str, prompt_ids: Sequence[int]) -> int | None:
        """Record that a rank released a request, and forget the prefixes that only this request brought there.

        Args:
            prompt_ids: Tokens of the request at its admission.

        Returns:
            The rank that reserved a place for it. None if that rank is lost, or requests wait there now.
        """
        load = self._loads[request_id]
        self.retire(request_id)
        for chunk in _chain(prompt_ids):
            holders = self._holders.get(chunk, {})
            if holders.get(load.rank, 0) > 1:
                holders[load.rank] -= 1
            else:
                holders.pop(load.rank, None)
        stats = None if load.target is None else self._stats.get(load.target)
        return None if stats is None or stats.num_waiting else stats.rank

    def note_size(self, rank: int, *, seats: int, block_tokens: int) -> None:
        """Record a rank's number of seats (requests that run at once) and tokens per block."""
        self._seats[rank], self._block_tokens[rank] = seats, block_tokens

    def note_stats(self, stats: RankStats) -> None:
        """Record a rank's state after a step."""
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
        rooms = self._rooms()
        crowded = {
            rank for rank, stats in self._stats.items() if stats.num_waiting and self._is_available[rank]
        }
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
            if load.target is not None:
                continue
            left = before + self._seat_tokens(num_before)
            target = self._better_rank(load, prompt_of(request_id), rooms, left)
            if target is None:
                before[load.rank] += load.num_tokens
                num_before[load.rank] += 1
                continue
            load.target = target
            moves[request_id] = load.rank
            before[target] += load.num_tokens
            num_before[target] += 1
            rooms[target].seats -= 1
            rooms[target].tokens -= load.prompt_tokens
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
        fitting = [
            rank for rank, room in rooms.items() if room.seats > 0 and room.tokens >= load.prompt_tokens
        ]
        if not fitting or load.num_moves >= MAX_MOVES:
            return None
        held = self._held_tokens(prompt_ids)
        left = {rank: before[rank] - held.get(rank, 0) for rank in fitting}
        target = min(fitting, key=lambda rank: (left[rank], rank))
        gain = before[load.rank] - load.held_tokens - left[target]
        return target if gain >= MOVE_GAIN_TOKENS else None

    def _rooms(self) -> dict[int, _Room]:
        """Return the ranks without waiting requests, with the room that is left after submitted and planned ones."""
        rooms = {}
        for rank, stats in sorted(self._stats.items()):
            block_tokens = self._block_tokens.get(rank)
            if block_tokens is not None and self._is_available[rank] and not stats.num_waiting:
                # One block stays free for each running request, as in the rank's scheduler.
                free_blocks = stats.num_free_blocks - stats.num_running - 1
                rooms[rank] = _Room(int(self._seats[rank]) - stats.num_running, free_blocks * block_tokens)
        for load in self._loads.values():
            rank = load.rank if load.target is None else load.target
            if load.waits and rank in rooms:
                rooms[rank].seats -= 1
                rooms[rank].tokens -= load.prompt_tokens
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

    def _held_tokens(self, prompt_ids: Sequence[int]) -> dict[int, int]:
        """Return the number of prefix tokens that each rank has seen, for ranks that have seen any."""
        held: dict[int, int] = {}
        still: set[int] | None = None
        num_tokens = 0
        for chunk in _chain(prompt_ids):
            holders = self._holders.get(chunk, {}).keys()
            for rank in still - holders if still else ():
                held[rank] = num_tokens
            still = set(holders) if still is None else still & holders
            if not still:
                break
            num_tokens += PREFIX_CHUNK_TOKENS
        return held | dict.fromkeys(still or (), num_tokens)

    def _remember(self, prompt_ids: Sequence[int], rank: int) -> int:
        """Record that a rank will have seen a prompt. Returns how many of its first tokens the rank had seen before."""
        num_held, is_held = 0, True
        for chunk in _chain(prompt_ids):
            holders = self._holders.setdefault(chunk, {})
            is_held = is_held and rank in holders
            num_held += PREFIX_CHUNK_TOKENS * is_held
            holders[rank] = holders.get(rank, 0) + 1
            self._holders.move_to_end(chunk)
        while len(self._holders) > MAX_PREFIX_CHUNKS:
            self._holders.popitem(last=False)
        return num_held


def _chain(prompt_ids: Sequence[int]) -> Iterator[int]:
    """Yield one hash per whole chunk of the prompt. Each hash covers everything before it."""
    value = 0
    for start in range(0, len(prompt_ids) - PREFIX_CHUNK_TOKENS + 1, PREFIX_CHUNK_TOKENS):
        value = hash((value, tuple(prompt_ids[start : start + PREFIX_CHUNK_TOKENS])))
        yield value
