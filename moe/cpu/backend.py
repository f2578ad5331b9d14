"""How a model is built for a CPU: weights in panels for the compiled kernels, activations in float32 (D9)."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention import organ as attention_organ
from dispatch.dispatched import TokenDispatcher
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Step
from moe.backend import Backend, Slots
from moe.cpu import experts as experts_organ
from moe.cpu.experts import ExpertLayer, SlotTensors
from moe.cpu.packed_weight import PackedWeight
from moe.cpu.warmup import compile_kernels
from moe.current_step import CurrentStep
from moe.load.loader import Keep, Loader, Report, Weight
from moe.load.quantisation import Quantisation
from moe.load.quantised_weight import QuantisedWeight
from moe.load_counts import LoadCounts
from moe.replicas import Route

if TYPE_CHECKING:
    from moe.model import Model


class CpuBackend:
    """The CPU's way; has no state."""

    device = torch.device("cpu")
    model_dtype = torch.float32
    attention = attention_organ.NAME
    experts = experts_organ.NAME
    warms_up_together = False

    def register(self) -> None:
        """Make the organs known."""
        attention_organ.register()
        experts_organ.register()

    def check(
        self, net: PreTrainedModel, shapes: list[LayerShape], quantisation: Quantisation | None
    ) -> None:
        """The CPU's kernels take all shapes."""

    def keep_with(self, current: CurrentStep, stored: Callable[[Weight], Weight]) -> Keep:
        """Matrices become `PackedWeight`s, other parameters float32."""

        def keep(name: str, tensor: Weight, _declared: Tensor) -> Tensor | nn.Parameter:
            if isinstance(tensor, QuantisedWeight) or (name.endswith(".weight") and tensor.dim() == 2):
                return PackedWeight(stored(tensor), current)
            return nn.Parameter(tensor.float(), requires_grad=False)

        return keep

    def load_experts(
        self,
        loader: Loader,
        modules: Mapping[str, Any],
        local_LS: np.ndarray,
        report: Report,
        num_spare: int = 0,
    ) -> list[tuple[Slots, Slots]]:
        """Pack each expert as it is read. Memory for experts that move is reserved when they come."""
        layers: list[tuple[Slots, Slots]] = []
        for index, (name, module) in enumerate(modules.items()):
            up, down = (
                _load_slots(loader, module, f"{name}.{leaf}", local_LS[index]) for leaf in leaves(module)
            )
            layers.append((up, down))
            report("experts", (index + 1) / len(modules))
        return layers

    def read_expert(
        self, loader: Loader, name: str, module: Any, expert: int, into: tuple[Slots, Slots]
    ) -> None:
        """Pack the expert into the slots' memory."""
        for leaf, slots in zip(leaves(module), into, strict=True):
            assert isinstance(slots, SlotTensors), "slots of another backend"
            _put_expert(loader, module, f"{name}.{leaf}", expert, slots)

    def open_layer(
        self,
        slots: tuple[Slots, Slots],
        route: Route,
        module: Any,
        dispatcher: TokenDispatcher,
        current: CurrentStep,
    ) -> ExpertLayer:
        """Put one MoE layer together."""
        up, down = slots
        assert isinstance(up, SlotTensors) and isinstance(down, SlotTensors), "slots of another backend"
        return ExpertLayer(up, down, route, int(module.num_experts), dispatcher, current)

    def make_counts(
        self, num_layers: int, *, num_experts: int, num_ranks: int, slots_per_rank: int
    ) -> LoadCounts:
        """Counters for all layers."""
        return LoadCounts(
            num_layers, num_experts=num_experts, num_ranks=num_ranks, slots_per_rank=slots_per_rank
        )

    def make_step(
        self,
        *,
        max_tokens: int,
        max_sequences: int,
        max_blocks: int,
        block_tokens: int,
        threads: int,
        num_ranks: int = 1,
    ) -> Step:
        """The step that the organs read."""
        return Step(
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            max_blocks=max_blocks,
            block_tokens=block_tokens,
            threads=threads,
        )

    def make_cache(self, shapes: list[LayerShape], num_blocks: int, step: Step) -> PagedCache:
        """Reserve the pages, which take memory as they are written."""
        cache = PagedCache(shapes, num_blocks)
        cache.step = step
        return cache

    def token_bytes(self, shape: LayerShape) -> int:
        """Bytes of cache that one layer takes per token."""
        return shape.token_bytes

    def finish(self, net: PreTrainedModel) -> None:
        """Nothing is left to do."""

    def enter_thread(self) -> None:
        """Every thread computes on the CPU."""

    def warm_up(self, model: "Model", cache: PagedCache) -> None:
        """Compile the kernels."""
        compile_kernels(model)


def leaves(module: Any) -> tuple[str, str]:
    """Names of an experts module's two weights."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def _load_slots(loader: Loader, module: Any, target: str, local_experts: np.ndarray) -> SlotTensors:
    """Load one weight (and its bias) of all of this rank's slots in one layer."""
    slots: SlotTensors | None = None
    for slot, tensor in loader.load_experts(target, local_experts):
        weight_NK = rows_of_outputs(loader, module, tensor)
        slots = slots or SlotTensors.like(weight_NK, len(local_experts))
        slots.put(slot, weight_NK)
    if slots is None:  # all empty, for now: one expert tells the type that others will come in
        _, tensor = next(loader.load_experts(target, np.zeros(1, dtype=np.int64)))
        slots = SlotTensors.like(rows_of_outputs(loader, module, tensor), len(local_experts))
    if module.has_bias:
        slots.bias_SN = torch.zeros(len(local_experts), slots.out_dim)
        for slot, bias in loader.load_experts(f"{target}_bias", local_experts):
            assert isinstance(bias, Tensor), f"{target}_bias is quantised"
            slots.bias_SN[slot] = bias
    return slots


def _put_expert(loader: Loader, module: Any, target: str, expert: int, slots: SlotTensors) -> None:
    """Read one weight (and its bias) of one expert into the first slot."""
    only = np.array([expert])
    for slot, tensor in loader.load_experts(target, only):
        slots.put(slot, rows_of_outputs(loader, module, tensor))
    if slots.bias_SN is not None:
        for slot, bias in loader.load_experts(f"{target}_bias", only):
            assert isinstance(bias, Tensor), f"{target}_bias is quantised"
            slots.bias_SN[slot] = bias


def rows_of_outputs(loader: Loader, module: Any, weight: Weight) -> Weight:
    """A weight as slots take it: [outputs, inputs], which quantised ones always are."""
    if module.is_transposed and isinstance(weight, Tensor):
        weight = weight.T
    return loader.stored(weight)


CPU: Backend = CpuBackend()
