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

from dispatch.compiled.team import Team, program_of, run
from dispatch.dispatched import TokenDispatcher
from dispatch.mode import Mode
from kvcache.step import ROW_MULTIPLE, Step
from moe.backend import serve_experts
from moe.cpu.kernels.panels import Format
from moe.cpu.kernels.products import GATHER, QUANTISE, product_ns
from moe.cpu.weights.slots import PackedSlots
from moe.expert_weights import grown_sample
from moe.load_counts import LayerCounts
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
        sent = self.dispatcher.dispatch(hidden_TD[:rows].contiguous(), slots_TK, Mode(step.agreed_tokens))
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
            x_NH: [N, H] float32, contiguous. row_P: int64 row of each pair; pairs are ordered by slot.
            slot_offsets: [S + 1] int64; the pairs of slot s are [offsets[s], offsets[s + 1]).
            team: Threads to use; None for the calling thread.

        Returns:
            [P, D] float32, new.
        """
        up, down, pairs = self.up, self.down, len(row_P)
        offsets, gathered = slot_offsets.data_ptr(), _Rows(up.format, pairs)
        num_pairs = offsets + 8 * up.num_slots  # address of their number
        given, num_given = _Rows(up.format, len(x_NH), x_NH), np.array([len(x_NH)])
        before = [
            *given.quantised(num_given.ctypes.data),
            GATHER.row(given.address, up.format.row_bytes, row_P.data_ptr(), num_pairs, gathered.address),
        ]
        up_ns, down_ns = (product_ns(pairs, each.format, each.num_slots) for each in (up, down))
        out_PD = torch.empty(pairs, down.width)
        is_fused = self.has_silu and not up.has_bias
        raised_PI = torch.empty(pairs, up.width // 2 if is_fused else up.width)
        before.append(up.product_row(gathered.address, offsets, raised_PI.data_ptr(), is_gated=is_fused))
        if not is_fused:
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
        run(program_of(rows), team, up_ns + down_ns)
        answers_PD = down.finished(out_PD, slot_offsets)
        return _on_full_vectors(module.post_expert_norm, answers_PD) if self.has_norm else answers_PD

    def try_out(self, module: Any, up: PackedSlots, down: PackedSlots, x_TD: Tensor) -> Tensor:
        """Run rows through an expert that need not be in use, on one thread, while steps may run: [T, D] float32, new."""
        alone = replace(self, up=up, down=down)
        return alone.compute(
            module, x_TD.contiguous(), torch.arange(len(x_TD)), torch.tensor([0, len(x_TD)]), None
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
