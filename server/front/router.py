"""Gives each request to a rank: the one with the least work to do before the request's first token.

That work is the rank's outstanding tokens plus the part of the prompt it does not hold already, so with equal load
the longest known prefix decides, and a long prefix is worth a short queue. A pure value machine: no IO, no clock,
tested alone. Requests of one session go where its last one went, while that rank serves and has not much more to do than
the others: then its prefix is there even where a new turn rewrites the old ones. The idea of weighing cached prefix against load in tokens is Mooncake's (arXiv 2407.00079) and
Preble's (arXiv 2407.00023). Rejected: strict least-loaded with affinity only on ties, which under load never reuses
a conversation's prefix; consistent hashing, which ignores load.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

PREFIX_CHUNK_TOKENS = 64  # granularity of the prefix memory; a few blocks
MAX_PREFIX_CHUNKS = 1 << 16  # remembered over all ranks: 4 Mi tokens, some 20 MB
MAX_SESSIONS = 1 << 16  # remembered over all ranks, the latest
# A session leaves its rank where that has to do more than this share of what the least loaded one has, and these tokens.
SESSION_SHARE, SESSION_ROOM_TOKENS = 1.5, 4096
EXPECTED_OUTPUT_TOKENS = 256  # most of what max_tokens is charged: its default is the whole context


@dataclass(slots=True)
class _Load:
    """What one request still weighs on its rank."""

    rank: int
    prompt_tokens: int  # 0 once the first token has come
    output_tokens: int


class Router:
    """Remembers the ranks' outstanding tokens and which prefixes they have seen."""

    def __init__(self, num_ranks: int) -> None:
        assert num_ranks >= 1, "a service has at least one rank"
        self._outstanding = np.zeros(num_ranks, dtype=np.int64)
        self._num_admitted = np.zeros(num_ranks, dtype=np.int64)
        self._is_available = np.ones(num_ranks, dtype=bool)
        self._loads: dict[str, _Load] = {}
        self._holders: OrderedDict[int, set[int]] = OrderedDict()  # chain hash of a prefix -> ranks
        self._sessions: OrderedDict[str, int] = OrderedDict()  # -> the rank of its last request

    @property
    def outstanding_tokens(self) -> tuple[int, ...]:
        """Tokens each rank still has to run, as far as the front knows."""
        return tuple(self._outstanding.tolist())

    @property
    def has_ranks(self) -> bool:
        """Whether there is any rank to pick."""
        return bool(self._is_available.any())

    def enter(self, rank: int) -> None:
        """Let a rank be picked."""
        self._is_available[rank] = True

    def leave(self, rank: int) -> None:
        """Pick a rank no more, and forget what it held."""
        self._is_available[rank] = False
        self._num_admitted[rank] = 0
        for holders in self._holders.values():
            holders.discard(rank)

    def pick(self, prompt_ids: Sequence[int], session: str = "", *, untold: np.ndarray | None = None) -> int:
        """Return the session's rank, if it can take more; else the one that would reach this prompt's first token after the
        fewest tokens. There must be one.

        Ties go to the rank that was given the fewest requests so far, then to the lowest number.

        Args:
            prompt_ids: of the request.
            session: that the request belongs to; "": to none.
            untold: [ranks] tokens that ranks have delivered and `progress` was not told of yet; None: there are none.
        """
        left = self._outstanding if untold is None else self._outstanding - untold
        ranks = np.flatnonzero(self._is_available)
        own = self._sessions.get(session) if session else None
        if own is not None and self._is_available[own]:
            least = left[ranks].min()
            if left[own] <= SESSION_SHARE * least + SESSION_ROOM_TOKENS:
                return own
        if held := self._held_tokens(prompt_ids):
            left = left.copy()
            for rank, num_tokens in held.items():
                left[rank] -= num_tokens
        left = left[ranks]
        ranks = ranks[left == left.min()]
        return int(ranks[self._num_admitted[ranks].argmin()])

    def admit(
        self, request_id: str, rank: int, prompt_ids: Sequence[int], max_tokens: int, session: str = ""
    ) -> None:
        """Charge `rank` with a request, and let it be its session's."""
        assert request_id not in self._loads, f"request {request_id} is admitted already"
        load = _Load(rank, len(prompt_ids), min(max_tokens, EXPECTED_OUTPUT_TOKENS))
        self._loads[request_id] = load
        self._outstanding[rank] += load.prompt_tokens + load.output_tokens
        self._num_admitted[rank] += 1
        self._remember(prompt_ids, rank)
        if session:
            self._sessions[session] = rank
            self._sessions.move_to_end(session)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def progress(self, request_id: str, num_tokens: int) -> None:
        """Note that a request's rank delivered `num_tokens`: its prompt is done, and so much less is to come."""
        load = self._loads.get(request_id)
        if load is None or num_tokens == 0:
            return
        spent = min(num_tokens, load.output_tokens)
        self._outstanding[load.rank] -= load.prompt_tokens + spent
        load.prompt_tokens = 0
        load.output_tokens -= spent

    def retire(self, request_id: str) -> None:
        """Take what is left of a request off its rank; unknown requests have been retired before."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._outstanding[load.rank] -= load.prompt_tokens + load.output_tokens

    def _held_tokens(self, prompt_ids: Sequence[int]) -> dict[int, int]:
        """Count the tokens of the prompt's longest prefix that a rank has seen, for ranks that have seen any."""
        held: dict[int, int] = {}
        still: set[int] | None = None
        num_tokens = 0
        for chunk in _chain(prompt_ids):
            holders = self._holders.get(chunk, set())
            for rank in still - holders if still else ():
                held[rank] = num_tokens
            still = set(holders) if still is None else still & holders
            if not still:
                break
            num_tokens += PREFIX_CHUNK_TOKENS
        return held | dict.fromkeys(still or (), num_tokens)

    def _remember(self, prompt_ids: Sequence[int], rank: int) -> None:
        for chunk in _chain(prompt_ids):
            self._holders.setdefault(chunk, set()).add(rank)
            self._holders.move_to_end(chunk)
        while len(self._holders) > MAX_PREFIX_CHUNKS:
            self._holders.popitem(last=False)


def _chain(prompt_ids: Sequence[int]) -> Iterator[int]:
    """Yield one hash per whole chunk of the prompt, each covering everything before it."""
    value = 0
    for start in range(0, len(prompt_ids) - PREFIX_CHUNK_TOKENS + 1, PREFIX_CHUNK_TOKENS):
        value = hash((value, tuple(prompt_ids[start : start + PREFIX_CHUNK_TOKENS])))
        yield value
