"""LoRA adapters of `kv_b_proj` on GPUs, which attention absorbs or expands (`attention.gpu.organ`).

Each half of the low-rank product acts where its half of the weight acts, as on CPUs (`attention.cpu.adapted_latents`): the key half
adds `(q @ B_key) @ A` to a head's query in latent space, and the value half adds `(mean @ A) @ B_value` to its output. Latents that
are expanded for prompts get `(latent @ A) @ B` of their sequence's adapter. All three read the same two matrices.

Legend: R rows of the step, H query heads, U unrotated dims of the key, V value dim, L latent dim, M members (head, row), X blocks,
B tokens of a block, Y = U + V.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.cpu.adapted_latents import ENTRY_WORDS
from kvcache.gpu.step import DeviceStep, Expansion
from moe.gpu.lora.low_rank import DeviceFactorTable, FactorView, RowGroups, add_low_rank, group_rows
from moe.lora.tables import Factors

_NUMBER_BYTES = 4  # float32


class _Members(NamedTuple):
    """A head of a row is a member: those of the first head come first."""

    groups: RowGroups  # by place and head: place * H + head
    row_M: Tensor  # row * H + head


class AbsorbedAdapters:
    """The adapters of one module; an `attention.gpu.organ.LatentAdapters`."""

    def __init__(self, step: DeviceStep, *, heads: int, unrotated_dim: int, value_dim: int) -> None:
        self._step, self._heads, self._unrotated = step, heads, unrotated_dim
        self._of_head = unrotated_dim + value_dim
        self._whole = DeviceFactorTable(step.num_adapters, step.device, step)
        self._keys, self._values = (
            DeviceFactorTable(step.num_adapters * heads, step.device, step) for _ in range(2)
        )

    def put(self, place: int, factors: Factors | None) -> None:
        """Set what the adapter at a place adds to `kv_b_proj`, or clear it. While no step runs."""
        self._whole.put(place, factors)
        a_at, b_at, rank, kind = self._whole.words[place].tolist()
        begin_H = np.arange(self._heads) * self._of_head if rank else 0
        entries = slice(place * self._heads, (place + 1) * self._heads)
        for table, first, second in (
            (self._keys, b_at + _NUMBER_BYTES * begin_H, a_at),
            (self._values, a_at, b_at + _NUMBER_BYTES * (begin_H + self._unrotated) if rank else 0),
        ):
            words = np.zeros((self._heads, ENTRY_WORDS), np.int64)
            for column, value in enumerate((first, second, rank, kind)):
                words[:, column] = value
            table.put_words(entries, words)

    @property
    def is_used(self) -> bool:
        """Whether rows of the step may have an adapter on this module."""
        return self._step.adapts_rows and not self._whole.is_idle

    def add_to_queries(self, query_RHD: Tensor, out_HRL: Tensor, first: int) -> None:
        members = self._members(first, len(query_RHD))
        x_MD = query_RHD.reshape(-1, query_RHD.shape[2])
        layout = FactorView(self._heads * self._of_head, is_swapped=True)
        add_low_rank(
            x_MD[:, : self._unrotated], out_HRL.flatten(0, 1), members.groups, self._keys, row_M=members.row_M, layout=layout
        )  # fmt: skip

    def add_to_values(self, mean_RHL: Tensor, out_HRV: Tensor, first: int) -> None:
        members = self._members(first, len(mean_RHL))
        layout = FactorView(self._heads * self._of_head)
        add_low_rank(
            mean_RHL.reshape(-1, mean_RHL.shape[2]), out_HRV.flatten(0, 1), members.groups, self._values, row_M=members.row_M,
            layout=layout,
        )  # fmt: skip

    def add_to_expanded(
        self, latent_XBL: Tensor, out_XBY: Tensor, blocks: Expansion, first_head: int
    ) -> None:
        groups = self._block_groups(blocks, latent_XBL.shape[1])
        layout = FactorView(self._heads * self._of_head, first_head * self._of_head)
        x_ML = latent_XBL.flatten(0, 1)
        add_low_rank(x_ML, out_XBY.flatten(0, 1), groups, self._whole, layout=layout)

    def sizes(self, latent_dim: int) -> set[tuple[int, int, FactorView]]:
        """Return the inputs, outputs and layouts of the products, for `low_rank.launch_without_rows`."""
        width, value_dim = self._heads * self._of_head, self._of_head - self._unrotated
        return {
            (self._unrotated, latent_dim, FactorView(width, is_swapped=True)),
            (latent_dim, value_dim, FactorView(width)),
            (latent_dim, width, FactorView(width)),
        }

    def _members(self, first: int, rows: int) -> _Members:
        key, H = ("heads by adapter", first, rows, self._heads), self._heads
        if key not in self._step.derived:
            place_R = self._step.adapters_on_device()[first : first + rows]
            head_H1 = torch.arange(H, device=place_R.device)[:, None]
            group_HR = torch.where(place_R >= 0, place_R * H + head_H1, -1)
            row_HR = torch.arange(rows, device=place_R.device) * H + head_H1
            groups = group_rows(group_HR.flatten(), self._step.num_adapters * H)
            self._step.derived[key] = _Members(groups, row_HR.flatten())
        members: _Members = self._step.derived[key]
        return members

    def _block_groups(self, blocks: Expansion, block_tokens: int) -> RowGroups:
        key = "blocks by adapter", blocks.sequences
        if key not in self._step.derived:
            place_X = self._step.adapters_of_blocks(blocks)
            place_M = place_X[:, None].expand(-1, block_tokens).flatten()
            self._step.derived[key] = group_rows(place_M, self._step.num_adapters)
        groups: RowGroups = self._step.derived[key]
        return groups
