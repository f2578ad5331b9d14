"""A clock for expiry times: the calendar time when the process started, plus the time that has passed since.

Jumps of the calendar (a wrong time server, a replaced battery) do not affect it, so they cannot expire all files at once.
The calendar is read only at startup. Expiry times from an earlier process are therefore bounded (`taken_over`): an object
expires at least an hour after the start, and no later than if it had been created at the start.
"""

import time
from collections.abc import Callable

GRACE_S = 3600  # time after a start in which objects from before do not expire


def _passed_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # includes the time that the machine is suspended


class SteadyClock:
    """Seconds since 1970, without jumps."""

    def __init__(
        self, calendar: Callable[[], float] = time.time, passed_s: Callable[[], float] = _passed_s
    ) -> None:
        """Read the calendar once."""
        self._passed_s = passed_s
        self._offset_s = calendar() - passed_s()

    def __call__(self) -> float:
        """Return the time in seconds since 1970."""
        return self._offset_s + self._passed_s()


def taken_over(expires_at: float, *, now_s: float, lifetime_s: float) -> float:
    """Return the expiry time of an object that an earlier process stored.

    Args:
        expires_at: Expiry time by that process's calendar.
        lifetime_s: Maximum lifetime of the object.
    """
    return min(max(expires_at, now_s + GRACE_S), now_s + max(lifetime_s, GRACE_S))
