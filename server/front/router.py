"""Route each request to the rank with the least work before the request's first token.

That work is the rank's outstanding tokens plus the part of the prompt that the rank does not hold. So with equal load the
longest known prefix decides, and a long prefix is worth a short queue. If a rank's seats are all taken, one must become free
first: the steps until then count as tokens, too. The idea of weighing cached prefix against load in tokens is Mooncake's
(arXiv 2407.00079) and Preble's (arXiv 2407.00023). Requests of one session go to the rank of its last request, while that
rank serves and has not much more work than the others. So they find their prefix even if a new turn rewrites earlier ones.

A pure state machine without IO or clock, tested alone. Rejected: strict least-loaded with affinity only on ties, which under
load never reuses a conversation's prefix; consistent hashing, which ignores load.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from server.front.loads import EXPECTED_OUTPUT_TOKENS, MoveCause, RequestLoad
from server.front.move_plans import MovePlans

MAX_SESSIONS = 1 << 16  # the latest sessions, remembered over all ranks
# A session leaves its rank if its work exceeds this multiple of the least loaded rank's work plus these tokens.
SESSION_SHARE, SESSION_ROOM_TOKENS = 1.5, 4096


class ReleasedRequest(NamedTuple):
    """A request that its rank released."""

    cause: MoveCause
    # The rank that reserved a place for it. None if that rank is lost or draining. None also if requests wait there now, unless
    # this one has begun: it precedes them.
    target: int | None = None


class Router(MovePlans):
    """Chooses the rank of each request."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._sessions: OrderedDict[str, int] = OrderedDict()  # -> the rank of its last request

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
        load = RequestLoad(
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
