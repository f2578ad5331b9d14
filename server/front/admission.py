"""How many requests may be open at once, and when one that is refused should come back.

Refusing early is kinder than a wait without an end: a client with other services to ask learns it at once, and those that
wait do so for a bounded time. When to come back is measured, not fixed: the time in which lately as many requests came to
their first token as wait for theirs now. A key that has less than its equal part of the places is taken in when there are
none left, up to as many again, so that a flood of another key's shuts nobody out. No clock: times are given.

vLLM's `--max-num-queued-reqs` counts the same (what waits and what runs, over all ranks) and answers 503.
"""

import math
from collections import deque

from server.errors import ApiError, bad_request

WINDOW_S = 30.0  # over which it is measured how many requests begin
_LEAST_WINDOW_S = 1.0
LEAST_S, MOST_S = 1, 120  # of Retry-After


class Admission:
    """Bounds the open choices of a service."""

    def __init__(self, most: int | None) -> None:
        """`most`: open choices; None is no bound."""
        self._most = most
        self._begun_s: deque[float] = deque()  # of the last window, when each came to its first token
        self.num_refused = 0  # choices, a counter

    @property
    def is_bounded(self) -> bool:
        """Whether any request may be refused."""
        return self._most is not None

    def note_begun(self, now_s: float) -> None:
        """Take that a choice came to its first token."""
        self._begun_s.append(now_s)
        self._forget(now_s)

    def check(
        self, num_more: int, *, num_open: int, num_own: int, num_keys: int, num_waiting: int, now_s: float
    ) -> None:
        """Refuse a request whose choices would be too many.

        Args:
            num_more: its choices.
            num_open: those accepted and without an outcome.
            num_own: of these, those of the request's key.
            num_keys: keys that have any, this one included.
            num_waiting: open choices without a token.

        Raises:
            ApiError: 429, come back; 400, it would be refused every time.
        """
        if self._most is None or num_open + num_more <= self._most:
            return
        is_share_free = num_keys > 1 and (num_own + num_more) * num_keys <= self._most
        if is_share_free and num_open + num_more <= 2 * self._most:
            return
        if num_more > self._most:
            raise bad_request(
                f"The request has {num_more} choices; this server takes {self._most} at once (--max-num-queued-reqs)."
            )
        self.num_refused += num_more
        wait_s = self.retry_after_s(num_waiting, now_s)
        raise ApiError(
            429,
            f"The server has {num_open} open requests and takes at most {self._most} (--max-num-queued-reqs); "
            f"at the pace of the last {WINDOW_S:g} s those that wait will have begun in {wait_s} s.",
            headers={"Retry-After": str(wait_s)},
        )

    def retry_after_s(self, num_waiting: int, now_s: float) -> int:
        """Say in how many seconds as many requests will have begun as wait now, at the pace of the last window."""
        self._forget(now_s)
        if not self._begun_s:
            return int(WINDOW_S)  # nothing begins: it takes longer than that
        # Behind a quiet time, the pace since the first of them; one alone says little of the next moment.
        pace = len(self._begun_s) / min(WINDOW_S, max(_LEAST_WINDOW_S, now_s - self._begun_s[0]))
        return min(MOST_S, max(LEAST_S, math.ceil(num_waiting / pace)))

    def _forget(self, now_s: float) -> None:
        while self._begun_s and self._begun_s[0] <= now_s - WINDOW_S:
            self._begun_s.popleft()
