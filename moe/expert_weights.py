"""One expert's weights as named tensors: to read out of a slot, to send, to check, to put into a slot.

Whatever belongs to an expert is in the names, scales and biases too, so that what moves is all or nothing: a package that lacks
a tensor, or has another shape, is refused by its manifest; one whose bytes changed, by its digest; and an expert that
would not answer as its source does, by real rows that both ends run through it. Of the last nothing is left to
tolerance: no row's result depends on where an expert is (I2).
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.backend import Experts
from moe.cpu.experts import SAMPLE_ROWS


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


def read_slot(layer: Experts, slot: int) -> ExpertWeights:
    """A slot's weights; its memory is the slot's."""
    return ExpertWeights(layer.up.at(slot), layer.down.at(slot))


def spare_slot(layer: Experts) -> ExpertWeights:
    """Reserve memory for one expert of a layer's kind."""
    return ExpertWeights(layer.up.spare(), layer.down.spare())


def exchange_slot(layer: Experts, slot: int, new: ExpertWeights) -> ExpertWeights:
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


def sample(layer: Experts) -> Tensor:
    """Rows to try an expert with: [n, D] float32, real ones once any were served."""
    if layer.sample_TD is not None:
        return layer.sample_TD
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLE_ROWS, layer.up.in_dim, generator=generator)


@torch.inference_mode()
def try_out(layer: Experts, module: Any, weights: ExpertWeights, x_TD: Tensor) -> Tensor:
    """Run rows through an expert that need not serve: [T, D], new. On one thread, beside steps."""
    return layer.try_out(module, weights.up, weights.down, x_TD)
