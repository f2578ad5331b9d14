"""Compile a model's CPU kernels before the first step, so that no rank waits in a collective for another's compiler.

Compiled kernels are cached on disk; the first start on a machine takes some seconds, later ones milliseconds.
"""

from typing import TYPE_CHECKING

import torch

from attention.cpu_attention import paged_attention
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Span, Step
from moe.cpu.linear import silu_and_mul
from moe.cpu.packed_weight import PackedWeight

if TYPE_CHECKING:
    from moe.model import Model


@torch.inference_mode()
def compile_kernels(model: "Model") -> None:
    """Run every kernel once on tiny inputs of the types this model uses; local."""
    parallel = model.step.is_parallel
    slots = model.layers[0].up
    offsets = torch.zeros(len(slots.packed_S) + 1, dtype=torch.int64)
    slots.apply(torch.zeros(0, slots.in_dim), offsets, parallel=parallel)
    silu_and_mul(torch.zeros(1, 32), parallel=parallel)
    shape = LayerShape(num_kv_heads=1, key_dim=16, value_dim=16)
    step = Step(max_tokens=1, max_sequences=1, max_blocks=1, block_tokens=16, threads=1 + parallel)
    step.fill([Span(0, 1, [0])])
    cache = PagedCache([shape], 1)
    cache.step = step
    row = torch.zeros(1, 1, step.num_padded, 16)
    cache.update(row, row, 0)
    for sinks in (None, torch.zeros(1)):
        paged_attention(row[0], cache.keys[0], cache.values[0], step, scale=1.0, sinks_H=sinks)
    for weight in _one_of_each_kind(model):
        torch.nn.functional.linear(torch.zeros(1, weight.in_dim), weight)


def _one_of_each_kind(model: "Model") -> list[PackedWeight]:
    """A weight for each way in which this model's linear layers keep theirs."""
    weights = [getattr(module, "weight", None) for module in model.skeleton.model.modules()]
    kinds = {weight.panels.dtype: weight for weight in weights if isinstance(weight, PackedWeight)}
    return list(kinds.values())
