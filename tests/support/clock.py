"""The clock of the tests: time passes only when a test moves it."""


class Clock:
    """A function that returns `now_s`. `sleep` moves it at once."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Move the clock, and note by how much."""
        self.slept_s.append(seconds)
        self.now_s += seconds
