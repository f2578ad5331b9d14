"""Memory for experts that arrive while others still serve.

An arriving expert is written into a spare slot, never over one that serves; when it serves, the slot's old memory is
spare in turn. As many spares as a layer has slots let any plan be carried out, a few layers at a time.
"""

from collections import defaultdict

from moe.backend import Experts
from moe.expert_weights import ExpertWeights, manifest, spare_slot

_Kind = tuple[tuple[str, ...], ...]


class SpareSlots:
    """A rank's spare slots, shared by all layers whose experts look alike. Memory is reserved when first needed."""

    def __init__(self) -> None:
        self._free: dict[_Kind, list[ExpertWeights]] = defaultdict(list)

    def reserve(self, layer: Experts, count: int) -> None:
        """Have at least so many free that fit a layer."""
        free = self._free[_kind_of(layer)]
        free += [spare_slot(layer) for _ in range(count - len(free))]

    def take(self, layer: Experts) -> ExpertWeights:
        """Get one that fits a layer."""
        free = self._free[_kind_of(layer)]
        return free.pop() if free else spare_slot(layer)

    def give(self, weights: ExpertWeights) -> None:
        """Return one."""
        self._free[_kind(weights)].append(weights)

    def give_back(self, weights: ExpertWeights, most: int) -> None:
        """Return one that is no longer needed: it is kept if fewer than `most` wait, or its memory is freed."""
        if self.num_free < most:
            self.give(weights)

    @property
    def num_free(self) -> int:
        """Spare slots that wait."""
        return sum(len(free) for free in self._free.values())


def _kind_of(layer: Experts) -> _Kind:
    return _kind(ExpertWeights(layer.up.at(0), layer.down.at(0)))


def _kind(weights: ExpertWeights) -> _Kind:
    """What must be equal for one memory to do for another."""
    return tuple((name, *map(str, shape)) for name, shape in manifest(weights.tensors()).items())
