"""What a rank's device changes in how its model is built and run: organs, weights, slots, cache, step.

`moe.model`, the runner and the engine's assembly are written once; whatever differs between a CPU and a GPU they ask
of a `Backend`, which is chosen by name when the engine is put together. Nothing here knows a device.
Rejected: a second model class for GPUs, which would have to be kept equal to the first.

Legend: T rows, K choices, D hidden dim, P pairs (row, choice), S slots of this rank, L layers, N, K a weight's sides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dispatch.dispatched import TokenDispatcher
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Step
from moe.current_step import CurrentStep
from moe.load.loader import Keep, Loader, Report, Weight
from moe.load.quantisation import Quantisation
from moe.load_counts import LayerCounts, LoadCounts
from moe.replicas import Route

if TYPE_CHECKING:
    from moe.model import Model


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
        """Let a slot serve `new`, of the same kind; returns what it served, whose small parts are undefined."""
        ...

    def rearrange(self, parts: Sequence[Any]) -> None:
        """Serve single slots of the same kind, in this order, in place of all so far; on a CPU more or fewer.

        Raises:
            NoSpareSlotError: the device cannot have another number of slots.
        """
        ...


class Experts(Protocol):
    """This rank's part of one MoE layer: what the experts organ calls, and what moves experts."""

    up: Any  # Slots of one kind: gate_up_proj, or up_proj where the family has no gate
    down: Any
    route: Route  # of the placement that serves
    num_experts: int
    dispatcher: TokenDispatcher  # of the epoch
    counts: LayerCounts | None
    sample_TD: Tensor | None  # some real rows, which try out experts that arrive

    def run(self, module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Serve one layer; collective. Rows past the step's tokens are padding and come back finite."""
        ...

    def try_out(self, module: Any, up: Any, down: Any, x_TD: Tensor) -> Tensor:
        """Run rows through an expert that need not serve, beside steps: [T, D], new."""
        ...


class Backend(Protocol):
    """One device's way."""

    @property
    def device(self) -> torch.device:
        """Where the model's inputs and weights are."""
        ...

    @property
    def model_dtype(self) -> torch.dtype:
        """What the modules compute in."""
        ...

    @property
    def attention(self) -> str:
        """Name under which the attention organ is registered."""
        ...

    @property
    def experts(self) -> str:
        """Name under which the experts organ is registered."""
        ...

    @property
    def warms_up_together(self) -> bool:
        """Whether `warm_up` runs steps, which are collective."""
        ...

    def register(self) -> None:
        """Make the organs known to `transformers`; may be called again."""
        ...

    def check(
        self, net: PreTrainedModel, shapes: list[LayerShape], quantisation: Quantisation | None
    ) -> None:
        """Refuse a model on meta that the kernels lack something for.

        Raises:
            UnsupportedModelError: naming it.
        """
        ...

    def keep_with(self, current: CurrentStep, stored: Callable[[Weight], Weight]) -> Keep:
        """How plain weights are kept, for a model that runs the `current` step; `stored` casts as the user wished."""
        ...

    def load_experts(
        self,
        loader: Loader,
        modules: Mapping[str, Any],
        local_LS: np.ndarray,
        report: Report,
        num_spare: int = 0,
    ) -> list[tuple[Slots, Slots]]:
        """Load this rank's slots of all layers: up and down of each.

        Args:
            modules: the experts modules by name, in layer order; their parameters are left alone.
            local_LS: [L, S] expert of each of this rank's slots, -1 where empty.
            num_spare: experts that may be on their way to this rank at once, where memory for them is reserved now.
        """
        ...

    def read_expert(
        self, loader: Loader, name: str, module: Any, expert: int, into: tuple[Slots, Slots]
    ) -> None:
        """Read one expert of a module whose layer is loaded into memory that serves nothing: up and down of one slot."""
        ...

    def open_layer(
        self,
        slots: tuple[Slots, Slots],
        route: Route,
        module: Any,
        dispatcher: TokenDispatcher,
        current: CurrentStep,
    ) -> Experts:
        """Put one MoE layer together."""
        ...

    def make_counts(
        self, num_layers: int, *, num_experts: int, num_ranks: int, slots_per_rank: int
    ) -> LoadCounts:
        """Counters for all layers."""
        ...

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
        """The step that this device's model reads; `num_ranks` run theirs together."""
        ...

    def make_cache(self, shapes: list[LayerShape], num_blocks: int, step: Step) -> PagedCache:
        """Reserve the pages."""
        ...

    def token_bytes(self, shape: LayerShape) -> int:
        """Bytes of cache that one layer takes per token."""
        ...

    def finish(self, net: PreTrainedModel) -> None:
        """Take a model whose weights are there: move what is not, exchange modules for faster ones."""
        ...

    def enter_thread(self) -> None:
        """Let the calling thread compute on this device, which it does not by itself."""
        ...

    def warm_up(self, model: "Model", cache: PagedCache) -> None:
        """Compile the kernels that the model uses, before the first step; local."""
        ...
