"""How often a process may be restarted.

A cause from outside (out of memory, an operator, a bit flip) rarely kills an engine twice in a row. A broken device or a request
that crashes every rank does, and each restart pauses the other ranks; hence the budget.
Rejected: a growing delay before each restart, because it keeps away a rank that would have worked.
"""

import math
import time
from collections import deque
from collections.abc import Callable

MAX_RESTARTS = 3
WINDOW_S = 600.0


class RestartBudget:
    """A limit on the number of restarts within any time window."""

    def __init__(
        self,
        *,
        max_restarts: int = MAX_RESTARTS,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_restarts, self._window_s, self._clock = max_restarts, window_s, clock
        self._taken_s: deque[float] = deque()  # within the last window
        self.num_taken = 0  # in total

    def allowed_in_s(self) -> float:
        """Return the seconds until another restart is allowed; 0 if it is allowed now."""
        while self._taken_s and self._clock() - self._taken_s[0] >= self._window_s:
            self._taken_s.popleft()
        if len(self._taken_s) < self._max_restarts:
            return 0.0
        return self._taken_s[0] + self._window_s - self._clock() if self._taken_s else math.inf

    def take(self) -> bool:
        """Count a restart if one is allowed now. Returns whether it was allowed."""
        if self.allowed_in_s():
            return False
        self._taken_s.append(self._clock())
        self.num_taken += 1
        return True

    def describe(self) -> str:
        """Return the limit as text for messages."""
        return f"{self._max_restarts} times in {self._window_s / 60:g} minutes"
