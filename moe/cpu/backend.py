"""How a model is built for a CPU: weights in panels for the compiled kernels, activations in float32 (D9)."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attention import organ as attention_organ
from attention.cpu_attention import paged_attention
from attention.cpu_tiles import LANES
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Span, Step
from moe.adopt.gates import Gate, gate_of
from moe.backend import Backend, LoadedModel
from moe.cpu import experts as experts_organ
from moe.cpu.experts import PackedExpertLayer
from moe.cpu.linear import silu_and_mul
from moe.cpu.packed_weight import PackedWeight
from moe.cpu.slots import PackedSlots
from moe.load.loader import Keep, Loader, Weight
from moe.load.quantised_weight import QuantisedWeight
from moe.load_counts import LoadCounts
from moe.slot_choice import SlotChoice


class PackedExperts:
    """Packs each expert as it is read; `moe.backend.ExpertReader`. Memory for experts that move is reserved when they come."""

    def __init__(
        self, loader: Loader, modules: Mapping[str, Any], _slots_per_layer: int, _num_spare: int
    ) -> None:
        self._loader, self._modules = loader, modules

    def load(self, name: str, leaf: str, local_S: np.ndarray) -> PackedSlots:
        """See `ExpertReader`. Where all slots are empty one expert tells the type that others will come in."""
        read = self._loader.read_experts
        module, target = self._modules[name], f"{name}.{leaf}"
        slots: PackedSlots | None = None
        for slot, weight, bias in read(module, target, local_S):
            kept = self._loader.stored(weight)
            slots = slots or PackedSlots.like(kept, bias, len(local_S))
            slots.put(slot, kept, bias)
        if slots is None:
            _, weight, bias = next(read(module, target, np.zeros(1, np.int64)))
            slots = PackedSlots.like(self._loader.stored(weight), bias, len(local_S))
        return slots

    def read(self, name: str, leaf: str, expert: int, into: PackedSlots) -> None:
        """See `ExpertReader`."""
        only = np.array([expert])
        for slot, weight, bias in self._loader.read_experts(self._modules[name], f"{name}.{leaf}", only):
            into.put(slot, self._loader.stored(weight), bias)


def _register() -> None:
    attention_organ.register()
    experts_organ.register()


def _keep_with(step: Step, stored: Callable[[Weight], Weight]) -> Keep:
    """Matrices become `PackedWeight`s, other parameters float32."""

    def keep(name: str, tensor: Weight, _declared: Tensor) -> Tensor | nn.Parameter:
        if isinstance(tensor, QuantisedWeight) or (name.endswith(".weight") and tensor.dim() == 2):
            return PackedWeight(stored(tensor), step)
        return nn.Parameter(tensor.float(), requires_grad=False)

    return keep


def _open_layer(
    up: PackedSlots, down: PackedSlots, choice: SlotChoice, module: Any, dispatcher: Any, step: Step
) -> PackedExpertLayer:
    has_silu = gate_of(module) == Gate("silu") and up.out_dim % (2 * LANES) == 0
    return PackedExpertLayer(up, down, choice, int(module.num_experts), dispatcher, step, has_silu)


def _make_step(*, num_ranks: int = 1, **sizes: int) -> Step:
    return Step(**sizes)


def _make_cache(shapes: list[LayerShape], num_blocks: int, step: Step) -> PagedCache:
    """Reserve the pages, which take memory as they are written."""
    cache = PagedCache(shapes, num_blocks)
    cache.step = step
    return cache


@torch.inference_mode()
def compile_kernels(model: LoadedModel, served: PagedCache) -> None:
    """Run every kernel once on tiny inputs of the types this model uses, before the first step; local.

    So no rank waits in a collective for another's compiler. Compiled kernels are cached on disk; the first start on a
    machine takes some seconds, later ones milliseconds.
    """
    parallel = model.step.is_parallel
    slots: PackedSlots = model.layers[0].up
    offsets = torch.zeros(slots.num_slots + 1, dtype=torch.int64)
    slots.apply(torch.zeros(0, slots.in_dim), offsets, parallel=parallel)
    silu_and_mul(torch.zeros(1, 32), parallel=parallel)
    shape = LayerShape(num_kv_heads=1, key_dim=16, value_dim=16)
    step = Step(max_tokens=1, max_sequences=1, max_blocks=1, block_tokens=16, threads=1 + parallel)
    step.fill([Span(0, 1, [0])])
    cache = _make_cache([shape], 1, step)
    row = torch.zeros(1, 1, step.num_padded, 16)
    cache.update(row, row, 0)
    if any(each.latent for each in served.shapes):
        latents = PagedCache([LayerShape(num_kv_heads=1, key_dim=32, value_dim=0, latent=True)], 1)
        latents.step = step
        latents.update(row, row, 0)
    for sinks in (None, torch.zeros(1)):
        paged_attention(row[0], cache.keys[0], cache.values[0], step, scale=1.0, sinks_H=sinks)
    weights = [getattr(module, "weight", None) for module in model.net.modules()]
    of_each_kind = {weight.panels.dtype: weight for weight in weights if isinstance(weight, PackedWeight)}
    for weight in of_each_kind.values():
        torch.nn.functional.linear(torch.zeros(1, weight.in_dim), weight)


CPU = Backend(
    device=torch.device("cpu"),
    model_dtype=torch.float32,
    attention=attention_organ.NAME,
    experts=experts_organ.NAME,
    warms_up_together=False,
    register=_register,
    why_unserved=lambda _net, _shapes, _quantisation: None,  # the kernels take all shapes
    keep_with=_keep_with,
    open_experts=PackedExperts,
    open_layer=_open_layer,
    make_counts=LoadCounts,
    make_step=_make_step,
    make_cache=_make_cache,
    token_bytes=lambda shape: shape.token_bytes,
    finish=lambda _net: None,
    enter_thread=lambda: None,  # every thread computes on the CPU
    warm_up=compile_kernels,
)
