"""Check sums of a rank's weights in memory: of each expert, and of everything else together.

They are taken over the stored form (panels, codes, scales), so they also cover what conversion and packing did. Equal on
all ranks that hold the same weights in the same form.

Legend: L MoE layers, E experts.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from expert_placement.placement import EMPTY
from moe.backend import ExpertLayer
from moe.expert_weights import Digest, ExpertWeights, Held, digest, flat_bytes, read_slot
from moe.kernel_weight import KernelWeight


def expert_digest(weights: ExpertWeights) -> int:
    """Return the check sum of an expert: 64 bits, never 0."""
    return int.from_bytes(digest(weights.tensors())[:8], "little") or 1


def digest_experts(layers: Sequence[ExpertLayer], held: Held, num_experts: int) -> np.ndarray:
    """Return the check sums of this rank's experts: [L, E] uint64, 0 for experts that it does not hold.

    Args:
        held: By layer, the expert of each slot.
    """
    found_LE = np.zeros((len(layers), num_experts), np.uint64)
    for number, (layer, experts) in enumerate(zip(layers, held, strict=True)):
        for slot, expert in enumerate(experts):
            if expert != EMPTY:
                found_LE[number, expert] = expert_digest(read_slot(layer, slot))
    return found_LE


def digest_plain(net: nn.Module) -> str:
    """Return the check sum of all weights except experts."""
    taken = Digest()
    for tensor in plain_tensors(net):
        taken.add(flat_bytes(tensor.contiguous()))
    return taken.value().hex()


def plain_tensors(net: nn.Module) -> Iterator[Tensor]:
    """Yield the stored tensors of all weights except experts, in a fixed order."""
    for _, module in net.named_modules():
        lasting = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        held = {**vars(module), **module._parameters, **lasting}
        for name in sorted(held):
            is_known = name in module._parameters or name in lasting
            yield from _stored(name, held[name], is_known=is_known)


def _stored(name: str, value: Any, *, is_known: bool) -> Iterator[Tensor]:
    """Yield the tensors of a weight. Other tensors that modules keep are not weights."""
    if isinstance(value, KernelWeight):
        yield from value.stored()
    elif isinstance(value, Tensor) and is_known:
        yield value.detach()
    elif name == "absorbed":  # the halves of a latent projection, which replace it
        yield from (part for part in vars(value).values() if isinstance(part, Tensor))
