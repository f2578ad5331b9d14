"""Route each request to the rank with the least work before the request's first token.

That work is the rank's outstanding tokens plus the part of the prompt that the rank does not hold. So with equal load the
longest known prefix decides, and a long prefix is worth a short queue. If a rank's seats are all taken, one must become free
first: the steps until then count as tokens, too. The idea of weighing cached prefix against load in tokens is Mooncake's
(arXiv 2407.00079) and Preble's (arXiv 2407.00023). Requests of one session go to the rank of its last request, while that
rank serves and has not much more work than the others. So they find their prefix even if a new turn rewrites earlier ones.

With roles, the rank that decodes is chosen first, among those with room, and then the rank that runs the prompt. If the first
one holds nearly all of the prompt, it runs the rest itself. A place is chosen again when the prompt is done: if no rank that
decodes has room then, the request stays, and moves later (`plan_hand_overs`).

A pure state machine without IO or clock, tested alone. Rejected: strict least-loaded with affinity only on ties, which under
load never reuses a conversation's prefix; consistent hashing, which ignores load.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from server.front.routing.loads import EXPECTED_OUTPUT_TOKENS, MoveCause, RequestLoad, SharedLoads
from server.front.routing.move_plans import MovePlans
from server.options.pools import PREFILL_THRESHOLD

MAX_SESSIONS = 1 << 16  # the latest sessions, remembered over all ranks
# A session leaves its rank if its work exceeds this multiple of the least loaded rank's work plus these tokens.
SESSION_SHARE, SESSION_ROOM_TOKENS = 1.5, 4096


class Assignment(NamedTuple):
    """The ranks of a request."""

    rank: int
    # The rank that continues it, if the first one hands it over after the prompt.
    next_rank: int | None = None


class ReleasedRequest(NamedTuple):
    """A request that its rank released."""

    cause: MoveCause
    # The rank that reserved a place for it. None if that rank is lost or draining. None also if requests wait there now, unless
    # this one has begun: it precedes them. The present rank if it was to hand the request over and no other rank has room.
    target: int | None = None


class Router(MovePlans):
    """Chooses the rank of each request."""

    def __init__(
        self,
        num_ranks: int,
        *,
        prefill_threshold: int = PREFILL_THRESHOLD,
        shared: SharedLoads | None = None,
    ) -> None:
        """`prefill_threshold`: tokens that a rank of role decode may lack of a prompt and still run it alone."""
        super().__init__(num_ranks, shared=shared)
        self._prefill_threshold = prefill_threshold
        self._sessions: OrderedDict[str, int] = OrderedDict()  # -> the rank of its last request

    def pick(self, prompt_ids: Sequence[int], session: str = "", *, untold: np.ndarray | None = None) -> int:
        """Return the rank that begins a request; see `assign`."""
        return self.assign(prompt_ids, session, untold=untold).rank

    def assign(
        self,
        prompt_ids: Sequence[int],
        session: str = "",
        *,
        most_tokens: int = EXPECTED_OUTPUT_TOKENS,
        untold: np.ndarray | None = None,
        rank: int | None = None,
    ) -> Assignment:
        """Choose the ranks of a request. Some rank must be available.

        Args:
            prompt_ids: Tokens of the request.
            session: Session of the request, or "" for none.
            most_tokens: Most tokens that may be generated.
            untold: [ranks] Tokens delivered by ranks but not reported to `progress` yet, or None if there are none.
            rank: The rank that begins it, or None to choose that one too.
        """
        receivers = self._receivers()
        decoding, prompting = receivers & self._runs_decodes, receivers & self._runs_prompts
        if rank is not None and (self._are_alike or not decoding.any()):
            return Assignment(rank)
        held = self._prefixes.held_tokens(prompt_ids)
        if self._are_alike or not decoding.any():
            return Assignment(self._choose(held, session, untold, receivers))
        grown_tokens = len(prompt_ids) + min(most_tokens, EXPECTED_OUTPUT_TOKENS)
        roomy = self._with_room(decoding, self._rooms(with_queues=True), grown_tokens)
        home = self._choose(held, session, untold, roomy if roomy.any() else decoding)
        if rank is None:
            is_short = len(prompt_ids) - held.get(home, 0) < self._prefill_threshold
            if is_short or not prompting.any():
                return Assignment(home)
            rank = self._choose(self._near(held, home, len(prompt_ids)), session, untold, prompting)
        # Two ranks that both run everything hand nothing over.
        is_split = most_tokens > 1 and not (self._runs_decodes[rank] and self._runs_prompts[home])
        return Assignment(rank, home if is_split and home != rank and self._runs_prompts[rank] else None)

    def _choose(
        self, held: Mapping[int, int], session: str, untold: np.ndarray | None, among: np.ndarray
    ) -> int:
        """Return the session's rank if it can take more work. Otherwise return the rank that reaches a prompt's first token
        after the fewest tokens.

        Ties go to the rank with the fewest requests so far, then to the lowest number.

        Args:
            held: Prefix tokens that ranks have seen.
            among: [ranks] bool. The ranks to choose from; at least one.
        """
        totals = self._totals()
        left = totals.outstanding + self._seat_tokens(totals.num_open + totals.num_coming)
        if untold is not None:
            left -= untold
        ranks = np.flatnonzero(among)
        # Prefixes and sessions of other fronts may name ranks that left before this front began.
        own = self._rank_of_session(session) if session else None
        if own is not None and own < self.num_ranks and among[own]:
            least = left[ranks].min()
            if left[own] <= SESSION_SHARE * least + SESSION_ROOM_TOKENS:
                return own
        for rank, num_tokens in held.items():
            if rank < self.num_ranks:
                left[rank] -= num_tokens
        left = left[ranks]
        ranks = ranks[left == left.min()]
        return int(ranks[totals.num_admitted[ranks].argmin()])

    def _near(self, held: Mapping[int, int], rank: int, num_tokens: int) -> dict[int, int]:
        """Return prefix tokens that ranks hold, less these tokens if a request would move between hosts: they are computed again."""
        return {
            other: held.get(other, 0) - (0 if self.share_host(rank, other) else num_tokens)
            for other in range(len(self._hosts))
        }

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
        next_rank: int | None = None,
    ) -> None:
        """Add a request to the load of its ranks, and bind its session to the last one.

        Args:
            num_moves: How often it has moved, except from draining ranks.
            is_resumed: Whether another rank has begun it.
            next_rank: The rank that continues it after the prompt; None if `rank` does.
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
            next_rank=next_rank,
        )
        self._loads[request_id] = load
        self._count(load, 1)
        self._num_admitted[rank] += 1
        if session:
            self._bind_session(session, rank if next_rank is None else next_rank)

    def _rank_of_session(self, session: str) -> int | None:
        return self._sessions.get(session) if self._shared is None else self._shared.rank_of_session(session)

    def _bind_session(self, session: str, rank: int) -> None:
        if self._shared is not None:
            self._shared.bind_session(session, rank)
            return
        self._sessions[session] = rank
        self._sessions.move_to_end(session)
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def target_of(self, request_id: str) -> int | None:
        """Return the rank that has reserved a place for a request that leaves its rank, or None."""
        return self._loads[request_id].target

    def take_back(
        self, request_id: str, prompt_ids: Sequence[int], *, is_handed_over: bool = False
    ) -> ReleasedRequest:
        """Record that a rank released a request. If it had not begun, forget the prefixes that only it brought there.

        Args:
            prompt_ids: Tokens of the request at its admission, or more.
            is_handed_over: Whether the rank released it after the prompt, to hand it over.
        """
        load = self._loads[request_id]
        cause = load.cause or MoveCause.QUEUE
        self.retire(request_id)
        if is_handed_over:
            return ReleasedRequest(MoveCause.HAND_OVER, self._next_rank(load))
        if load.waits:
            self._prefixes.forget(prompt_ids, load.rank)
        stats = None if load.target is None else self._stats.get(load.target)
        if stats is None or not self._receivers()[stats.rank] or (load.waits and stats.num_waiting):
            return ReleasedRequest(cause)
        return ReleasedRequest(cause, stats.rank)

    def _next_rank(self, load: RequestLoad) -> int | None:
        """Return the rank that continues a request after its prompt: the one chosen before, another one with room, or, without
        room, the present one. Returns None if that one may get no requests.
        """
        receivers = self._receivers()
        rooms = self._rooms(with_queues=True, without_coming=True)
        roomy = self._with_room(receivers & self._runs_decodes, rooms, load.grown_tokens)
        if load.next_rank is not None and roomy[load.next_rank]:
            return load.next_rank
        if roomy.any():
            return self._choose(self._near({}, load.rank, load.context_tokens), "", None, roomy)
        return load.rank if receivers[load.rank] else None
