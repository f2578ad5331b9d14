"""How often a rank's engine may be started again before the rank stays away.

What kills an engine once (the kernel short of memory, an operator, a cosmic ray) does not kill it again at once; what
does, a broken device or a request that no rank survives, would otherwise cost the others a pause every half minute.
Rejected: waiting longer before every further start, which leaves the service without a rank that would have worked.
"""

import time
from collections import deque
from collections.abc import Callable

MAX_RESTARTS = 3
WINDOW_S = 600.0


class RestartBudget:
    """So many starts within any window of time."""

    def __init__(
        self,
        *,
        max_restarts: int = MAX_RESTARTS,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_restarts, self._window_s, self._clock = max_restarts, window_s, clock
        self._taken_s: deque[float] = deque()  # those of the last window
        self.num_taken = 0  # in all

    def take(self) -> bool:
        """Return whether one more start is allowed now, and count it if so."""
        now_s = self._clock()
        while self._taken_s and now_s - self._taken_s[0] >= self._window_s:
            self._taken_s.popleft()
        if len(self._taken_s) >= self._max_restarts:
            return False
        self._taken_s.append(now_s)
        self.num_taken += 1
        return True

    def describe(self) -> str:
        """Say what is allowed, for messages."""
        return f"{self._max_restarts} times in {self._window_s / 60:g} minutes"
