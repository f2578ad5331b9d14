"""The time that things expire by: the calendar's when the process began, and then so much later as has passed.

A calendar that jumps (a wrong time server, a battery that was changed) moves it by nothing, so no jump deletes all files at once.
Only a start reads the calendar. What an earlier process has left is therefore taken over with bounds (`taken_over`): whatever the
calendar says, it goes no sooner than an hour after the start, and no later than if it had been made then.
"""

import time
from collections.abc import Callable

GRACE_S = 3600  # after a start, in which nothing that was kept before expires


def _passed_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while a machine sleeps


class SteadyClock:
    """Seconds since 1970, without jumps."""

    def __init__(
        self, calendar: Callable[[], float] = time.time, passed_s: Callable[[], float] = _passed_s
    ) -> None:
        """Read the calendar, for the only time."""
        self._passed_s = passed_s
        self._offset_s = calendar() - passed_s()

    def __call__(self) -> float:
        """Return the time."""
        return self._offset_s + self._passed_s()


def taken_over(expires_at: float, *, now_s: float, lifetime_s: float) -> float:
    """Return when something expires that an earlier process has kept.

    Args:
        expires_at: by that process' calendar.
        lifetime_s: the longest that it may be kept.
    """
    return min(max(expires_at, now_s + GRACE_S), now_s + max(lifetime_s, GRACE_S))
