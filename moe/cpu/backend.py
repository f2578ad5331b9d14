"""Build a model for a CPU: weights in panels for the compiled kernels, activations in float32."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention import latents
from attention import organ as attention_organ
from attention.cpu.adapted_latents import ADAPT_ABSORBED, ADAPT_EXPANDED
from attention.cpu.attention import ATTEND
from attention.cpu.heads import HEADS
from attention.cpu.latents import AbsorbedWeight, latent_kernels
from attention.cpu.norm import NORM, rms_norm
from attention.cpu.tiles import LANES
from attention.recurrences.cpu import RECURRENCES
from attention.recurrences.cpu_kernels import KERNELS as RECURRENCE_KERNELS
from attention.sparse import pools as pooled_index
from attention.sparse.cpu import choose_from_pages, sparse_kernels
from attention.sparse.cpu_pools import POOL_KERNELS, choose_pools
from dispatch.compiled.native import Addressed
from dispatch.compiled.team import Team, program_of, run_alone
from dispatch.cpu_kernels.passes import PASSES
from kvcache.paged_cache import BLOCK_TOKENS, LayerShape, PagedCache
from kvcache.step import Span, Step
from moe.adopt.adopt import SampleRows, adopt
from moe.adopt.exchanged import SequenceParts, exchange_parts
from moe.adopt.gates import Gate, gate_of
from moe.adopt.norms import Norms
from moe.adopt.routers import Routers
from moe.backend import Backend, LoadedModel
from moe.cpu import experts as experts_organ
from moe.cpu.adopt_layers import adopt_layers
from moe.cpu.experts import PackedExpertLayer
from moe.cpu.kernels.local_experts import ADD
from moe.cpu.kernels.low_rank import ADAPT, ADAPT_PAIRS, SILU_ROWS, SPLIT
from moe.cpu.kernels.panels import pack
from moe.cpu.kernels.products import GATHER, GROUPED, LINEAR, QUANTISE
from moe.cpu.kernels.routing import ROUTE, route
from moe.cpu.program.net import EMBED
from moe.cpu.program.spread_experts import CHOOSE
from moe.cpu.weights.packed_weight import PackedWeight
from moe.cpu.weights.slots import PackedSlots
from moe.load.loader import Keep, Loader, Weight
from moe.load.quantisation import Quantisation
from moe.load.quantised_weight import QuantisedWeight
from moe.load_counts import LoadCounts
from moe.lora.tables import ExpertAdapters, FactorTable
from moe.slot_choice import SlotChoice


class PackedExperts:
    """`moe.backend.ExpertReader` that packs each expert when it is read. Reserves no memory for moves in advance."""

    def __init__(
        self, loader: Loader, modules: Mapping[str, Any], _slots_per_layer: int, _num_spare: int
    ) -> None:
        self.loader, self._modules = loader, modules

    def load(self, name: str, leaf: str, local_S: np.ndarray) -> PackedSlots:
        """Read one weight. If all slots are empty, one expert is read to find the type of later ones."""
        read = self.loader.read_experts
        module, target = self._modules[name], f"{name}.{leaf}"
        slots: PackedSlots | None = None
        for slot, weight, bias in read(module, target, local_S):
            kept = self.loader.stored(target, weight)
            slots = slots or PackedSlots.like(kept, bias, len(local_S))
            slots.put(slot, kept, bias)
        if slots is None:
            _, weight, bias = next(read(module, target, np.zeros(1, np.int64)))
            slots = PackedSlots.like(self.loader.stored(target, weight), bias, len(local_S))
        return slots

    def read(self, name: str, leaf: str, expert: int, into: PackedSlots) -> None:
        only, target = np.array([expert]), f"{name}.{leaf}"
        for slot, weight, bias in self.loader.read_experts(self._modules[name], target, only):
            into.put(slot, self.loader.stored(target, weight), bias)


def _register() -> None:
    attention_organ.register()
    experts_organ.register()


def _keep_with(step: Step, loader: Loader) -> Keep:
    """Keep matrices as `PackedWeight`, other parameters as float32. Absorbed weights stay plain until `_finish`."""

    def keep(name: str, tensor: Weight, _declared: Tensor) -> Tensor | nn.Parameter:
        if name.endswith(latents.ABSORBED):
            kept = tensor.dequantised() if isinstance(tensor, QuantisedWeight) else loader.cast(tensor)
            return nn.Parameter(kept, requires_grad=False)
        if isinstance(tensor, QuantisedWeight) or (name.endswith(".weight") and tensor.dim() == 2):
            return PackedWeight(loader.stored(name, tensor), step)
        return nn.Parameter(tensor.float(), requires_grad=False)

    return keep


def _open_layer(
    up: PackedSlots, down: PackedSlots, choice: SlotChoice, module: Any, dispatcher: Any, step: Step
) -> PackedExpertLayer:
    has_silu = gate_of(module) == Gate("silu") and up.out_dim % (2 * LANES) == 0
    adapters = None
    if step.num_adapters:
        adapters = ExpertAdapters(step.num_adapters, up.num_slots)
    return PackedExpertLayer(
        up,
        down,
        choice,
        int(module.num_experts),
        dispatcher,
        step,
        has_silu,
        has_norm=getattr(module, "has_post_expert_norm", False),
        adapters=adapters,
    )


def _make_step(*, threads: int, num_ranks: int = 1, **sizes: int) -> Step:
    step = Step(**sizes)
    _set_threads(step, threads)
    return step


def _set_threads(step: Step, threads: int) -> None:
    step.team = Team(threads) if threads > 1 else None


def _make_cache(shapes: list[LayerShape], num_blocks: int, num_states: int, step: Step) -> PagedCache:
    """Reserve pages and state slots. They occupy memory once they are written."""
    cache = PagedCache(shapes, num_blocks, num_states)
    cache.step = step
    return cache


def _why_unserved(
    net: nn.Module, _shapes: list[LayerShape], _quantisation: Quantisation | None
) -> str | None:
    return latents.why_not(net) or pooled_index.why_not(net, BLOCK_TOKENS)


def _finish(net: PreTrainedModel, step: Step, shapes: list[LayerShape]) -> None:
    """Pack both halves of every `kv_b_proj`, which replace it, and adopt the kernels' forms of modules."""
    for module in latents.latent_modules(net):
        weight = module.kv_b_proj.weight.detach()
        unrotated, value_dim = int(module.qk_nope_head_dim), int(module.v_head_dim)
        halves = latents.halves_of(weight, len(weight) // (unrotated + value_dim), unrotated)
        key, value = pack(halves.key_HUL.transpose(1, 2)), pack(halves.value_HVL)
        module.absorbed_adapters = FactorTable(step.num_adapters) if step.num_adapters else None
        table = 0 if module.absorbed_adapters is None else module.absorbed_adapters.address
        module.absorbed = AbsorbedWeight(key, value, value_dim, table)
        del module.kv_b_proj
    rows = SampleRows(torch.float32, torch.device("cpu"))
    parts = SequenceParts(RECURRENCES, choose_from_pages, choose_pools, attention_organ.NAME, _make_cache)
    exchange_parts(net, step, rows, parts)
    adopt(net.modules(), (Norms(rms_norm), Routers(route)), rows)
    adopt_layers(net, step, shapes)


def _kernels_of(
    net: PreTrainedModel, shapes: list[LayerShape], num_adapters: int, num_ranks: int
) -> tuple[Addressed, ...]:
    """Return the kernels of this model that take long to compile, the longest ones first.

    Compiled kernels are cached on disk: the first start on a machine takes half a minute, later ones milliseconds.
    """
    plain = torch.float32
    dtype = next((shape.codes for shape in shapes if shape.codes is not None), plain)
    indexes = {shape.index_codes or plain for shape in shapes if shape.index_dim}
    return (
        *((*PASSES, CHOOSE) if num_ranks > 1 else ()),
        ADD,
        ROUTE,
        NORM,
        EMBED,
        LINEAR,
        GROUPED,
        GATHER,
        QUANTISE,
        ATTEND[dtype],
        HEADS[dtype],
        *(latent_kernels(dtype) if any(shape.latent for shape in shapes) else ()),
        *(kernel for index in indexes for kernel in sparse_kernels(dtype, index)),
        *(POOL_KERNELS if pooled_index.modules(net) else ()),
        *(RECURRENCE_KERNELS if any(shape.state for shape in shapes) else ()),
        *((ADAPT, ADAPT_PAIRS, SILU_ROWS, SPLIT, ADAPT_ABSORBED, ADAPT_EXPANDED) if num_adapters else ()),
    )


@torch.inference_mode()
def _warm_up(model: LoadedModel, served: PagedCache, report: Callable[[int, int], None]) -> None:
    """Compile what writes the cache and runs programs, before the first step; local.

    Otherwise a rank would wait in a collective for another rank's compiler.
    """
    nothing = program_of([])
    run_alone(nothing)
    if model.step.team is not None:
        model.step.team.run(nothing)
    step = Step(max_tokens=1, max_sequences=1, max_blocks=1, block_tokens=16)
    step.fill([Span(0, 1, [0])])
    row = torch.zeros(1, 1, step.num_padded, 16)
    for shape in {each.latent: each for each in served.shapes if each.num_kv_heads}.values():
        tiny = replace(
            shape, num_kv_heads=1, key_dim=32 if shape.latent else 16, value_dim=0 if shape.latent else 16
        )
        _make_cache([tiny], 1, 0, step).update(row, row, 0)


CPU = Backend(
    device=torch.device("cpu"),
    model_dtype=torch.float32,
    attention=attention_organ.NAME,
    experts=experts_organ.NAME,
    warms_up_together=False,
    register=_register,
    why_unserved=_why_unserved,
    keep_with=_keep_with,
    open_experts=PackedExperts,
    open_layer=_open_layer,
    make_counts=LoadCounts,
    make_step=_make_step,
    make_cache=_make_cache,
    token_bytes=lambda shape: shape.token_bytes,
    finish=_finish,
    enter_thread=lambda: None,  # every thread computes on the CPU
    warm_up=_warm_up,
    kernels=_kernels_of,
    set_threads=_set_threads,
)
