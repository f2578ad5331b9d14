"""What a rank's device changes in building and running its model: organs, weights, slots, cache, step.

`moe.model`, the runner and the engine's assembly are written once. Everything that differs between a CPU and a GPU is
a field of a `Backend`, chosen by name when the engine is assembled (`moe.cpu.backend`, `moe.gpu.backend`). Nothing
here depends on a device.
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

from dispatch.compiled.native import Addressed
from dispatch.dispatched import TokenDispatcher
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Step
from moe.load.loader import Keep, Loader
from moe.load.quantisation import Quantisation
from moe.load_counts import LayerCounts, LoadCounts
from moe.slot_choice import SlotChoice


class Slots(Protocol):
    """One named weight of some slots of a layer, with its bias and scales."""

    @property
    def in_dim(self) -> int:
        """Input features of a row."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert's part, without padding."""

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for all slots."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the first slot's tensors by name: "" is the weight, "scales" and "bias" its scales and bias; views."""

    def at(self, slot: int) -> "Slots":
        """Return one slot alone; it shares the slot's memory."""

    def spare(self) -> "Slots":
        """Reserve memory for one more expert, outside all slots."""

    def exchange(self, slot: int, new: Any) -> "Slots":
        """Let a slot serve `new`, of the same kind, without copying its weight. Return what it served before."""

    def rearrange(self, parts: Sequence[Any]) -> None:
        """Replace all slots with single slots of the same kind, in this order. On a CPU the number may change.

        Raises:
            NoSpareSlotError: The device cannot change the number of slots.
        """

    def release(self) -> None:
        """Free the first slot's memory. Nothing may serve it afterwards."""


class ExpertReader(Protocol):
    """Reads the experts of one model from its checkpoint into slots."""

    loader: Loader  # of the weights that serve; may be replaced

    def load(self, name: str, leaf: str, local_S: np.ndarray) -> Slots:
        """Read one weight of all of this rank's slots in one layer.

        Args:
            name: Name of the experts module. leaf: Name of its parameter.
            local_S: Expert of each slot, -1 if empty.
        """

    def read(self, name: str, leaf: str, expert: int, into: Any) -> None:
        """Read one weight of one expert into the first slot of memory that is not in use."""


class ExpertLayer(Protocol):
    """This rank's part of one MoE layer, used by the experts organ and by moves of experts."""

    up: Any  # Slots of one kind: gate_up_proj, or up_proj if the family has no gate
    down: Any
    choice: SlotChoice  # of the current placement
    num_experts: int
    dispatcher: TokenDispatcher  # of the current epoch
    counts: LayerCounts | None
    # Served rows with which arriving experts are tried; float32 on the host.
    sample_TD: Tensor | None

    def run(self, module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Compute one layer; collective. Padding rows (past the step's tokens) return finite values."""

    def try_out(self, module: Any, up: Any, down: Any, x_TD: Tensor) -> Tensor:
        """Run rows through an expert that need not be in use, while steps may run: [T, D], new."""


def serve_experts(module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Run an experts module's forward on its layer."""
    layer: ExpertLayer = module.expert_layer
    return layer.run(module, hidden_TD, ids_TK, weights_TK)


class LoadedModel(Protocol):
    """The parts of a model that a warm-up uses."""

    layers: list[ExpertLayer]
    load_counts: LoadCounts

    @property
    def net(self) -> PreTrainedModel:
        """Return the modules."""

    @property
    def step(self) -> Step:
        """Step that forwards run."""

    def forward(self, token_T: Tensor, cache: PagedCache, logits_R: Tensor) -> Tensor:
        """Run the step; see `moe.model.Model.forward`."""

    @property
    def num_mtp_layers(self) -> int:
        """Number of layers that draft."""

    def draft(
        self, depth: int, token_T: Tensor, cache: PagedCache, rows_R: Tensor, hidden_T: Tensor
    ) -> Tensor:
        """Run one of these layers; see `moe.model.Model.draft`."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One device.

    Attributes:
        device: Device of the model's inputs and weights.
        model_dtype: Type that the modules compute in.
        attention, experts: Names under which the organs are registered.
        warms_up_together: True if `warm_up` runs steps, which are collective.
        register: Register the organs with `transformers`; may be called again.
        why_unserved: Name what the kernels lack for a model on meta, to follow "the model has". None if nothing.
        keep_with: Return the function that stores weights other than experts, for a model that runs this step (which is
            refilled). The loader converts them to the user's dtype.
        open_experts: Return a reader. Takes a loader, the experts modules by name (their parameters stay on meta), the
            slots per layer, and the number of experts that may move to this rank at once. Memory for these is reserved
            if that is not possible later.
        open_layer: Build one MoE layer from up, down, choice, module, dispatcher, step.
        make_counts: Make counters for all layers; takes the arguments of `LoadCounts`.
        make_step: Make the step that this device's model reads; takes the arguments of `Step`, `threads` of this
            process, and `num_ranks` that run their threads together.
        make_cache: Reserve memory for the given shapes, number of blocks and number of state slots, for a step.
        token_bytes: Bytes of cache per token of one layer.
        finish: Complete a loaded model, given its step and the shapes that its layers cache: move the rest to the
            device and adopt faster forms of modules; local.
        enter_thread: Prepare the calling thread to compute on this device next to the steps. What it computes afterwards
            comes after all steps launched before the call. It may be called again.
        kernels: Return what to compile before weights are read. Takes a model on meta, the shapes that its layers cache,
            the number of adapters of a step and the number of ranks.
        warm_up: Compile the model's other kernels before the first step. Takes the model, the cache, and a function that is
            called with the number of finished parts and their total.
        set_threads: Change the threads of this process that run a step, while none runs. No result depends on them.
        keeps_addresses: Whether captured steps read weights at the addresses that they have when a model is loaded.
        wait: Return when the device has finished what the calling thread launched.
        runs_image_experts: Whether a decoder layer may have experts for images next to those for text.
        fp8_rows: Whether rows are quantised for FP8 weights if the checkpoint's configuration does so.
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
    kernels: Callable[[PreTrainedModel, list[LayerShape], int, int], Sequence[Addressed]] = (
        lambda _net, _shapes, _adapters, _ranks: ()
    )
    set_threads: Callable[[Step, int], None] = lambda _step, _threads: None
    keeps_addresses: bool = False
    wait: Callable[[], None] = lambda: None
    runs_image_experts: bool = True
    fp8_rows: bool = False
