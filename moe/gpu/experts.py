"""The experts organ on GPUs: experts to slots, dispatch, two grouped products with the gate between them, combine.

The GPU's `moe.cpu.experts`. Every launch depends only on the step's padded size and nothing is read back, so a
step can be captured. Padding rows choose no slot and return zeros.

Legend: T rows, padding included, D hidden dim, K choices per row, P pairs (row, choice), S slots of this rank,
I intermediate dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dispatch.dispatched import Dispatched, TokenDispatcher
from dispatch.gpu.dispatcher import DeviceDispatcher
from dispatch.mode import NORMAL, Mode
from kvcache.gpu.step import DeviceStep
from moe.adopt import gates
from moe.adopt.gates import Gate
from moe.backend import serve_experts
from moe.expert_weights import grown_sample
from moe.gpu.choose import DeviceLayerCounts, DeviceSlotChoice
from moe.gpu.lora.adapted import AdaptedPairs, DeviceExpertAdapters
from moe.gpu.products import fp8
from moe.gpu.products.fp8 import multiply_rows
from moe.gpu.products.tiles import MANY_ROWS
from moe.gpu.products.widened import Workspace
from moe.gpu.weights.slots import DeviceSlots
from moe.load_counts import LayerCounts
from moe.slot_choice import SlotChoice

NAME = "wideep_experts_gpu"


@dataclass
class _Shared:
    """Rows of shared experts."""

    make: Callable[[], Tensor] | None
    rows_TD: Tensor | None = None

    def compute(self) -> None:
        """Launch the shared experts, if there are any."""
        if self.make is not None:
            self.rows_TD = self.make()


@dataclass
class DeviceExpertLayer:
    """This rank's slots of one MoE layer, and the choice among all slots; a `moe.backend.ExpertLayer`."""

    up: DeviceSlots
    down: DeviceSlots
    first_choice: SlotChoice
    num_experts: int
    dispatcher: TokenDispatcher
    step: DeviceStep
    gate: Gate
    dtype: torch.dtype  # of rows
    counts: LayerCounts | None = None
    sample_TD: Tensor | None = None
    # The next run adds these rows, and computes them while its own travel.
    adds: Callable[[], Tensor] | None = None
    workspace: Workspace | None = None  # for decoded weights; runs of all layers share it, on one stream
    adapters: DeviceExpertAdapters | None = None  # None if the model takes no adapters
    _on_device: DeviceSlotChoice = field(init=False)

    def __post_init__(self) -> None:
        """Copy the choice to the device."""
        self._on_device = DeviceSlotChoice(
            self.first_choice,
            slots_per_rank=len(self.up.places_S),
            num_ranks=self.dispatcher.world_size,
            device=self.step.device,
        )

    @property
    def choice(self) -> SlotChoice:
        """Choice of the current placement. Setting it changes the tables on the device, for later launches."""
        return self.first_choice

    @choice.setter
    def choice(self, choice: SlotChoice) -> None:
        self.first_choice = choice
        self._on_device.follow(choice)

    def run(self, module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self._keep_sample(hidden_TD)
        mode = self._mode()
        shared, self.adds = _Shared(self.adds), None
        sent = self._send(hidden_TD.contiguous(), ids_TK, mode, shared)
        # The memory holds all pairs of all ranks. With even loads each rank receives as many as it sends.
        expected = mode.capacity * ids_TK.shape[1] or None
        y_PD = self.compute(
            module,
            self.up,
            self.down,
            sent.x_NH,
            sent.row_P,
            sent.slot_offsets,
            sent.handle.num_pairs,
            expected,
            None if self._is_fixed else self.workspace,
            self._adapted(sent),
        )
        if isinstance(self.dispatcher, DeviceDispatcher):
            return self.dispatcher.combine(y_PD, weights_TK.contiguous(), sent, added_TH=shared.rows_TD)
        out_TD = self.dispatcher.combine(y_PD, weights_TK.contiguous(), sent)
        return out_TD if shared.rows_TD is None else out_TD + shared.rows_TD

    def compute(
        self,
        module: Any,
        up: DeviceSlots,
        down: DeviceSlots,
        x_TD: Tensor,
        row_P: Tensor | None,
        slot_offsets: Tensor,
        num_pairs: int,
        expected_pairs: int | None = None,
        workspace: Workspace | None = None,
        adapted: AdaptedPairs | None = None,
    ) -> Tensor:
        """Apply slots' experts to their pairs; local. Returns [P, D]; rows without a pair are undefined.

        Args:
            adapted: The pairs with adapters.
        """
        raised_PN = multiply_rows(
            x_TD, up.store.weights, slot_offsets, up.places_S, num_pairs=num_pairs, expected_pairs=expected_pairs,
            rows_P=row_P, gate=self.gate.name, biases_WN=up.store.bias, feeds=down.store.weights, workspace=workspace,
        )  # fmt: skip
        lowered_PI = raised_PN
        if adapted is not None:
            assert isinstance(raised_PN, Tensor), "a model that takes adapters does not quantise rows"
            both_PN, has_gate = raised_PN, self.gate.name != "none"
            if has_gate:
                found = multiply_rows(
                    x_TD, up.store.weights, adapted.slot_offsets, up.places_S, num_pairs=num_pairs, expected_pairs=expected_pairs,
                    rows_P=row_P, biases_WN=up.store.bias, workspace=workspace,
                )  # fmt: skip
                assert isinstance(found, Tensor), "without a gate, outputs are not quantised"
                both_PN = found
            lowered_PI = adapted.lowered(module, x_TD, both_PN, raised_PN if has_gate else None)
        elif isinstance(raised_PN, Tensor) and self.gate.name == "none":
            lowered_PI = gates.apply(module, raised_PN)
        answers_PD = multiply_rows(
            lowered_PI, down.store.weights, slot_offsets, down.places_S, num_pairs=num_pairs,
            expected_pairs=expected_pairs, biases_WN=down.store.bias, workspace=workspace,
        )  # fmt: skip
        assert isinstance(answers_PD, Tensor), "answers are not quantised"
        if adapted is not None and isinstance(lowered_PI, Tensor):
            adapted.add_down(lowered_PI, answers_PD)
        return (
            module.post_expert_norm(answers_PD)
            if getattr(module, "has_post_expert_norm", False)
            else answers_PD
        )

    def try_out(self, module: Any, up: DeviceSlots, down: DeviceSlots, x_TD: Tensor) -> Tensor:
        """Run rows through an expert that need not be in use: [T, D] float32 on the host, new."""
        device = up.store.device
        x_TD = x_TD.to(device, self.dtype).contiguous()
        offsets = torch.tensor([0, len(x_TD)], device=device)
        return self.compute(module, up, down, x_TD, None, offsets, len(x_TD)).float().cpu()

    def _adapted(self, sent: Dispatched) -> AdaptedPairs | None:
        if self.adapters is None or sent.label_N is None:
            return None
        return self.adapters.pairs(sent.row_P, sent.slot_offsets, sent.label_N)

    def _send(self, x_TD: Tensor, ids_TK: Tensor, mode: Mode, shared: "_Shared") -> Dispatched:
        """Choose slots, count the choices and dispatch. On one rank a single launch does all three.

        Shared experts run between the launches that send rows and that wait for them. The place of a row's adapter travels
        with the row, in every step, as another rank does not know which rows have one.
        """
        placed = self.step.on_device
        table = self.counts.device_table if isinstance(self.counts, DeviceLayerCounts) else None
        choices = ids_TK, placed.cache_slot_P, placed.num_decodes_1, table
        place_T = None if self.adapters is None else self.step.adapters_on_device()
        if not isinstance(self.dispatcher, DeviceDispatcher):
            shared.compute()
            assert place_T is None, f"a dispatcher for {self.dispatcher.name} carries no adapters"
            return self.dispatcher.dispatch(x_TD, self._on_device.slots(*choices), mode)
        if self.dispatcher.takes_experts:
            shared.compute()
            return self.dispatcher.dispatch_experts(x_TD, self._on_device.experts(*choices), place_T)
        return self.dispatcher.dispatch(x_TD, self._on_device.slots(*choices), mode, shared.compute, place_T)

    def launch_tiles(self) -> None:
        """Compile products that the largest step does not launch, so that no step waits for a compiler.

        These are the products in FP8 for all numbers of rows, and that of quantised weights below the rows from which they
        are decoded first.
        """
        if self.gate.name == "none":
            return
        device, num_slots = self.step.device, len(self.up.places_S)
        workspace, weights = self.workspace, [each.store.weights for each in (self.up, self.down)]
        levels: tuple[int, ...] = fp8.LEVELS if weights[0].format.fp8_rows else ()
        if workspace is not None and any(workspace.takes(each, self.dtype) for each in weights):
            levels = (*levels, MANY_ROWS)
        offsets = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)  # no rows
        x_TD = torch.zeros(1, weights[0].in_dim, dtype=self.dtype, device=device)
        for rows in levels:
            pairs = max(rows * num_slots, 1)
            row_P = torch.zeros(pairs, dtype=torch.int64, device=device)
            self.compute(None, self.up, self.down, x_TD, row_P, offsets, pairs)

    @property
    def _is_fixed(self) -> bool:
        """Whether a graph may hold the step."""
        return self.step.is_decode_only or self.step.has_fixed_shape

    def _mode(self) -> Mode:
        """Return the dispatch mode. A lone rank agrees on no capacity: its padding rows exceed the agreed tokens."""
        return NORMAL if self.dispatcher.world_size == 1 else Mode(self.step.agreed_tokens)

    def _keep_sample(self, hidden_TD: Tensor) -> None:
        """Keep some rows of steps with prompts, to try experts that arrive. This waits for the device.

        Experts never move on a single rank, and steps of a fixed shape may be captured.
        """
        if self.dispatcher.world_size > 1 and not self._is_fixed:
            self.sample_TD = grown_sample(self.sample_TD, hidden_TD[: self.step.num_tokens])


def register() -> None:
    """Register the organ with `transformers` under `NAME`; may be called again."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, serve_experts)
