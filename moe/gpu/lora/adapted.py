"""Which rows of a step have which adapter, and what adapters add to embeddings and experts on a GPU.

The rows of a step without an adapter keep their bits: experts compute all pairs as without adapters, and
those with an adapter once more, with the gate after the adapter's product. This costs a first product in such steps only.

Legend: T rows, padding included, D hidden dim, P pairs (row, choice), S slots, N features of gate and up, I intermediate dim.
"""

from typing import Any

import torch
from torch import Tensor

from kvcache.gpu.step import DeviceStep
from moe.adopt import gates
from moe.adopt.gates import Gate, arranged
from moe.gpu.lora.low_rank import DeviceFactorTable, RowGroups, add_looked_up, add_low_rank, group_rows
from moe.lora.tables import ExpertAdapters, Factors

_ROWS = "rows by adapter"  # derived from the step


class AdaptedRows:
    """The rows of a step by adapter, shared by the weights of a model."""

    def __init__(self, step: DeviceStep) -> None:
        self.step, self.num_places = step, step.num_adapters

    def table(self) -> DeviceFactorTable:
        """Return a new table with an entry for each place."""
        return DeviceFactorTable(self.num_places, self.step.device, self.step)

    def are_known(self, count: int, dim: int, *, is_head: bool) -> bool:
        """Return whether `count` rows of a tensor with `dim` dimensions are the step's, or those that the output projection gets."""
        return self._are_projected(count, is_head) or (count == self.step.num_padded and dim <= 3)

    def _are_projected(self, count: int, is_head: bool) -> bool:
        projected_R = self.step.projected_R
        return is_head and projected_R is not None and len(projected_R) == count

    def groups(self, count: int, *, is_head: bool) -> RowGroups:
        """Return the rows by place."""
        place_T = self.step.adapters_on_device()
        if self._are_projected(count, is_head):
            return group_rows(place_T[self.step.projected_R], self.num_places)
        derived = self.step.derived
        if _ROWS not in derived:
            derived[_ROWS] = group_rows(place_T, self.num_places)
        groups: RowGroups = derived[_ROWS]
        return groups

    def add(self, x: Tensor, out_TN: Tensor, table: DeviceFactorTable, *, is_head: bool) -> None:
        """Add what the rows' adapters give to a product of x [..., K], in place, and note that the product has such rows."""
        x_TK = x.reshape(-1, x.shape[-1]).contiguous()
        is_known = self.are_known(len(x_TK), x.dim(), is_head=is_head)
        table.has_rows = table.has_rows or is_known
        if not self.step.adapts_rows or table.is_idle:
            return
        assert is_known or table.is_empty, f"a weight with {x.shape[-1]} inputs takes no adapters and has one"
        if is_known:
            add_low_rank(x_TK, out_TN, self.groups(len(x_TK), is_head=is_head), table)

    def add_embedded(self, ids_T: Tensor, out_TD: Tensor, table: DeviceFactorTable) -> None:
        """Add what the rows' adapters give to an embedding's rows, in place: a row of A for each id, times B."""
        if not self.step.adapts_rows or table.is_idle or len(ids_T) != self.step.num_padded:
            return
        groups, place_T = self.groups(len(ids_T), is_head=False), self.step.adapters_on_device()
        add_looked_up(ids_T, place_T, out_TD, groups, table)


class DeviceExpertAdapters(ExpertAdapters):
    """The factors of a layer's experts on a device, with B's columns in the order of the kernels."""

    up: DeviceFactorTable
    down: DeviceFactorTable

    def __init__(self, num_slots: int, gate: Gate, step: DeviceStep) -> None:
        self.gate, self.step = gate, step
        super().__init__(step.num_adapters, num_slots)

    def _open(self, num_slots: int) -> None:
        self.num_slots = num_slots
        entries = self.num_places * num_slots
        # An adapter may have gate and up apart.
        self.up = DeviceFactorTable(entries, self.step.device, self.step, parts=2)
        self.down = DeviceFactorTable(entries, self.step.device, self.step)

    def put(self, place: int, slot: int, up: Factors | None, down: Factors | None) -> None:
        if up is not None:
            up = up._replace(b_RN=arranged(up.b_RN.t(), self.gate).t().contiguous())
        super().put(place, slot, up, down)

    def pairs(self, row_P: Tensor, slot_offsets: Tensor, place_N: Tensor) -> "AdaptedPairs | None":
        """Return the pairs with an adapter, or None if the step or the layer has none.

        Args:
            row_P, slot_offsets: As in `Dispatched`.
            place_N: Places of the received rows, -1 for rows without an adapter.
        """
        if not self.step.runs_adapters or (self.up.is_idle and self.down.is_idle):
            return None
        return AdaptedPairs(self, row_P, slot_offsets, place_N)


class AdaptedPairs:
    """The pairs of a layer by slot and adapter.

    Attributes:
        slot_offsets: Those of the dispatch, or zeros if no pair has an adapter, so that a product with them computes nothing.
    """

    def __init__(
        self, adapters: DeviceExpertAdapters, row_P: Tensor, slot_offsets: Tensor, place_N: Tensor
    ) -> None:
        self._adapters, num_slots = adapters, adapters.num_slots
        pair_P = torch.arange(len(row_P), device=row_P.device)
        slot_P = torch.searchsorted(slot_offsets, pair_P, right=True) - 1
        is_pair_P = pair_P < slot_offsets[-1]  # the rows of others are undefined
        self._row_P = torch.where(is_pair_P, row_P, 0)
        place_P = torch.where(is_pair_P, place_N[self._row_P], -1)
        self._is_adapted_P = place_P >= 0
        self.slot_offsets = slot_offsets * self._is_adapted_P.any()
        group_P = torch.where(self._is_adapted_P, place_P * num_slots + slot_P, -1)
        self._groups = group_rows(group_P, adapters.num_places * num_slots)

    def lowered(self, module: Any, x_TD: Tensor, raised_PN: Tensor, lowered_PI: Tensor | None) -> Tensor:
        """Return the inputs of the second product: with adapters for the pairs that have one.

        Args:
            raised_PN: The first product without gate; overwritten.
            lowered_PI: The inputs without adapters. None if the kernels do not have the gate.
        """
        gate, table = self._adapters.gate, self._adapters.up
        if lowered_PI is None:
            add_low_rank(x_TD, raised_PN, self._groups, table, row_M=self._row_P)
            return gates.apply(module, raised_PN)
        wide_PN = raised_PN.float()
        add_low_rank(x_TD, wide_PN, self._groups, table, row_M=self._row_P)
        gated_PI = gates.KNOWN[gate.name](*wide_PN.chunk(2, dim=-1)).to(lowered_PI.dtype)
        return torch.where(self._is_adapted_P[:, None], gated_PI, lowered_PI)

    def add_down(self, lowered_PI: Tensor, answers_PD: Tensor) -> None:
        """Add to the second product, in place."""
        add_low_rank(lowered_PI, answers_PD, self._groups, self._adapters.down)
