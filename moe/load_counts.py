"""Load of the experts, counted during each step: tokens per expert and per rank, by phase and layer.

One rank counts the choices of its own tokens; readers add up the ranks. A count is one pass over
the layer's ids (a microsecond) into one table, allocated once, so a snapshot is one copy. Counters only
grow: readers use differences, so a lost report does no harm.

Idea: SGLang's `stat` recorder. Rejected from it: one row per forward pass (memory grows with time), and an
all-reduce per pass.

Legend: L layers, E experts, R ranks, T tokens, K choices.
"""

import numpy as np
from torch import Tensor

from dispatch.compiled.native import compile_all, compiled, words

PREFILL, DECODE = 0, 1  # rows of a layer's table
NUM_PHASES = 2


@compiled
def count(
    ids: int, slots: int, num_pairs: int, num_decode_pairs: int, E: int, R: int, slots_per_rank: int, row: int
) -> None:
    """Add one layer's pairs; the first ones are decodes. `row` is the address of [2, E + R] int64."""
    experts, homes, table = words(ids, num_pairs), words(slots, num_pairs), words(row, 2 * (E + R))
    for pair in range(num_pairs):
        at = E + R if pair < num_decode_pairs else 0
        if homes[pair] >= 0:
            table[at + experts[pair]] += 1
            table[at + E + homes[pair] // slots_per_rank] += 1


class LayerCounts:
    """One layer's part of `LoadCounts`, and the time spent in its experts."""

    def __init__(self, table: np.ndarray, num_experts: int, slots_per_rank: int) -> None:
        self._table, self._num_experts, self._slots_per_rank = table, num_experts, slots_per_rank
        self._num_ranks = table.shape[1] - num_experts
        self.address: int = table.ctypes.data  # of the table, for compiled code that counts itself
        self.experts_ns = 0

    def add(self, ids_TK: Tensor, slots_TK: Tensor, num_decodes: int) -> None:
        """Count one step's choices.

        Args:
            ids_TK: int64 logical experts of real rows, without padding; the first `num_decodes` rows are decodes.
            slots_TK: int64 physical slots chosen for them; -1 is not counted.
        """
        ids_TK, slots_TK = ids_TK.contiguous(), slots_TK.contiguous()
        num_choices = ids_TK.shape[1]
        count(
            ids_TK.data_ptr(), slots_TK.data_ptr(), ids_TK.numel(), num_decodes * num_choices,
            self._num_experts, self._num_ranks, self._slots_per_rank, self.address,
        )  # fmt: skip

    @property
    def expert_E(self) -> np.ndarray:
        """Tokens of each expert so far, both phases: [E] int64."""
        result: np.ndarray = self._table[:, : self._num_experts].sum(axis=0)
        return result


class LoadCounts:
    """One rank's counters of all MoE layers.

    Attributes:
        table: [L, 2, E + R] int64: by layer and phase, choices of each expert, then choices sent to each rank.
    """

    def __init__(self, num_layers: int, *, num_experts: int, num_ranks: int, slots_per_rank: int) -> None:
        compile_all(count)
        self.table = np.zeros((num_layers, NUM_PHASES, num_experts + num_ranks), dtype=np.int64)
        self.layers = [LayerCounts(rows, num_experts, slots_per_rank) for rows in self.table]

    @property
    def experts_s(self) -> float:
        """Seconds that this rank's experts have computed, all layers together."""
        return sum(layer.experts_ns for layer in self.layers) * 1e-9

    def clear(self) -> None:
        """Reset all counters, before the first step."""
        self.table[:] = 0
