"""Stop strings: ends a text at the first of them, and never lets out the head of one.

What could still become a stop string is held back until the next characters decide, so a reader never sees text
that has to be taken back. Knows no tokens.
"""

from typing import NamedTuple


class Screened(NamedTuple):
    """What may be shown, and the stop string that ended the text, if one did."""

    text: str
    stop: str | None


class StopScreen:
    """Screens one growing text."""

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        """Args: stops without empty strings; include_stop shows the stop string that ended the text."""
        assert all(stops), "an empty stop string would end every text at once"
        self._stops = stops
        self._include = include_stop
        self._hold = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> Screened:
        """Take more text; return what may be shown now."""
        if not self._stops:
            return Screened(text, None)
        seen = self._held + text
        found = self._first_stop(seen)
        if found is not None:
            at, stop = found
            self._held = ""
            return Screened(seen[: at + len(stop)] if self._include else seen[:at], stop)
        cut = len(seen) - self._longest_head(seen)
        self._held = seen[cut:]
        return Screened(seen[:cut], None)

    def pass_by(self, text: str) -> str:
        """Take text that is not screened (before min_tokens); return it with what was held."""
        shown, self._held = self._held + text, ""
        return shown

    def flush(self) -> str:
        """Return what was held back: the text has ended, so it is no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _first_stop(self, seen: str) -> tuple[int, str] | None:
        """Find the stop string that is complete first; of several ending together, the one that starts first."""
        hits = [(seen.find(stop), stop) for stop in self._stops]
        ends = [(at + len(stop), at, stop) for at, stop in hits if at >= 0]
        if not ends:
            return None
        _, at, stop = min(ends)
        return at, stop

    def _longest_head(self, seen: str) -> int:
        """Return how many characters at the end begin a stop string."""
        for length in range(min(self._hold, len(seen)), 0, -1):
            tail = seen[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
