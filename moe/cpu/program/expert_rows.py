"""Program rows for a rank's experts: received rows, sorted by slot, then up and down products.

Legend: N rows, P pairs (row, choice), S slots, G groups of pairs, D hidden dim, I intermediate dim.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe.cpu.experts import AdaptedPairRows, PackedExpertLayer
from moe.cpu.kernels.local_experts import CLOCK
from moe.cpu.kernels.low_rank import SPLIT, Groups
from moe.cpu.kernels.products import GATHER
from moe.cpu.program.activations import Activations, Rows


class RoutedRows(NamedTuple):
    """Input of the experts, as addresses except for x_ND."""

    x_ND: Tensor  # float32, the most rows that may arrive
    num_rows: int  # address of their number
    row_of: int  # address of [P] int64: the row of each pair, sorted by slot
    offsets: int  # address of [G + 1] int64: the pairs of group g are [offsets[g], offsets[g + 1])
    num_pairs: int  # most pairs that may arrive
    num_groups: int  # G: the slots S, or `PackedExpertLayer.num_groups`


class ExpertsClock:
    """Measures the time of a layer's experts in programs."""

    def __init__(self) -> None:
        self._ns, self._scratch = np.zeros(1, np.int64), np.zeros(2, np.int64)

    def around(self, rows: Rows) -> Rows:
        """Return these rows between two rows that measure their time."""
        total, scratch = self._ns.ctypes.data, self._scratch.ctypes.data
        return [CLOCK.row(total, -1, scratch), *rows, CLOCK.row(total, 1, scratch)]

    def note(self, layer: PackedExpertLayer) -> None:
        """Add the measured time to the layer's counts, and reset it."""
        if self._ns[0]:
            if layer.counts is not None:
                layer.counts.experts_ns += int(self._ns[0])
            self._ns[0] = 0


def expert_rows(
    layer: PackedExpertLayer, asked: RoutedRows, activations: Activations, clock: ExpertsClock
) -> tuple[Rows, Tensor]:
    """Return rows that run every slot's expert on its pairs, and the memory of the results: [P, D] float32."""
    up, down, pairs = layer.up, layer.down, asked.num_pairs
    gathered = activations.room("gathered", up.format.row_bytes, torch.uint8, rows=pairs).data_ptr()
    raised_PI = activations.room("raised", down.in_dim, rows=pairs)
    answers_PD = activations.room("answers", down.width, rows=pairs)
    copies, num_slots = asked.num_groups // up.num_slots, up.num_slots
    every = fused = plain = asked.offsets
    splitting: Rows = []
    if copies > 1:
        every, fused, plain = (
            activations.room(f"{name} offsets", num_slots + 1, torch.int64, rows=1).data_ptr()
            for name in ("slot", "fused", "plain")
        )
        splitting = [SPLIT.row(asked.offsets, num_slots, copies, every, fused, plain)]
    num_pairs = every + 8 * num_slots  # address of their number
    quantised, given = activations.taken(up.format, asked.x_ND, asked.num_rows)
    lowered, taken = activations.taken(down.format, raised_PI, num_pairs)
    raised, answers = raised_PI.data_ptr(), answers_PD.data_ptr()
    raising = [up.product_row(gathered, fused, raised, is_gated=True)]
    adding: Rows = []
    if copies > 1:
        groups = Groups(asked.offsets, num_slots, copies, plain + 8 * num_slots)
        adapted = AdaptedPairRows(layer, groups, asked.x_ND.data_ptr(), asked.row_of)
        both = activations.room("both", up.width, rows=pairs).data_ptr()
        raising += [
            up.product_row(gathered, plain, both),
            adapted.up_row(both),
            adapted.silu_row(both, plain, raised),
        ]
        adding = [adapted.down_row(raised, down.in_dim * 4, answers)]
    rows = [
        *splitting,
        *quantised,
        GATHER.row(given, up.format.row_bytes, asked.row_of, num_pairs, gathered),
        *raising,
        *lowered,
        down.product_row(taken, every, answers),
        *adding,
    ]
    return clock.around(rows), answers_PD
