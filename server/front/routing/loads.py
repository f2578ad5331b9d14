"""The requests at each rank, as the front counts them: remaining tokens, seats, free blocks, roles, and which ranks serve.

A prefill rank runs a prompt and hands the request over to a rank that decodes, which is chosen and charged beforehand.

`MovePlans` and `Router` decide with these figures. A pure state machine without IO or clock.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from scheduler.policy.request import RankStats
from server.front.routing.prefixes import PrefixMemory
from server.options.pools import Role

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
    HAND_OVER = "hand_over"  # its rank runs prompts only
    SLEEP = "sleep"  # the service falls asleep, and continues it after waking


@dataclass(slots=True)
class RequestLoad:
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
    next_rank: int | None = (
        None  # the rank that generates the answer, if the present one hands the request over
    )

    @property
    def num_tokens(self) -> int:
        """Tokens that the rank still has to run for the request."""
        return self.prompt_tokens + (self.output_tokens if self.next_rank is None else 0)

    @property
    def grown_tokens(self) -> int:
        """Tokens of the request, and those that it will probably generate."""
        return self.context_tokens + min(self.most_tokens, EXPECTED_OUTPUT_TOKENS)

    @property
    def room_tokens(self) -> int:
        """Tokens for which another rank needs free blocks: those of the prompt, or, once it has begun, also those that it will
        probably generate."""
        return self.context_tokens if self.waits else self.grown_tokens


@dataclass(slots=True)
class RankRoom:
    """The free capacity of a rank."""

    seats: int
    tokens: int  # that fit into its free blocks

    def fits(self, num_tokens: int) -> bool:
        """Return whether there is a seat and blocks for a request with this many tokens."""
        return self.seats > 0 and self.tokens >= num_tokens

    def take(self, num_tokens: int) -> None:
        """Reserve a seat and blocks."""
        self.seats -= 1
        self.tokens -= num_tokens


class PoolLoad(NamedTuple):
    """The load of some ranks."""

    num_ranks: int  # that serve
    num_requests: int
    prompt_steps: float  # steps that the outstanding prompts take, per serving rank
    kv_usage: float  # share of the KV blocks in use, 0 to 1


class RankCounts(NamedTuple):
    """The requests at the ranks: [ranks] int64 each."""

    outstanding: np.ndarray  # tokens that the rank still has to run
    num_admitted: np.ndarray  # requests so far
    num_open: np.ndarray  # requests at the rank
    num_coming: np.ndarray  # requests that other ranks will hand over
    prompt_tokens: np.ndarray  # of requests without a token


class SharedLoads(Protocol):
    """The counts of several fronts, implemented by `server.front.several.board.Board`."""

    prefixes: PrefixMemory

    def own_loads(self, num_ranks: int) -> RankCounts:
        """Return the counts of this front, which change in place."""

    def loads(self, num_ranks: int) -> RankCounts:
        """Return the sums over all fronts."""

    def rank_of_session(self, session: str) -> int | None:
        """Return the rank of a session's last request, or None if it is not known."""

    def bind_session(self, session: str, rank: int) -> None:
        """Record the rank of a session's last request."""


class RankLoads:
    """Counts the ranks' outstanding tokens, and remembers the prefixes that they have seen."""

    def __init__(self, num_ranks: int, *, shared: SharedLoads | None = None) -> None:
        """`shared` has the counts of all fronts; None if this is the only one."""
        assert num_ranks >= 1, "a service has at least one rank"
        own = RankCounts(*np.zeros((len(RankCounts._fields), num_ranks), dtype=np.int64))
        self._shared = shared
        self._count_in(own if shared is None else shared.own_loads(num_ranks))
        self._seats = np.full(num_ranks, _MANY_SEATS)  # until ranks report them
        self._step_tokens = np.full(num_ranks, USUAL_STEP_TOKENS)
        self._is_available = np.ones(num_ranks, dtype=bool)
        self._is_draining = np.zeros(num_ranks, dtype=bool)
        self.is_paused = False  # requests are withdrawn, and no rank can be picked
        self._runs_prompts = np.ones(num_ranks, dtype=bool)  # by their roles
        self._runs_decodes = np.ones(num_ranks, dtype=bool)
        self._has_preempted: set[int] = set()  # ranks with requests that wait since a preemption
        self._loads: dict[str, RequestLoad] = {}  # in order of arrival
        self._block_tokens: dict[int, int] = {}  # by rank, once reported
        self._hosts = [""] * num_ranks
        self._pools = [""] * num_ranks
        self._stats: dict[int, RankStats] = {}  # by rank, the last report
        self._prefixes = PrefixMemory() if shared is None else shared.prefixes

    @property
    def num_ranks(self) -> int:
        """The number of ranks, of which some may be away."""
        return len(self._is_available)

    def grow(self, num_ranks: int) -> None:
        """Make room for this many ranks. The new ones are away until they enter."""
        added = num_ranks - self.num_ranks
        if added <= 0:
            return
        grown = RankCounts(*(np.pad(counts, (0, added)) for counts in self._own))
        self._count_in(grown if self._shared is None else self._shared.own_loads(num_ranks))
        self._seats = np.pad(self._seats, (0, added), constant_values=_MANY_SEATS)
        self._step_tokens = np.pad(self._step_tokens, (0, added), constant_values=USUAL_STEP_TOKENS)
        self._is_available = np.pad(self._is_available, (0, added))
        self._is_draining = np.pad(self._is_draining, (0, added))
        self._runs_prompts = np.pad(self._runs_prompts, (0, added), constant_values=True)
        self._runs_decodes = np.pad(self._runs_decodes, (0, added), constant_values=True)
        self._hosts += [""] * added
        self._pools += [""] * added

    def _count_in(self, own: RankCounts) -> None:
        """Use these counts, which change in place."""
        self._own = own
        self._outstanding, self._num_admitted, self._num_open, self._num_coming, self._prompt_tokens = own

    @property
    def outstanding_tokens(self) -> tuple[int, ...]:
        """Tokens that each rank still has to run for this front's requests."""
        return tuple(self._outstanding.tolist())

    def _totals(self) -> RankCounts:
        """Return the counts of all fronts. Do not change them."""
        return self._own if self._shared is None else self._shared.loads(self.num_ranks)

    @property
    def has_ranks(self) -> bool:
        """Whether any rank can be picked."""
        return not self.is_paused and bool(self._is_available.any())

    def enter(self, rank: int) -> None:
        """Make a rank available for picks."""
        self._is_available[rank] = True

    def leave(self, rank: int, *, is_alive: bool = False) -> None:
        """Make a rank unavailable, and forget its prefixes. End its draining, unless it is alive."""
        self._is_available[rank] = False
        self._is_draining[rank] &= is_alive
        self._has_preempted.discard(rank)
        self._stats.pop(rank, None)
        self._num_admitted[rank] = 0
        self._prefixes.leave(rank)

    def keep_out(self, rank: int) -> None:
        """Make a rank unavailable until `enter`. Unlike after `leave`, its prefixes are remembered."""
        self._is_available[rank] = False

    def drain(self, rank: int) -> None:
        """Give a rank no new requests, and let `plan_drains` move those that it has."""
        self._is_draining[rank] = True

    def undrain(self, rank: int) -> None:
        """Make a draining rank an ordinary one again."""
        self._is_draining[rank] = False

    def set_pool(self, rank: int, name: str) -> None:
        """Set the pool of a rank. It runs in lock-step with the others of this pool."""
        self._pools[rank] = name

    def set_role(self, rank: int, role: Role) -> None:
        """Set which part of requests a rank runs. Those that it decodes move away if it no longer decodes."""
        self._runs_prompts[rank], self._runs_decodes[rank] = role is not Role.DECODE, role is not Role.PREFILL

    @property
    def _are_alike(self) -> bool:
        """Whether every rank runs prompts and decodes."""
        return bool(self._runs_prompts.all() and self._runs_decodes.all())

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
        return int(self._totals().num_open[rank])

    def can_spare(self, rank: int) -> bool:
        """Return whether another rank is available and not draining."""
        others = self._is_available & ~self._is_draining
        others[rank] = False
        return bool(others.any())

    def forget_prefixes(self) -> None:
        """Forget which prefixes ranks hold."""
        self._prefixes.clear()

    def held_tokens(self, prompt_ids: Sequence[int]) -> dict[int, int]:
        """Return the number of prefix tokens that each rank has seen, for ranks that have seen any."""
        return self._prefixes.held_tokens(prompt_ids)

    def _receivers(self) -> np.ndarray:
        """Return the ranks that may get requests: [ranks] bool. Draining ones only if no other rank is left."""
        receivers: np.ndarray = self._is_available & ~self._is_draining
        return receivers if receivers.any() else self._is_available

    def _takers(self, runs_it: np.ndarray) -> np.ndarray:
        """Return the ranks that may get a part of a request: [ranks] bool. If no rank for that part serves, all others do it.

        Args:
            runs_it: [ranks] bool. The ranks with a role for this part.
        """
        receivers = self._receivers()
        takers: np.ndarray = receivers & runs_it
        return takers if takers.any() else receivers

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
        if load.next_rank is None:
            self._outstanding[load.rank] -= load.prompt_tokens + spent
        else:
            self._outstanding[load.rank] -= load.prompt_tokens
            self._outstanding[load.next_rank] -= spent
        if load.prompt_tokens:
            self._prompt_tokens[load.rank] -= load.prompt_tokens
            load.prompt_tokens = 0
        load.output_tokens -= spent
        load.context_tokens += num_tokens
        load.most_tokens -= num_tokens

    def retire(self, request_id: str) -> None:
        """Remove a request's remaining load from its rank. Does nothing for an unknown request."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._count(load, -1)

    def _count(self, load: RequestLoad, sign: int) -> None:
        """Add a request to the figures of its ranks, or subtract it."""
        self._outstanding[load.rank] += sign * load.num_tokens
        self._prompt_tokens[load.rank] += sign * load.prompt_tokens
        self._num_open[load.rank] += sign
        if load.next_rank is not None:
            self._outstanding[load.next_rank] += sign * load.output_tokens
            self._num_coming[load.next_rank] += sign

    def load_of(self, ranks: Collection[int]) -> PoolLoad:
        """Return the load of some ranks."""
        serving = [rank for rank in ranks if self._is_available[rank]]
        totals = self._totals()
        stats = [self._stats[rank] for rank in serving if rank in self._stats]
        num_blocks = sum(each.num_blocks for each in stats)
        num_free = sum(each.num_free_blocks for each in stats)
        return PoolLoad(
            len(serving),
            int(totals.num_open[list(ranks)].sum()),
            int(totals.prompt_tokens[list(ranks)].sum()) / max(1, int(self._step_tokens[serving].sum())),
            1 - num_free / num_blocks if num_blocks else 0.0,
        )

    def note_size(
        self,
        rank: int,
        *,
        seats: int,
        block_tokens: int,
        step_tokens: int = USUAL_STEP_TOKENS,
        host: str = "",
    ) -> None:
        """Record a rank's number of seats (requests that run at once), tokens per block, most tokens per step, and host."""
        self._seats[rank], self._block_tokens[rank] = seats, block_tokens
        self._step_tokens[rank], self._hosts[rank] = step_tokens, host

    def share_host(self, rank: int, other: int) -> bool:
        """Return whether two ranks share host memory, so that one can load what the other has computed."""
        return self._hosts[rank] == self._hosts[other]

    def are_in_step(self, rank: int, other: int) -> bool:
        """Return whether two ranks of a host run in lock-step, so that both know the step in which a request moves."""
        return self.share_host(rank, other) and self._pools[rank] == self._pools[other]

    def note_stats(self, stats: RankStats) -> None:
        """Record a rank's state after a step."""
        last = self._stats.get(stats.rank)
        if last is not None and stats.num_preemptions > last.num_preemptions:
            self._has_preempted.add(stats.rank)
        if not stats.num_waiting:
            self._has_preempted.discard(stats.rank)
        self._stats[stats.rank] = stats

    def _rooms(self, *, with_queues: bool = False, without_coming: bool = False) -> dict[int, RankRoom]:
        """Return the ranks that may get requests, with the room that is left after submitted and planned ones.

        Args:
            with_queues: Include ranks with waiting requests. Requests that have begun precede those.
            without_coming: Ignore the places of requests that still run their prompts elsewhere.
        """
        rooms, receivers = {}, self._receivers()
        for rank, stats in sorted(self._stats.items()):
            block_tokens = self._block_tokens.get(rank)
            if block_tokens is not None and receivers[rank] and (with_queues or not stats.num_waiting):
                # One block stays free for each running request, as in the rank's scheduler.
                free_blocks = stats.num_free_blocks - stats.num_running - 1
                rooms[rank] = RankRoom(int(self._seats[rank]) - stats.num_running, free_blocks * block_tokens)
        for load in self._loads.values():
            coming = None if load.waits or without_coming else load.next_rank
            if coming is not None and coming in rooms:
                rooms[coming].take(load.grown_tokens)
            rank = load.rank if load.target is None else load.target
            if rank not in rooms or not (load.waits or load.target is not None):
                continue
            if load.is_resumed or load.target is not None or not self._stats[rank].num_waiting:
                rooms[rank].take(load.room_tokens)
        return rooms

    def _with_room(self, ranks: np.ndarray, rooms: dict[int, RankRoom], num_tokens: int) -> np.ndarray:
        """Return those of some ranks with room for a request, and those that have not reported yet: [ranks] bool."""
        has_room = ranks.copy()
        for rank in np.flatnonzero(ranks).tolist():
            has_room[rank] = rooms[rank].fits(num_tokens) if rank in rooms else rank not in self._stats
        return has_room

    def _seat_tokens(self, num_before: np.ndarray) -> np.ndarray:
        """Return the cost of waiting for a seat on each rank, in tokens. One running request ends every
        EXPECTED_OUTPUT_TOKENS / seats steps.

        Args:
            num_before: [ranks] Requests ahead of the one that needs a seat.
        """
        num_ends = np.maximum(num_before + 1 - self._seats, 0)
        tokens: np.ndarray = num_ends * EXPECTED_OUTPUT_TOKENS * STEP_PROMPT_TOKENS // self._seats
        return tokens
