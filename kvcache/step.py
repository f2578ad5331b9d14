"""One step's packed batch, as the organs see it: which token goes where in the KV cache, and who attends to what.

The tensors are allocated once and refilled in place (D1 of the design), so that a captured graph can be replayed.
It knows blocks and positions, not requests.

Legend: T tokens of the packed batch, S sequences in it, M blocks a sequence may have, P pieces between states.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcache.states import NO_STATE, StatePiece

# Batches are padded to this many rows: two of PyTorch's vectors of float32, which its loops take at a time; see
# `Step.fill`. AVX-512 has vectors of 16, every other instruction set of 8 or fewer.
ROW_MULTIPLE = 32 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 16


class Span(NamedTuple):
    """One sequence's part of a step: tokens [start, start + length) of it, on these blocks."""

    start: int
    length: int
    block_ids: Sequence[
        int
    ]  # covering positions [0, start + length); while it is the same object it only grows
    pieces: Sequence[StatePiece] = ()  # in order, `length` tokens together; empty: the model keeps no states
    is_long: bool = False  # the model computes the sequence as it does long ones (`moe.long_rotary`)


class Inputs(NamedTuple):
    """What a model's forward is given beside the step, on the model's device."""

    token_T: Tensor  # int64, padding included
    row_R: Tensor  # int64, rows whose logits are wanted


class Step:
    """The packed batch of one step. Rows past `num_tokens` are padding: not cached, attended to or sampled."""

    def __init__(
        self, *, max_tokens: int, max_sequences: int, max_blocks: int, block_tokens: int, team: Any = None
    ) -> None:
        """Allocate for at most so many tokens, sequences, and blocks per sequence.

        `team`: a `dispatch.team.Team`, whose threads the CPU kernels that run this step may use; None: the caller's alone.
        """
        padded = -(-max(max_tokens, 1) // ROW_MULTIPLE) * ROW_MULTIPLE
        self.block_tokens, self.max_tokens = block_tokens, max_tokens
        self.team = team
        self.num_tokens = 0
        self.num_decodes = 0  # tokens of those that are generated, drafts among them: the first rows
        self.num_padded = 0
        self.num_sequences = 0
        self.has_long = False  # whether a row's sequence is long: `long_T` says which
        self.tells_long = False  # whether the model looks at that: set when it is built
        self.long_T = torch.zeros(padded, dtype=torch.bool)
        self.has_states = False  # whether the model keeps states: set with its cache
        self.agreed_tokens = (
            0  # no rank has more tokens in this step, as all agreed before it; 0: nothing was agreed
        )
        self.position_T = torch.zeros(padded, dtype=torch.int64)
        self.cache_slot_T = torch.zeros(padded, dtype=torch.int64)  # block * block_tokens + offset
        self.query_start_S = torch.zeros(
            max_sequences + 1, dtype=torch.int64
        )  # rows of sequence s: [s], [s + 1]
        self.context_S = torch.zeros(max_sequences, dtype=torch.int64)  # its tokens once this step has run
        self.block_table_SM = torch.zeros(max_sequences, max_blocks, dtype=torch.int64)
        self._position, self._cache_slot = (
            self.position_T.numpy(),
            self.cache_slot_T.numpy(),
        )  # the same memory
        self._query_start, self._context = self.query_start_S.numpy(), self.context_S.numpy()
        self._table = self.block_table_SM.numpy()
        self._written: list[tuple[Sequence[int], int]] = [
            ((), 0)
        ] * max_sequences  # blocks, and how many of them
        self.token_T = torch.zeros(padded, dtype=torch.int64)
        # What compiled programs read: 0, num_tokens, num_padded, num_decodes, num_sequences.
        self.facts = torch.zeros(5, dtype=torch.int64)
        self._facts = self.facts.numpy()
        # What recurrences read: the slots and tokens of every piece (`StatePiece`), and a sequence's first piece.
        most_pieces = max_sequences + padded + 1  # drafts are pieces of a token each
        self.piece_P3 = torch.zeros(most_pieces, 3, dtype=torch.int64)
        self.piece_start_S = torch.zeros(max_sequences + 1, dtype=torch.int64)
        self._tiles: dict[int, np.ndarray] = {}
        self._chunks: dict[tuple[int, int], np.ndarray] = {}
        self.num_pairs = 0  # (query token, token it may see) at most: what attention's work grows with

    def fill(self, spans: Sequence[Span], num_decodes: int = 0, *, agreed_tokens: int = 0) -> None:
        """Describe a batch; sequences keep their order and their rows follow each other.

        The first `num_decodes` tokens are decodes: a sequence's newest, and drafts behind it. `agreed_tokens`: see there.

        The rows are padded to a multiple of `ROW_MULTIPLE`, at least once that: no model family takes zero rows.
        PyTorch's vectorised loops end in a scalar tail whose exp() differs in the last bit; with pairs of full
        vectors, whatever the columns (a shared expert's gate has one), a row's bits do not depend on how many
        rows there are.
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
        self._position[:tokens] = position_T
        self._position[tokens : self.num_padded] = 0
        self._tiles.clear()
        for (tile_tokens, at_once), table in self._chunks.items():
            self._write_chunks(tile_tokens, at_once, table)

    def _fill_pieces(self, spans: Sequence[Span]) -> None:
        if not any(span.pieces for span in spans):
            spans = [span._replace(pieces=(StatePiece(NO_STATE, NO_STATE, span.length),)) for span in spans]
        pieces = [piece for span in spans for piece in span.pieces]
        self.piece_P3.numpy()[: len(pieces)] = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        np.cumsum([len(span.pieces) for span in spans], out=self.piece_start_S.numpy()[1 : len(spans) + 1])

    def _write_blocks(self, row: int, begin: int, block_ids: Sequence[int]) -> None:
        """Write a part of a sequence's table: what is there already is not written again."""
        self._table[row, begin : begin + len(block_ids)] = block_ids

    def inputs(self, token_ids: Sequence[int], rows: Sequence[int]) -> Inputs:
        """Take the tokens of a batch that was filled in; return what a model's forward is given.

        Args:
            token_ids: of the step's rows, in order.
            rows: whose logits are wanted.
        """
        self.token_T[: self.num_tokens] = torch.tensor(token_ids, dtype=torch.int64)
        self.token_T[self.num_tokens : self.num_padded] = 0
        return Inputs(self.token_T[: self.num_padded], torch.tensor(rows, dtype=torch.int64))

    def _padded(self, num_tokens: int) -> int:
        """Rows that a batch is padded to."""
        return max(ROW_MULTIPLE, -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE)

    def tiles(self, tile_tokens: int) -> np.ndarray:
        """Cut every sequence's rows into tiles of at most so many query tokens.

        Returns:
            [tiles, 3] int64: sequence, first query token within its rows, query tokens. Kept until the next fill.
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
        """Where every step's tiles are, `at_once` of them at a time: what programs that are written once read.

        Returns:
            [chunks, 4] int64, the same memory at every step: the address of a chunk's first tile, how many there are,
            the row of the first query token, and how many rows. What is past the step's tiles has none.
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
        """Which of so many rows are of long sequences: [rows] bool; None: no row is."""
        return self.long_T[:rows] if self.has_long else None

    @property
    def positions(self) -> Tensor:
        """Positions of all rows, padding included: [num_padded] int64, a view."""
        return self.position_T[: self.num_padded]
