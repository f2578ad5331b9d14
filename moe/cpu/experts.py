"""The experts organ, which `transformers`' experts modules call instead of looping over their own weights.

One call per MoE layer and step: map logical experts to physical slots, dispatch, grouped GEMM over this rank's
slots, combine. Gate functions are the modules' own (`_apply_gate`); a fused kernel computes silu(gate) * up
(`moe.adopt.gates`). A module gets its layer when the model is built; there is no global lookup.

Legend: T tokens, N received rows, D (H in dispatch) hidden dim, K choices per token, P pairs (row, choice) on this rank,
I intermediate dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from attention.cpu.tiles import LANES
from dispatch.compiled.team import Team, program_of, run
from dispatch.dispatched import TokenDispatcher
from dispatch.mode import Mode
from kvcache.step import ROW_MULTIPLE, Step
from moe.backend import serve_experts
from moe.cpu.kernels.low_rank import SILU_ROWS, Groups, adapt_pairs_row
from moe.cpu.kernels.panels import Format
from moe.cpu.kernels.products import GATHER, QUANTISE, product_ns
from moe.cpu.weights.slots import PackedSlots
from moe.expert_weights import grown_sample
from moe.load_counts import LayerCounts
from moe.lora.tables import ExpertAdapters
from moe.slot_choice import SlotChoice

NAME = "wideep_experts"


@dataclass
class PackedExpertLayer:
    """This rank's slots of one MoE layer, and the choice among all slots; a `moe.backend.ExpertLayer`."""

    up: PackedSlots
    down: PackedSlots
    choice: SlotChoice
    num_experts: int
    dispatcher: TokenDispatcher
    step: Step
    has_silu: bool  # the kernel computes its gate
    counts: LayerCounts | None = None  # choices of this rank's tokens; None disables counting
    sample_TD: Tensor | None = None
    has_norm: bool = False  # the module norms each expert's output
    adapters: ExpertAdapters | None = None  # None if the model takes no adapters

    @property
    def num_groups(self) -> int:
        """Groups of pairs of this rank, which dispatch takes for slots.

        Without adapters there is one for each slot. With adapters, each slot has a group of the rows without one, and then one for each
        place of an adapter.
        """
        return self.up.num_slots * self.copies

    @property
    def copies(self) -> int:
        """Groups of a slot."""
        return 1 if self.adapters is None else 1 + self.adapters.num_places

    def groups_of(self, slots_TK: Tensor) -> Tensor:
        """Return the groups of a step's rows, given their slots: int64 [T, K]."""
        if self.adapters is None:
            return slots_TK
        return slots_TK * self.copies + self.step.adapter_T[: len(slots_TK), None] + 1

    def run(self, module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Compute one layer; collective. Padding rows (past the step's tokens) return zeros.

        Args:
            module: Experts module, for its gate function.
            hidden_TD: [T, D] float32.
            ids_TK: [T, K] int64 logical experts. weights_TK: [T, K], routing weights.

        Returns:
            [T, D] float32, new.
        """
        step = self.step
        rows = step.num_tokens
        self.sample_TD = grown_sample(self.sample_TD, hidden_TD[:rows])
        ids_TK = ids_TK[:rows].contiguous()
        slots_TK = self.choice.slots(ids_TK)
        groups_TK, mode = self.groups_of(slots_TK), Mode(step.agreed_tokens)
        sent = self.dispatcher.dispatch(hidden_TD[:rows].contiguous(), groups_TK, mode)
        begun_ns = perf_counter_ns()
        y_PD = self.compute(module, sent.x_NH, sent.row_P, sent.slot_offsets, step.team)
        if self.counts is not None:
            self.counts.experts_ns += perf_counter_ns() - begun_ns
            self.counts.add(ids_TK, slots_TK, step.num_decodes)
        out_TD = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype)
        out_TD[rows:] = 0.0
        self.dispatcher.combine(y_PD, weights_TK[:rows].float(), sent, out=out_TD[:rows])
        return out_TD

    def compute(
        self, module: Any, x_NH: Tensor, row_P: Tensor, slot_offsets: Tensor, team: Team | None
    ) -> Tensor:
        """Apply every slot's expert to its own rows; local.

        Args:
            module: Experts module, for gates that the kernels do not have.
            x_NH: [N, H] float32, contiguous. row_P: int64 row of each pair; pairs are ordered by group.
            slot_offsets: [G + 1] int64; the pairs of group g are [offsets[g], offsets[g + 1]). G is S, or `num_groups`.
            team: Threads to use; None for the calling thread.

        Returns:
            [P, D] float32, new.
        """
        up, down, pairs, groups = self.up, self.down, len(row_P), len(slot_offsets) - 1
        copies, adapted = groups // up.num_slots, None
        if copies > 1:
            of_groups, slot_offsets = slot_offsets, slot_offsets[::copies].contiguous()
            if int((of_groups[copies::copies] - of_groups[1::copies]).sum()):  # some pair has an adapter
                count = slot_offsets.data_ptr() + 8 * up.num_slots
                sorted_pairs = Groups(of_groups.data_ptr(), up.num_slots, copies, count)
                adapted = AdaptedPairRows(self, sorted_pairs, x_NH.data_ptr(), row_P.data_ptr())
        offsets, gathered = slot_offsets.data_ptr(), _Rows(up.format, pairs)
        num_pairs = offsets + 8 * up.num_slots  # address of their number
        given, num_given = _Rows(up.format, len(x_NH), x_NH), np.array([len(x_NH)])
        before = [
            *given.quantised(num_given.ctypes.data),
            GATHER.row(given.address, up.format.row_bytes, row_P.data_ptr(), num_pairs, gathered.address),
        ]
        up_ns, down_ns = (product_ns(pairs, each.format, each.num_slots) for each in (up, down))
        out_PD = torch.empty(pairs, down.width)
        has_gate = self.has_silu and not up.has_bias
        is_fused = has_gate and adapted is None
        raised_PI = torch.empty(pairs, up.width // 2 if is_fused else up.width)
        before.append(up.product_row(gathered.address, offsets, raised_PI.data_ptr(), is_gated=is_fused))
        if adapted is not None:
            before.append(adapted.up_row(raised_PI.data_ptr()))
        if has_gate and adapted is not None:
            both_PI, raised_PI = raised_PI, torch.empty(pairs, up.width // 2)
            before.append(adapted.silu_row(both_PI.data_ptr(), offsets, raised_PI.data_ptr()))
        if not has_gate:
            run(program_of(before), team, up_ns)
            own = module._apply_gate if module.has_gate else module.act_fn
            raised_PI = _on_full_vectors(own, up.finished(raised_PI, slot_offsets))
            before, up_ns = [], 0
        lowered = _Rows(down.format, pairs, raised_PI)
        rows = [
            *before,
            *lowered.quantised(num_pairs),
            down.product_row(lowered.address, offsets, out_PD.data_ptr()),
        ]
        if adapted is not None:
            rows.append(adapted.down_row(raised_PI.data_ptr(), raised_PI.shape[1] * 4, out_PD.data_ptr()))
        run(program_of(rows), team, up_ns + down_ns)
        answers_PD = down.finished(out_PD, slot_offsets)
        return _on_full_vectors(module.post_expert_norm, answers_PD) if self.has_norm else answers_PD

    def try_out(self, module: Any, up: PackedSlots, down: PackedSlots, x_TD: Tensor) -> Tensor:
        """Run rows through an expert that need not be in use, on one thread, while steps may run: [T, D] float32, new."""
        alone = replace(self, up=up, down=down)
        return alone.compute(
            module, x_TD.contiguous(), torch.arange(len(x_TD)), torch.tensor([0, len(x_TD)]), None
        )


class AdaptedPairRows:
    """Program rows for one layer's pairs if some have adapters. Arguments are addresses."""

    def __init__(self, layer: PackedExpertLayer, groups: Groups, x: int, row_of: int) -> None:
        """`x`: the rows [N, H] float32 that pairs take by `row_of`."""
        assert layer.adapters is not None, "the model takes no adapters"
        self._layer, self._adapters, self._groups, self._x, self._row_of = (
            layer,
            layer.adapters,
            groups,
            x,
            row_of,
        )

    def up_row(self, raised: int) -> list[int]:
        """Return the row that adds to the first product, [P, width] float32."""
        up = self._layer.up
        return adapt_pairs_row(
            self._x, up.in_dim * 4, self._row_of, up.in_dim, self._groups, self._adapters.up, raised, up.width * 4, up.out_dim
        )  # fmt: skip

    def silu_row(self, both: int, offsets: int, raised: int) -> list[int]:
        """Return the row from the first product [P, width] to the second one's input [P, width / 2]. `offsets` are of slots."""
        width = self._layer.up.width
        return SILU_ROWS.row(
            both, width * 4, width // (2 * LANES), offsets, self._groups.num_slots, raised, width * 2
        )

    def down_row(self, raised: int, stride: int, out: int) -> list[int]:
        """Return the row that adds to the second product, [P, width] float32."""
        down = self._layer.down
        return adapt_pairs_row(
            raised,
            stride,
            0,
            down.in_dim,
            self._groups,
            self._adapters.down,
            out,
            down.width * 4,
            down.out_dim,
        )


class _Rows:
    """Rows in the form a weight takes: x itself, or memory for quantised rows or for gathered ones."""

    def __init__(self, kind: Format, num_rows: int, x_TK: Tensor | None = None) -> None:
        self._kind, self._x_TK = kind, x_TK
        needs_own = x_TK is None or kind.takes_integers
        self._own = np.empty((num_rows, kind.row_bytes), np.uint8) if needs_own else None

    @property
    def address(self) -> int:
        """Address of the rows."""
        if self._own is not None:
            return int(self._own.ctypes.data)
        assert self._x_TK is not None
        return self._x_TK.data_ptr()

    def quantised(self, rows_at: int) -> list[list[int]]:
        """Return the program row that quantises, if one is needed. `rows_at` is the address of the number of rows."""
        kind, x_TK = self._kind, self._x_TK
        if x_TK is None or not kind.takes_integers:
            return []
        return [QUANTISE.row(x_TK.data_ptr(), x_TK.shape[1] * 4, kind.k, self.address, rows_at)]


def _on_full_vectors(function: Callable[[Tensor], Tensor], x_PN: Tensor) -> Tensor:
    """Apply an elementwise function to rows padded to full vectors, to avoid a scalar tail (see `Step.fill`)."""
    missing = -len(x_PN) % ROW_MULTIPLE
    padded = torch.cat((x_PN, x_PN.new_zeros(missing, x_PN.shape[1]))) if missing else x_PN
    return function(padded)[: len(x_PN)].contiguous()


def register() -> None:
    """Register the organ with `transformers` under `NAME`; may be called again."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, serve_experts)
