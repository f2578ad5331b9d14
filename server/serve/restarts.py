"""What follows the end of a child process, and how often it may be restarted. Pure decisions: `supervisor` and `launcher` act.

A cause from outside (out of memory, an operator, a bit flip) rarely kills an engine twice in a row. A broken device or a request
that crashes every rank does, and each restart pauses the other ranks; hence the budget.
Rejected: a growing delay before each restart, because it keeps away a rank that would have worked.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

from server.serve.children import FRONT_IS_GONE

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


class Next(Enum):
    """What follows the end of a child."""

    RESTART = auto()
    EXHAUSTED = auto()  # a restart would follow, but the budget allows none
    STOPPING = auto()  # nothing: the service is stopping
    LEAVE = auto()  # this rank leaves the service, which its engine has lost
    END = auto()  # the service ends, in order if the child's status is 0


class RestartPolicy:
    """Decides what follows the end of a rank's front or engine. `status` is the exit status, or the negative number of a signal."""

    def __init__(
        self, *, max_restarts: int, num_fronts: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # Fronts share their restarts, because the same request may kill one after the other.
        self.front = RestartBudget(max_restarts=max_restarts * num_fronts, clock=clock)
        self.engine = RestartBudget(max_restarts=max_restarts, clock=clock)
        self.has_served = False  # any engine of this rank
        self.drained_s: float | None = None  # deadline of the drain, on the clock

    def may_front_return(self, status: int) -> bool:
        """Return whether a front may be restarted. One that exits by itself has printed why, and the service ends."""
        return status < 0 and self.has_served and self.drained_s is None

    def after_front(self, status: int) -> Next:
        """Decide after the end of the front. A restart is counted."""
        if not self.may_front_return(status):
            return Next.END
        return Next.RESTART if self.front.take() else Next.EXHAUSTED

    def after_engine(self, status: int) -> Next:
        """Decide after the end of the engine. A restart is counted."""
        if status == FRONT_IS_GONE:
            return Next.LEAVE
        if status == 0 or not self.has_served:
            return Next.END
        if self.drained_s is not None:
            return Next.STOPPING
        return Next.RESTART if self.engine.take() else Next.EXHAUSTED
