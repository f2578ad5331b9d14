"""Bound the number of open requests, and compute when a refused client should retry.

An early refusal lets a client try another service, and bounds the wait of accepted requests. Retry-After is measured: at the
rate of first tokens in the last window, the time until all requests that wait now have begun. When the service is full, a key
that holds less than its equal share may still be admitted, up to twice the limit, so that a flood from one key cannot lock
out the others. It has no clock: callers pass times.

vLLM's `--max-num-queued-reqs` counts the same (waiting and running requests of all ranks) and answers 503.
"""

import math
from collections import deque
from typing import Protocol

from server.front.errors import ApiError, bad_request

WINDOW_S = 30.0  # for measuring the rate at which requests begin
_LEAST_WINDOW_S = 1.0
LEAST_S, MOST_S = 1, 120  # bounds of Retry-After


class SharedCounts(Protocol):
    """The open requests of several fronts, implemented by `server.front.several.board.Board`."""

    @property
    def num_open(self) -> int:
        """Accepted choices without an outcome, of all fronts."""

    @property
    def num_answers(self) -> int:
        """Requests of clients that are being answered, by all fronts."""

    def count_choice(self, key_id: str, by: int) -> None:
        """Count an accepted choice of this front, or with -1 one that has its outcome."""

    def count_submitted(self, by: int) -> None:
        """Count a choice of this front that gets its first rank, or with -1 such a choice that has its outcome."""

    def count_answer(self, by: int) -> None:
        """Count an answer of this front that begins, or with -1 one that ends."""

    def num_of_key(self, key_id: str) -> int:
        """Return the number of open choices of an API key."""

    def num_keys(self, key_id: str) -> int:
        """Return the number of API keys with open choices, including this one."""


class Admission:
    """Limits the open choices of a service."""

    def __init__(self, most: int | None) -> None:
        """Args: most is the limit of open choices; None disables it."""
        self._most = most
        self._begun_s: deque[float] = deque()  # times of first tokens in the last window
        self.num_refused = 0  # choices, a counter

    @property
    def is_bounded(self) -> bool:
        """Whether any request may be refused."""
        return self._most is not None

    def note_begun(self, now_s: float) -> None:
        """Record a choice's first token."""
        self._begun_s.append(now_s)
        self._forget(now_s)

    def check(
        self, num_more: int, *, num_open: int, num_own: int, num_keys: int, num_waiting: int, now_s: float
    ) -> None:
        """Refuse a request if its choices exceed the limit.

        Args:
            num_more: Choices of the request.
            num_open: Accepted choices without an outcome.
            num_own: Open choices of the request's key.
            num_keys: Keys with open choices, including this one.
            num_waiting: Open choices without a token.

        Raises:
            ApiError: 429 if a retry can succeed later; 400 if the request alone exceeds the limit.
        """
        if self._most is None or num_open + num_more <= self._most:
            return
        is_share_free = num_keys > 1 and (num_own + num_more) * num_keys <= self._most
        if is_share_free and num_open + num_more <= 2 * self._most:
            return
        if num_more > self._most:
            raise bad_request(
                f"The request has {num_more} choices; this server accepts at most {self._most} (--max-num-queued-reqs)."
            )
        self.num_refused += num_more
        wait_s = self.retry_after_s(num_waiting, now_s)
        raise ApiError(
            429,
            f"The server has {num_open} open requests and accepts at most {self._most} (--max-num-queued-reqs). "
            f"At the rate of the last {WINDOW_S:g} s, the waiting requests will have begun in {wait_s} s.",
            headers={"Retry-After": str(wait_s)},
        )

    def retry_after_s(self, num_waiting: int, now_s: float) -> int:
        """Return the seconds until all waiting requests have begun, at the rate of the last window."""
        self._forget(now_s)
        if not self._begun_s:
            return int(WINDOW_S)  # no request began in the window, so the wait is longer
        wait_s = predicted_wait_s(num_waiting, len(self._begun_s), min(WINDOW_S, now_s - self._begun_s[0]))
        return min(MOST_S, max(LEAST_S, math.ceil(wait_s)))

    def _forget(self, now_s: float) -> None:
        while self._begun_s and self._begun_s[0] <= now_s - WINDOW_S:
            self._begun_s.popleft()


def predicted_wait_s(num_waiting: int, num_begun: int, seconds: float) -> float:
    """Return the time until all waiting requests have begun, if requests begin as in the last seconds.

    Args:
        num_begun: Requests that have begun in that time, at least one.
        seconds: The time since the first of them. After a quiet time, a single start predicts little.
    """
    return num_waiting * max(_LEAST_WINDOW_S, seconds) / num_begun
