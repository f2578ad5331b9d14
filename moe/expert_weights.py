"""One expert's weights as named tensors: to read out of a slot, to send, to check, to put into a slot.

Whatever belongs to an expert is in the names, scales and biases too, so that what moves is all or nothing: a package that
lacks a tensor, or has another shape, is refused by its manifest; one whose bytes changed, by its digest; and an expert
that would not answer as its source does, by rows that were served and that both ends run through it. Of the last nothing
is left to tolerance: no row's result depends on where an expert is (I2).

An arriving expert is written into spare memory, never over one that serves; when it serves, the slot's old memory is
spare in turn. As many spares as a layer has slots let any plan be carried out, a few layers at a time.

In an epoch with other members a rank's slots hold other experts: `change_slots`. An expert that the rank holds already
comes to its new slot without a byte being copied, whatever slot it is in; others are read into memory that serves nothing
any more, then into spare memory.

Knows no groups and no checkpoint.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expert_placement.placement import EMPTY
from moe.backend import ExpertLayer

SAMPLE_ROWS = 8
_Kind = tuple[tuple[str, ...], ...]
Held = list[list[int]]  # by layer, the expert of each of this rank's slots; EMPTY where there is none


class ExpertWeights(NamedTuple):
    """One slot of a layer, or memory for one."""

    up: Any  # `backend.Slots` of one slot each, of the layer's kind
    down: Any

    def tensors(self) -> dict[str, Tensor]:
        """All of the expert, by name; views."""
        sides = (("up", self.up.tensors()), ("down", self.down.tensors()))
        return {
            f"{side}_{name}" if name else side: tensor
            for side, named in sides
            for name, tensor in named.items()
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


Read = Callable[[int, ExpertWeights], None]  # reads an expert of the layer into memory


def read_slot(layer: ExpertLayer, slot: int) -> ExpertWeights:
    """A slot's weights; its memory is the slot's."""
    return ExpertWeights(layer.up.at(slot), layer.down.at(slot))


def spare_slot(layer: ExpertLayer) -> ExpertWeights:
    """Reserve memory for one expert of a layer's kind."""
    return ExpertWeights(layer.up.spare(), layer.down.spare())


def exchange_slot(layer: ExpertLayer, slot: int, new: ExpertWeights) -> ExpertWeights:
    """Let a slot serve `new`; returns the memory that it served from. Nothing of it may be read afterwards."""
    return ExpertWeights(layer.up.exchange(slot, new.up), layer.down.exchange(slot, new.down))


def manifest(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """What a package says it is: type and shape by name."""
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes: [n] uint8, a view."""
    return tensor.view(-1).view(torch.uint8)


class Digest:
    """A check sum of an expert's bytes, taken as they pass.

    SHA-256, for which processors have instructions: 0.7 ms a MiB on a Zen 3 core beside a step, blake2b 1.7.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, data: Tensor) -> None:
        """Add [n] uint8, from any device."""
        self._hash.update(data.cpu().numpy().data)

    def value(self) -> bytes:
        """Thirty-two bytes."""
        return self._hash.digest()


def digest(tensors: Mapping[str, Tensor]) -> bytes:
    """The check sum of a whole package, in the order of its names."""
    taken = Digest()
    for tensor in tensors.values():
        taken.add(flat_bytes(tensor))
    return taken.value()


def grown_sample(sample_TD: Tensor | None, served_TD: Tensor) -> Tensor | None:
    """Return the rows to try experts with, once these are served: up to SAMPLE_ROWS, the first that come together."""
    return served_TD[:SAMPLE_ROWS].float().cpu().clone() if is_grown(sample_TD, len(served_TD)) else sample_TD


def is_grown(sample_TD: Tensor | None, num_rows: int) -> bool:
    """Whether so many rows more than are kept would be."""
    return min(num_rows, SAMPLE_ROWS) > (0 if sample_TD is None else len(sample_TD))


def sample(layer: ExpertLayer) -> Tensor:
    """Rows to try an expert with: [n, D] float32, real ones once any were served."""
    if layer.sample_TD is not None:
        return layer.sample_TD
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLE_ROWS, layer.up.in_dim, generator=generator)


@torch.inference_mode()
def try_out(layer: ExpertLayer, module: Any, weights: ExpertWeights, x_TD: Tensor) -> Tensor:
    """Run rows through an expert that need not serve: [T, D], new. On one thread, beside steps."""
    return layer.try_out(module, weights.up, weights.down, x_TD)


class SpareSlots:
    """A rank's spare slots, shared by all layers whose experts look alike. Memory is reserved when first needed."""

    def __init__(self) -> None:
        self._free: dict[_Kind, list[ExpertWeights]] = defaultdict(list)

    def reserve(self, layer: ExpertLayer, count: int) -> None:
        """Have at least so many free that fit a layer."""
        free = self._free[_kind_of(layer)]
        free += [spare_slot(layer) for _ in range(count - len(free))]

    def take(self, layer: ExpertLayer) -> ExpertWeights:
        """Get one that fits a layer."""
        free = self._free[_kind_of(layer)]
        return free.pop() if free else spare_slot(layer)

    def give(self, weights: ExpertWeights) -> None:
        """Return one."""
        self._free[_kind(weights)].append(weights)

    def give_back(self, weights: ExpertWeights, most: int) -> None:
        """Return one that is no longer needed: it is kept if fewer than `most` wait, or its memory is given back."""
        if self.num_free < most:
            self.give(weights)
        else:
            weights.up.release()
            weights.down.release()

    @property
    def num_free(self) -> int:
        """Spare slots that wait."""
        return sum(len(free) for free in self._free.values())


def _kind_of(layer: ExpertLayer) -> _Kind:
    return _kind(read_slot(layer, 0))


def _kind(weights: ExpertWeights) -> _Kind:
    """What must be equal for one memory to do for another."""
    return tuple((name, *map(str, shape)) for name, shape in manifest(weights.tensors()).items())


def num_to_read(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Count the experts of one layer that are wanted and not held."""
    return len(set(wanted) - set(held) - {EMPTY})


def change_slots(
    layer: ExpertLayer, held: list[int], wanted: Sequence[int], read: Read, spare: SpareSlots, most_spare: int
) -> None:
    """Let a layer's slots hold `wanted`, whose number may be another one on a CPU; while no step runs.

    Args:
        held: what they hold; made to be `wanted`. If a read fails it says what is true: all layers stay whole.
        read: called once for each expert that is not held.
        spare: taken from and given to.
        most_spare: that may wait there afterwards; more is given back to the system.

    Raises:
        whatever `read` raises; NoSpareSlotError: the device has no room for more slots.
    """
    if held == list(wanted):
        return
    memory = [read_slot(layer, slot) for slot in range(len(held))]
    sources = _sources(held, wanted)
    free = [slot for slot in range(len(held)) if slot not in sources]
    parts: list[ExpertWeights] = []
    for slot, (expert, source) in enumerate(zip(wanted, sources, strict=True)):
        if source is not None:
            parts.append(memory[source])
            continue
        into = _memory_for(layer, slot, free, memory, held, spare)
        if expert != EMPTY:
            read(expert, into)
        parts.append(into)
    layer.up.rearrange([part.up for part in parts])
    layer.down.rearrange([part.down for part in parts])
    held[:] = wanted
    for slot in free:
        spare.give_back(memory[slot], most_spare)


def _sources(held: Sequence[int], wanted: Sequence[int]) -> list[int | None]:
    """For each wanted slot the one that holds its expert now; None where none does."""
    slot_of = {expert: slot for slot, expert in enumerate(held) if expert != EMPTY}
    return [slot_of.get(expert) if expert != EMPTY else None for expert in wanted]


def _memory_for(
    layer: ExpertLayer,
    slot: int,
    free: list[int],
    memory: Sequence[ExpertWeights],
    held: list[int],
    spare: SpareSlots,
) -> ExpertWeights:
    """Find memory for a slot that takes over none: its own if that is free, another's, or spare one."""
    if not free:
        return spare.take(layer)
    taken = slot if slot in free else free[-1]
    free.remove(taken)
    held[taken] = EMPTY  # true from the first byte that is read into it
    return memory[taken]
