"""Fake counters of a GPU's memory."""

from dataclasses import dataclass


@dataclass
class FakeMemory:
    """A `scheduler.step.device_memory.DeviceMemory` of a device on which weights and one largest step have given sizes.

    Attributes:
        total: Free bytes before anything is loaded.
        weights: Taken from the first `restart` on, which comes after loading.
        step: What the largest step takes in addition.
        num_restarts: Counter.
    """

    total: int
    weights: int = 0
    step: int = 0
    num_restarts: int = 0

    def free(self) -> int:
        return self.total - self.reserved()

    def reserved(self) -> int:
        return self.weights if self.num_restarts else 0

    def most_reserved(self) -> int:
        return self.reserved() + self.step

    def restart(self) -> None:
        self.num_restarts += 1
