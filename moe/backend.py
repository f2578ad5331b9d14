"""What a rank's device changes in how its model is built and run: organs, weights, slots, cache, step.

`moe.model`, the runner and the engine's assembly are written once; whatever differs between a CPU and a GPU is a field
of a `Backend`, which is chosen by name when the engine is put together (`moe.cpu.backend`, `moe.gpu.backend`). Nothing
here knows a device.
Rejected: a second model class for GPUs, which would have to be kept equal to the first.

Legend: T rows, K choices, D hidden dim, S slots of this rank, L layers, N, K a weight's sides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dispatch.dispatched import TokenDispatcher
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Step
from moe.load.loader import Keep, Loader
from moe.load.quantisation import Quantisation
from moe.load_counts import LayerCounts, LoadCounts
from moe.slot_choice import SlotChoice


class Slots(Protocol):
    """One named weight of some slots of a layer, with what belongs to it (bias, scales)."""

    @property
    def in_dim(self) -> int:
        """Features that a row comes with."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert's part, without padding."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for all slots."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """All that belongs to the first slot, by name: "" is the weight, "scales" and "bias" its scales and bias; views."""
        ...

    def at(self, slot: int) -> "Slots":
        """One slot by itself; its memory is the slot's."""
        ...

    def spare(self) -> "Slots":
        """Memory for one more expert, which no slot serves."""
        ...

    def exchange(self, slot: int, new: Any) -> "Slots":
        """Let a slot serve `new`, of the same kind, without copying its weight; returns what it served."""
        ...

    def rearrange(self, parts: Sequence[Any]) -> None:
        """Serve single slots of the same kind, in this order, in place of all so far; on a CPU more or fewer.

        Raises:
            NoSpareSlotError: the device cannot have another number of slots.
        """
        ...

    def release(self) -> None:
        """Give the first slot's memory back; nothing may serve it any more."""
        ...


class ExpertReader(Protocol):
    """Reads the experts of one model from its checkpoint into slots."""

    def load(self, name: str, leaf: str, local_S: np.ndarray) -> Slots:
        """Read one weight of all of this rank's slots in one layer.

        Args:
            name: of the experts module. leaf: of its parameter.
            local_S: expert of each slot, -1 where empty.
        """
        ...

    def read(self, name: str, leaf: str, expert: int, into: Any) -> None:
        """Read one weight of one expert into the first slot of memory that serves nothing."""
        ...


class ExpertLayer(Protocol):
    """This rank's part of one MoE layer: what the experts organ calls, and what moves experts."""

    up: Any  # Slots of one kind: gate_up_proj, or up_proj where the family has no gate
    down: Any
    choice: SlotChoice  # of the placement that serves
    num_experts: int
    dispatcher: TokenDispatcher  # of the epoch
    counts: LayerCounts | None
    sample_TD: (
        Tensor | None
    )  # some rows that were served, which try out experts that arrive; float32 on the host

    def run(self, module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Serve one layer; collective. Rows past the step's tokens are padding and come back finite."""
        ...

    def try_out(self, module: Any, up: Any, down: Any, x_TD: Tensor) -> Tensor:
        """Run rows through an expert that need not serve, beside steps: [T, D], new."""
        ...


def serve_experts(module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Answer an experts module's forward with its layer."""
    layer: ExpertLayer = module.expert_layer
    return layer.run(module, hidden_TD, ids_TK, weights_TK)


class LoadedModel(Protocol):
    """What a warm-up uses of a model."""

    layers: list[ExpertLayer]
    load_counts: LoadCounts

    @property
    def net(self) -> PreTrainedModel:
        """The modules."""
        ...

    @property
    def step(self) -> Step:
        """What a forward runs."""
        ...

    def forward(self, token_T: Tensor, cache: PagedCache, logits_R: Tensor) -> Tensor:
        """Run the step; see `moe.model.Model.forward`."""
        ...

    @property
    def num_mtp_layers(self) -> int:
        """Layers that draft."""
        ...

    def draft(
        self, depth: int, token_T: Tensor, cache: PagedCache, rows_R: Tensor, hidden_T: Tensor
    ) -> Tensor:
        """Run one of them; see `moe.model.Model.draft`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One device.

    Attributes:
        device: where the model's inputs and weights are.
        model_dtype: what the modules compute in.
        attention, experts: names under which the organs are registered.
        warms_up_together: `warm_up` runs steps, which are collective.
        register: makes the organs known to `transformers`; may be called again.
        why_unserved: what the kernels lack for a model on meta, as "the model has ..."; None: nothing.
        keep_with: how weights that are no experts' are kept, for a model that runs a step, which is refilled; the loader
            brings them to the form that the user wished.
        open_experts: for a loader, the experts modules by name (their parameters on meta, left alone), slots per
            layer, and experts that may be on their way to this rank at once: memory for them is reserved where
            it cannot be later.
        open_layer: puts one MoE layer together: up, down, choice, module, dispatcher, step.
        make_counts: counters for all layers; called as `LoadCounts` is.
        make_step: the step that this device's model reads; called as `Step` is, and with `threads` of this process,
            and `num_ranks` that run theirs together.
        make_cache: reserves memory for some shapes: so many blocks and state slots, for a step.
        token_bytes: of cache that one layer takes per token.
        finish: takes a model whose weights are there, the step that it runs and what its layers cache: moves what is not
            on the device, adopts faster forms of modules; local.
        enter_thread: lets the calling thread compute on this device, which it does not by itself.
        warm_up: compiles the kernels that the model uses, before the first step; takes model, cache, and what is told
            how many parts of that are done, of how many.
    """

    device: torch.device
    model_dtype: torch.dtype
    attention: str
    experts: str
    warms_up_together: bool
    register: Callable[[], None]
    why_unserved: Callable[[PreTrainedModel, list[LayerShape], Quantisation | None], str | None]
    keep_with: Callable[[Step, Loader], Keep]
    open_experts: Callable[[Loader, Mapping[str, Any], int, int], ExpertReader]
    open_layer: Callable[[Any, Any, SlotChoice, Any, TokenDispatcher, Step], ExpertLayer]
    make_counts: Callable[..., LoadCounts]
    make_step: Callable[..., Step]
    make_cache: Callable[[list[LayerShape], int, int, Step], PagedCache]
    token_bytes: Callable[[LayerShape], int]
    finish: Callable[[PreTrainedModel, Step, list[LayerShape]], None]
    enter_thread: Callable[[], None]
    warm_up: Callable[[LoadedModel, PagedCache, Callable[[int, int], None]], None]
