"""One step's packed batch for attention and recurrences: each token's place in the KV cache, and who attends to what.

The tensors are allocated once and refilled in place, so that a captured graph can be replayed. Knows
blocks and positions, not requests.

Legend: T tokens of the packed batch, S sequences in it, M blocks that a sequence may have, P pieces between states.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcache.images import PlacedRows
from kvcache.states import NO_STATE, StatePiece

# Batches are padded to this many rows: two of PyTorch's float32 vectors, which its loops process at once; see
# `Step.fill`. AVX-512 has vectors of 16, every other instruction set of 8 or fewer.
ROW_MULTIPLE = 32 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 16


class Span(NamedTuple):
    """One sequence's part of a step: its tokens [start, start + length), on these blocks."""

    start: int
    length: int
    # Covers positions [0, start + length). While it is the same object, it only grows.
    block_ids: Sequence[int]
    pieces: Sequence[StatePiece] = ()  # in order, `length` tokens in total; empty: the model has no states
    is_long: bool = False  # the model computes the sequence in its way for long ones (`moe.long_rotary`)
    adapter: int = -1  # place of its LoRA adapter (`moe.lora.tables`); -1: none
    # [3, length] int64: positions in time, height and width. None: they count the tokens.
    axes: np.ndarray | None = None
    images: Sequence[PlacedRows] = ()  # their places count from the span's first token


class Inputs(NamedTuple):
    """Inputs of a model's forward in addition to the step, on the model's device."""

    token_T: Tensor  # int64, padding included
    row_R: Tensor  # int64, rows for which logits are needed


class Drawn(NamedTuple):
    """Tokens of a step that an earlier step samples, so that only the device knows them yet."""

    token_R: Tensor  # int64, the earlier step's samples, on the model's device
    rows: Sequence[int]  # rows of the step that run them
    sources: Sequence[int]  # their places in token_R


class Step:
    """The packed batch of one step. Rows after `num_tokens` are padding: not cached, attended to or sampled."""

    def __init__(
        self, *, max_tokens: int, max_sequences: int, max_blocks: int, block_tokens: int, team: Any = None
    ) -> None:
        """Allocate for these limits of tokens, sequences, and blocks per sequence.

        `team`: a `dispatch.compiled.team.Team` with threads for the CPU kernels of this step; None uses the caller's thread.
        """
        padded = -(-max(max_tokens, 1) // ROW_MULTIPLE) * ROW_MULTIPLE
        self.block_tokens, self.max_tokens = block_tokens, max_tokens
        self.team = team
        self.num_tokens = 0
        self.num_decodes = 0  # generated tokens, drafts included: the first rows
        self.num_padded = 0
        self.num_sequences = 0
        self.images: list[PlacedRows] = []  # rows of images, at the rows of the batch that they replace
        # By row of an image: the image's end in the sequence. 0 for other rows. For layers in which images attend both ways.
        self.image_end_T = torch.zeros(padded, dtype=torch.int64)
        self.takes_axes = False  # whether the model takes positions on each axis; set when it is built
        self.has_axes = False  # whether any row's positions differ between axes: `axes_4T` has them
        self.has_long = False  # whether any row's sequence is long: `long_T` has them
        self.tells_long = False  # whether the model uses `long_T`; set when it is built
        self.long_T = torch.zeros(padded, dtype=torch.bool)
        # Places of LoRA adapters, and their largest rank; set before the model is built.
        self.num_adapters = self.max_adapter_rank = 0
        # Whether any row has an adapter. `adapter_T` has their places, -1 for rows without one.
        self.has_adapters = False
        self.adapter_T = torch.full((padded,), -1, dtype=torch.int64)
        # Whether any place has an adapter. Then rows of other ranks may use it.
        self.has_placed = False
        # Rows that the output projection gets; set before a forward.
        self.projected_R: torch.Tensor | None = None
        self.has_states = False  # whether the model keeps states; set with its cache
        self.agreed_tokens = 0  # most tokens of any rank in this step, as agreed before it; 0: no agreement
        self.position_T = torch.zeros(padded, dtype=torch.int64)
        self.axes_4T = torch.zeros(4, padded, dtype=torch.int64)  # in tokens, time, height and width
        self.cache_slot_T = torch.zeros(padded, dtype=torch.int64)  # block * block_tokens + offset
        self.query_start_S = torch.zeros(max_sequences + 1, dtype=torch.int64)  # rows [s] to [s + 1] are s's
        self.context_S = torch.zeros(max_sequences, dtype=torch.int64)  # a sequence's tokens after this step
        self.block_table_SM = torch.zeros(max_sequences, max_blocks, dtype=torch.int64)
        # Arrays over the same memory.
        self._position, self._cache_slot = self.position_T.numpy(), self.cache_slot_T.numpy()
        self._query_start, self._context = self.query_start_S.numpy(), self.context_S.numpy()
        self._table = self.block_table_SM.numpy()
        # By row: blocks, and how many of them are written.
        self._written: list[tuple[Sequence[int], int]] = [((), 0)] * max_sequences
        self.token_T = torch.zeros(padded, dtype=torch.int64)
        # What compiled programs read: 0, num_tokens, num_padded, num_decodes, num_sequences.
        self.facts = torch.zeros(5, dtype=torch.int64)
        self._facts = self.facts.numpy()
        # What recurrences read: slots and tokens of every piece (`StatePiece`), and each sequence's first piece.
        most_pieces = max_sequences + padded + 1  # each draft is a piece of one token
        self.piece_P3 = torch.zeros(most_pieces, 3, dtype=torch.int64)
        self.piece_start_S = torch.zeros(max_sequences + 1, dtype=torch.int64)
        self._tiles: dict[int, np.ndarray] = {}
        self._chunks: dict[tuple[int, int], np.ndarray] = {}
        self.num_pairs = 0  # most (query token, visible token) pairs; attention's work is proportional to it

    def fill(self, spans: Sequence[Span], num_decodes: int = 0, *, agreed_tokens: int = 0) -> None:
        """Describe a batch. Sequences keep their order, and their rows are consecutive.

        The first `num_decodes` tokens are decodes: a sequence's newest token and its drafts. `agreed_tokens`: the
        attribute. The rows are padded to a multiple of `ROW_MULTIPLE` above 0, because no model family accepts zero
        rows. PyTorch's vectorised loops end in a scalar tail with an exp() that differs in the last bit. With pairs of
        full vectors, for any number of columns (a shared expert's gate has one), a row's bits do not depend on the number
        of rows.
        """
        count = len(spans)
        starts = np.array([span.start for span in spans], dtype=np.int64)
        lengths = np.array([span.length for span in spans], dtype=np.int64)
        for row, span in enumerate(spans):
            blocks, written = self._written[row]
            if blocks is not span.block_ids:
                blocks, written = span.block_ids, 0
            if len(blocks) > written:
                self._write_blocks(row, written, blocks[written:])
                self._written[row] = blocks, len(blocks)
        self._query_start[0] = 0
        np.cumsum(lengths, out=self._query_start[1 : count + 1])
        np.add(starts, lengths, out=self._context[:count])
        tokens = int(self._query_start[count])
        sequence_T = np.repeat(np.arange(count), lengths)
        position_T = np.arange(tokens) + np.repeat(starts - self._query_start[:count], lengths)
        block_T = self._table[sequence_T, position_T // self.block_tokens]
        self._cache_slot[:tokens] = block_T * self.block_tokens + position_T % self.block_tokens
        self.num_sequences, self.num_tokens, self.num_decodes = count, tokens, num_decodes
        self.agreed_tokens = agreed_tokens
        self.num_pairs = int(lengths @ self._context[:count])
        self.num_padded = self._padded(tokens)
        self._facts[1:] = tokens, self.num_padded, num_decodes, count
        if self.has_states:
            self._fill_pieces(spans)
        self.has_long = any(span.is_long for span in spans)
        if self.has_long:
            self.long_T.fill_(False)
            self.long_T.numpy()[:tokens] = np.repeat([span.is_long for span in spans], lengths)
        if self.num_adapters:
            self._fill_adapters(spans, lengths, tokens)
        self._position[:tokens] = position_T
        self._position[tokens : self.num_padded] = 0
        self._fill_images(spans)
        self._tiles.clear()
        for (tile_tokens, at_once), table in self._chunks.items():
            self._write_chunks(tile_tokens, at_once, table)

    def _fill_adapters(self, spans: Sequence[Span], lengths: np.ndarray, tokens: int) -> None:
        places = [span.adapter for span in spans]
        self.has_adapters = max(places, default=-1) >= 0
        adapter_T = self.adapter_T.numpy()
        adapter_T.fill(-1)
        adapter_T[:tokens] = np.repeat(np.array(places, dtype=np.int64), lengths)

    def _fill_images(self, spans: Sequence[Span]) -> None:
        """Place the rows of images, and fill the positions on each axis if they differ."""
        if self.images:
            self.image_end_T.zero_()
        self.images.clear()
        self.has_axes = False
        if not any(span.images or span.axes is not None for span in spans):
            return
        self.has_axes = any(span.axes is not None for span in spans)
        axes_4T = self.axes_4T.numpy()[:, : self.num_padded]
        axes_4T[:] = self._position[: self.num_padded]
        for span, first in zip(spans, self._query_start.tolist(), strict=False):
            if span.axes is not None:
                axes_4T[1:, first : first + span.length] = span.axes
            for placed in span.images:
                begin, length = first + placed.place, placed.rows.shape[1]
                self.images.append(PlacedRows(begin, placed.rows))
                self.image_end_T[begin : begin + length] = span.start + placed.place + length

    def _fill_pieces(self, spans: Sequence[Span]) -> None:
        if not any(span.pieces for span in spans):
            spans = [span._replace(pieces=(StatePiece(NO_STATE, NO_STATE, span.length),)) for span in spans]
        pieces = [piece for span in spans for piece in span.pieces]
        self.piece_P3.numpy()[: len(pieces)] = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        np.cumsum([len(span.pieces) for span in spans], out=self.piece_start_S.numpy()[1 : len(spans) + 1])

    def _write_blocks(self, row: int, begin: int, block_ids: Sequence[int]) -> None:
        """Write the new part of a sequence's table."""
        self._table[row, begin : begin + len(block_ids)] = block_ids

    def inputs(self, token_ids: Sequence[int], rows: Sequence[int], drawn: Drawn | None = None) -> Inputs:
        """Set the tokens of the filled batch. Returns the inputs of a model's forward.

        Args:
            token_ids: Tokens of the step's rows, in order; any for the rows in `drawn`.
            rows: Rows for which logits are needed.
            drawn: Tokens that are still unknown to the host.
        """
        self.token_T[: self.num_tokens] = torch.tensor(token_ids, dtype=torch.int64)
        if drawn is not None:
            self.token_T[list(drawn.rows)] = drawn.token_R[list(drawn.sources)]
        self.token_T[self.num_tokens : self.num_padded] = 0
        return Inputs(self.token_T[: self.num_padded], torch.tensor(rows, dtype=torch.int64))

    def _padded(self, num_tokens: int) -> int:
        """Return the number of rows to which a batch is padded."""
        return max(ROW_MULTIPLE, -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE)

    def tiles(self, tile_tokens: int) -> np.ndarray:
        """Cut every sequence's rows into tiles of at most `tile_tokens` query tokens.

        Returns:
            [tiles, 3] int64: sequence, first query token within its rows, number of query tokens. Kept until the next fill.
        """
        if tile_tokens not in self._tiles:
            starts = self.query_start_S[: self.num_sequences + 1].tolist()
            rows = [
                (sequence, first, min(tile_tokens, end - begin - first))
                for sequence, (begin, end) in enumerate(pairwise(starts))
                for first in range(0, end - begin, tile_tokens)
            ]
            self._tiles[tile_tokens] = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return self._tiles[tile_tokens]

    def chunks(self, tile_tokens: int, at_once: int) -> np.ndarray:
        """Return the places of every step's tiles, in chunks of `at_once`, for programs that are built only once.

        Returns:
            [chunks, 4] int64, in the same memory at every step: address of a chunk's first tile, number of tiles, row of
            the first query token, number of rows. Chunks after the step's last tile have none.
        """
        table = self._chunks.get((tile_tokens, at_once))
        if table is None:
            most = self.max_tokens // tile_tokens + len(self.context_S)
            table = self._chunks[tile_tokens, at_once] = np.zeros((-(-most // at_once), 4), np.int64)
            self._write_chunks(tile_tokens, at_once, table)
        return table

    def _write_chunks(self, tile_tokens: int, at_once: int, table: np.ndarray) -> None:
        tiles = self.tiles(tile_tokens)
        table[:] = 0
        for chunk, begin in enumerate(range(0, len(tiles), at_once)):
            here = tiles[begin : begin + at_once]
            first_row = self._query_start[here[0, 0]] + here[0, 1]
            table[chunk] = here.ctypes.data, len(here), first_row, here[:, 2].sum()

    def long_rows(self, rows: int) -> Tensor | None:
        """Return which of the first `rows` rows belong to long sequences: [rows] bool. None if no row does."""
        return self.long_T[:rows] if self.has_long else None

    @property
    def model_positions(self) -> Tensor:
        """Positions for a model's forward: [1, num_padded], or [4, 1, num_padded] if they differ between axes; a view."""
        return self.axes_4T[:, None, : self.num_padded] if self.has_axes else self.positions[None]

    @property
    def positions(self) -> Tensor:
        """Positions of all rows, padding included: [num_padded] int64, a view."""
        return self.position_T[: self.num_padded]
