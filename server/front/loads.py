"""The requests at each rank, as the front counts them: remaining tokens, seats, free blocks, and which ranks serve.

`MovePlans` and `Router` decide with these figures. A pure state machine without IO or clock.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from scheduler.policy.request import RankStats
from server.front.prefixes import PrefixMemory

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
class RankRoom:
    """The free capacity of a rank."""

    seats: int
    tokens: int  # that fit into its free blocks


class RankLoads:
    """Counts the ranks' outstanding tokens, and remembers the prefixes that they have seen."""

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
        self._loads: dict[str, RequestLoad] = {}  # in order of arrival
        self._block_tokens: dict[int, int] = {}  # by rank, once reported
        self._stats: dict[int, RankStats] = {}  # by rank, the last report
        self._prefixes = PrefixMemory()

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

    def _rooms(self, *, with_queues: bool = False) -> dict[int, RankRoom]:
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
                rooms[rank] = RankRoom(int(self._seats[rank]) - stats.num_running, free_blocks * block_tokens)
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
