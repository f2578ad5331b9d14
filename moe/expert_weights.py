"""One expert's weights as named tensors: read from a slot, send, check, and write into a slot.

The names cover everything that belongs to an expert, including scales and biases, so an expert moves completely or not at
all. Three checks reject a package: its manifest if a tensor is missing or has another shape, its digest if bytes changed,
and a trial on served rows, run on both ends, if the results differ. The trial has no tolerance, because a row's
result does not depend on where an expert is.

An arriving expert is written into spare memory, never over one in use. Once it serves, the slot's old memory becomes
spare. With as many spares as a layer has slots, any plan is possible, a few layers at a time.

In an epoch with other members a rank's slots hold other experts; see `change_slots`. An expert that the rank already holds
moves to its new slot without a copy. Others are read into memory that no longer serves and, when
that is used up, into spare memory.

Uses neither groups nor checkpoints.
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
Held = list[list[int]]  # by layer, the expert of each of this rank's slots; EMPTY if there is none


class ExpertWeights(NamedTuple):
    """Weights of one slot of a layer, or memory for one."""

    up: Any  # `backend.Slots` with one slot, of the layer's kind
    down: Any

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the expert by name; views."""
        sides = (("up", self.up.tensors()), ("down", self.down.tensors()))
        return {
            f"{side}_{name}" if name else side: tensor
            for side, named in sides
            for name, tensor in named.items()
        }

    @property
    def num_bytes(self) -> int:
        """Total bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


Read = Callable[[int, ExpertWeights], None]  # reads an expert of the layer into memory
Ready = dict[tuple[int, int], ExpertWeights]  # experts that were read into spare memory, by layer and expert


def read_slot(layer: ExpertLayer, slot: int) -> ExpertWeights:
    """Return a slot's weights; they share the slot's memory."""
    return ExpertWeights(layer.up.at(slot), layer.down.at(slot))


def spare_slot(layer: ExpertLayer) -> ExpertWeights:
    """Reserve memory for one expert of a layer's kind."""
    return ExpertWeights(layer.up.spare(), layer.down.spare())


def exchange_slot(layer: ExpertLayer, slot: int, new: ExpertWeights) -> ExpertWeights:
    """Let a slot serve `new`. Return the memory that it served from; its values must not be read any more."""
    return ExpertWeights(layer.up.exchange(slot, new.up), layer.down.exchange(slot, new.down))


def manifest(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return the type and shape of each tensor by name, to describe a package."""
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's bytes: [n] uint8, a view."""
    return tensor.view(-1).view(torch.uint8)


class Digest:
    """Checksum of an expert's bytes, computed as they pass.

    SHA-256, which processors support in hardware: 0.7 ms per MiB on a Zen 3 core during a step; blake2b takes 1.7.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, data: Tensor) -> None:
        """Add [n] uint8 from any device."""
        self._hash.update(data.cpu().numpy().data)

    def value(self) -> bytes:
        """Return the checksum, 32 bytes."""
        return self._hash.digest()


def digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the checksum of a whole package, in the order of its names."""
    taken = Digest()
    for tensor in tensors.values():
        taken.add(flat_bytes(tensor))
    return taken.value()


def grown_sample(sample_TD: Tensor | None, served_TD: Tensor) -> Tensor | None:
    """Return the rows to try experts with: the first rows of the largest batch served so far, at most SAMPLE_ROWS."""
    return served_TD[:SAMPLE_ROWS].float().cpu().clone() if is_grown(sample_TD, len(served_TD)) else sample_TD


def is_grown(sample_TD: Tensor | None, num_rows: int) -> bool:
    """Return whether a batch of `num_rows` would give more sample rows than there are."""
    return min(num_rows, SAMPLE_ROWS) > (0 if sample_TD is None else len(sample_TD))


def sample(layer: ExpertLayer) -> Tensor:
    """Return rows to try an expert with: [n, D] float32, served ones if there are any, otherwise random."""
    if layer.sample_TD is not None:
        return layer.sample_TD
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLE_ROWS, layer.up.in_dim, generator=generator)


@torch.inference_mode()
def try_out(layer: ExpertLayer, module: Any, weights: ExpertWeights, x_TD: Tensor) -> Tensor:
    """Run rows through an expert that need not be in use: [T, D], new. On one thread, while steps may run."""
    return layer.try_out(module, weights.up, weights.down, x_TD)


class SpareSlots:
    """A rank's spare slots, shared by all layers with experts of the same kind. Memory is reserved on first use."""

    def __init__(self) -> None:
        self._free: dict[_Kind, list[ExpertWeights]] = defaultdict(list)

    def reserve(self, layer: ExpertLayer, count: int) -> None:
        """Make sure that at least `count` free slots fit a layer."""
        free = self._free[_kind_of(layer)]
        free += [spare_slot(layer) for _ in range(count - len(free))]

    def take(self, layer: ExpertLayer) -> ExpertWeights:
        """Take a slot that fits a layer."""
        free = self._free[_kind_of(layer)]
        return free.pop() if free else spare_slot(layer)

    def give(self, weights: ExpertWeights) -> None:
        """Return a slot."""
        self._free[_kind(weights)].append(weights)

    def give_back(self, weights: ExpertWeights, most: int) -> None:
        """Return a slot that is no longer needed: keep it if fewer than `most` are free, otherwise free its memory."""
        if self.num_free < most:
            self.give(weights)
        else:
            weights.up.release()
            weights.down.release()

    @property
    def free(self) -> list[ExpertWeights]:
        """The free slots."""
        return [weights for free in self._free.values() for weights in free]

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return sum(len(free) for free in self._free.values())


def _kind_of(layer: ExpertLayer) -> _Kind:
    return _kind(read_slot(layer, 0))


def _kind(weights: ExpertWeights) -> _Kind:
    """Return what two memories must have in common to replace each other."""
    return tuple((name, *map(str, shape)) for name, shape in manifest(weights.tensors()).items())


def num_to_read(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Count the experts of one layer that are wanted but not held."""
    return len(set(wanted) - set(held) - {EMPTY})


def change_slots(
    layer: ExpertLayer,
    held: list[int],
    wanted: Sequence[int],
    read: Read,
    spare: SpareSlots,
    most_spare: int,
    ready: Mapping[int, ExpertWeights] | None = None,
) -> None:
    """Let a layer's slots hold `wanted`. On a CPU the number of slots may change. Only while no step runs.

    Args:
        held: Experts that the slots hold; becomes `wanted`. If a read fails it stays correct: all layers stay whole.
        read: Called once for each expert that is neither held nor ready.
        ready: Wanted experts that were read into spare memory, which becomes their slots' memory. On a CPU only.
        spare: Slots are taken from and returned to it.
        most_spare: Most slots that may stay free there afterwards; the memory of others is freed.

    Raises:
        Errors of `read`; NoSpareSlotError: The device has no memory for more slots.
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
        if ready and expert in ready:
            parts.append(ready[expert])
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
    """Return for each wanted slot the slot that holds its expert now, or None."""
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
    """Find memory for a slot without a source: its own if free, another free slot's, or spare memory."""
    if not free:
        return spare.take(layer)
    taken = slot if slot in free else free[-1]
    free.remove(taken)
    held[taken] = EMPTY  # correct from the first byte that is read into it
    return memory[taken]
