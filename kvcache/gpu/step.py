"""One step's packed batch on a GPU: filled on the host like any `Step`, then copied to memory with fixed addresses.

The description of a step is in one pinned buffer and is sent in one asynchronous copy. Block tables are large (128k
tokens are 8,192 blocks of a sequence) and change little: their new entries are sent in the same copy and put in place,
and whole rows are copied if much is new. Places on the device depend only on the padded size, so a CUDA graph captured
for a size finds every later step of that size. Nothing is read back. The next step may be filled while this one runs:
`fill` waits until the last copy is done, which is queued behind the step before. Tokens that a running step will sample
are gathered on the device.

A decode-only step is padded to one of a few sizes, other steps to a multiple of ROWS. Several ranks derive the size from
the tokens on which they agreed, so one number determines what all ranks run. Padded rows have cache slot -1. So their
keys and values are not written, they choose no expert, and their context is 0.

A lone rank may also pad short steps with prompts to a few sizes (`fix_prompts`). Every part then has the length of the
size's `PromptShape`, and the device derives tiles and expanded blocks itself (`kvcache.gpu.prompts`), so that nothing
that is launched depends on the number of decodes, prompts or tokens. The last sequence of such a step is always empty:
tiles without rows belong to it.

Legend: P rows, padding included, S sequences (P of them in a decode-only step), M blocks that a sequence may have,
R rows for which logits are needed, X tiles or blocks.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcache.gpu.prompts import (
    PROMPT_SIZES,
    PromptLoad,
    PromptShape,
    expanded_blocks,
    prompt_load,
    prompt_rows,
    prompt_shapes,
    prompt_tiles,
)
from kvcache.states import NO_STATE
from kvcache.step import Drawn, Inputs, Span, Step

ROWS = 8  # steps with prompts have a multiple of this many rows, as tensor cores require


class OnDevice(NamedTuple):
    """A step as kernels see it: int64, overwritten by the next step of this size."""

    position_P: Tensor
    cache_slot_P: Tensor  # -1 for a padded row
    token_P: Tensor
    row_R: Tensor
    context_S: Tensor  # 0 for a padded row
    decode_context_S: Tensor  # the same, and 0 for sequences that are not decodes
    query_start_S: Tensor  # [S + 1]
    num_decodes_1: Tensor
    # Only of models with recurrent layers; otherwise empty.
    state_before_P: Tensor  # slot of the state before the sequence's first row; -1: no state
    state_after_P: Tensor  # slot for the state after this row; -1: not needed
    row_before_P: Tensor  # number of the sequence's rows before this one, in this step
    # Rows [w] to [w + 1] are of sequence w, which recurrences walk row by row. It has P + 1 entries if S is P.
    walk_start_W: Tensor
    # The same for the later sequences, which recurrences compute in chunks; [0] or [1 + sequences].
    chunk_start_C: Tensor
    is_long_P: Tensor  # 1 for a row of a long sequence; only of models that use it
    axes_A: Tensor  # [4 * P]: positions in tokens, time, height and width; only of models that take axes
    adapter_P: Tensor  # place of each row's adapter; -1 for rows without one and padding; only of models that take adapters
    table_SM: Tensor


class Expansion(NamedTuple):
    """Blocks of consecutive prompt sequences, side by side, for attention that expands latents."""

    sequences: range
    block_X: Tensor  # the blocks, ordered by sequence and position
    table_SM: Tensor  # their places in that order; rows of other sequences are not filled


def _ending(starts: np.ndarray, length: int) -> np.ndarray:
    """Append empty sequences to first rows and the end."""
    return np.pad(starts, (0, length - len(starts)), mode="edge")


def _one_by_one(spans: Sequence[Span], num_decodes: int) -> list[Span]:
    """Split the spans of the first `num_decodes` tokens into single tokens."""
    cut: list[Span] = []
    for span in spans:
        if len(cut) < num_decodes and span.length > 1:
            for row in range(span.length):
                axes = None if span.axes is None else span.axes[:, row : row + 1]
                cut.append(span._replace(start=span.start + row, length=1, axes=axes))
        else:
            cut.append(span)
    return cut


def agreed_sizes(max_sequences: int) -> tuple[int, ...]:
    """Return the sizes of agreed steps: `max_sequences`, and powers of two from ROWS below it. See `Step.agreed_tokens`."""
    sizes, size = [], ROWS
    while size < max_sequences:
        sizes.append(size)
        size *= 2
    return (*sizes, max_sequences)


def decode_sizes(max_sequences: int) -> tuple[int, ...]:
    """Return the sizes to which decode-only steps are padded: 1, 2, 4, 8, then multiples of 8 up to `max_sequences`."""
    sizes = [size for size in (1, 2, 4) if size < max_sequences]
    sizes += range(8, max_sequences, 8)
    return (*sizes, max_sequences)


class DeviceStep(Step):
    """A `Step` with its tensors also on a device.

    Attributes:
        on_device: The step of the last call of `inputs`.
        prompt_shape: The step's, if it has prompts and is padded to one of `prompt_shapes`; otherwise None.
        prompt_shapes: Those of `fix_prompts`, smallest first.
        sizes: Sizes to which decode-only steps are padded.
        graph_sizes: Padded sizes that determine all launches, on every rank; each may have a CUDA graph.
        num_ranks: Ranks that run the same steps.
        max_tokens: Of any step. max_rows: Of any step, padding included. max_context: Tokens of a sequence.
        is_invariant: Whether a row's bits must depend neither on the batch nor on how its prompt is cut.
        derived: What others derive from the step on the device. Cleared by `forget_derived`.
        records_adapters: Whether a graph for steps with adapters is captured: its launches depend on no adapter.
        changed_tables: Copies of tables of adapters that `copy_tables` makes.
    """

    on_device: OnDevice

    def __init__(
        self,
        *,
        max_tokens: int,
        max_sequences: int,
        max_blocks: int,
        block_tokens: int,
        device: torch.device,
        num_ranks: int = 1,
        is_invariant: bool = False,
    ) -> None:
        """Allocate on the host (pinned for a GPU) and on the device.

        With `is_invariant`, a row's bits must depend neither on the batch nor on how its prompt is cut.
        """
        super().__init__(
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            max_blocks=max_blocks,
            block_tokens=block_tokens,
        )
        self.device, self.sizes, self.is_invariant = device, decode_sizes(max_sequences), is_invariant
        self.num_ranks, self._is_wide = num_ranks, num_ranks > 1
        self.graph_sizes = agreed_sizes(max_sequences) if self._is_wide else self.sizes
        self.max_context = max_blocks * block_tokens
        self.max_rows = padded = -(-max(max_tokens, ROWS) // ROWS) * ROWS
        self._states_3P = np.zeros((3, padded), np.int64)
        self._whole: Sequence[Span] = ()  # of the batch; a decode and its drafts are one span
        self._most_new = 4 * max_sequences  # blocks that are sent individually
        # Parts of tables that the device does not have yet: row, begin, blocks.
        self._new: list[tuple[int, int, Sequence[int]]] = []
        self.prompt_shapes: tuple[PromptShape, ...] = ()
        self.prompt_shape: PromptShape | None = None
        self._has_room = True  # for the rows with logits
        # What the model does in steps of a `prompt_shape`: the shapes in which it expands latents, and the most pairs of a
        # prompt's row and a token that it sees.
        self._expanding: set[PromptShape] = set()
        self._most_pairs = 1 << 62
        self._rows: tuple[Tensor, Tensor] | None = None
        self._image_ends_P: Tensor | None = None
        self.derived: dict[Any, Any] = {}
        self.records_adapters = False
        self.changed_tables: set[Callable[[], None]] = set()
        most_values = (
            12 * padded + 7 * max(padded, max_sequences) + 64 + 2 * self._most_new + 2 * max_sequences
        )
        self._host = self._pinned(most_values)
        self._host_values = self._host.numpy()
        self._device = torch.zeros_like(self._host, device=device)
        self._copied: torch.cuda.Event | None = None  # of the last copy
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.block_table_SM = self._pinned(max_sequences, max_blocks)
        self._table = self.block_table_SM.numpy()
        self._device_table_SM = torch.zeros(max_sequences + 1, max_blocks, dtype=torch.int64, device=device)
        self._tiles_on_device: dict[tuple[int, range], Tensor] = {}
        self._expansions: dict[int, list[Expansion]] = {}

    @property
    def is_decode_only(self) -> bool:
        """Whether every sequence has one generated token. Also true of a step without sequences, except an idle one for
        prompts."""
        return self.num_decodes == self.num_tokens and self.prompt_shape is None

    @property
    def has_fixed_shape(self) -> bool:
        """Whether the padded size, and whether it runs adapters, determine all that the step launches, on every rank. Rows of
        images launch more."""
        if self.images:
            return False
        if self.prompt_shape is not None:
            return self._has_room
        return self.is_decode_only and (self.agreed_tokens > 0 or not self._is_wide)

    @property
    def adapts_rows(self) -> bool:
        """Whether rows of this rank may have adapters."""
        return self.has_adapters or self.records_adapters

    @property
    def runs_adapters(self) -> bool:
        """Whether rows that this rank's experts get may have adapters: its own, or those of other ranks."""
        return self.adapts_rows or (self._is_wide and self.has_placed)

    def copy_tables(self) -> None:
        """Copy changed tables of adapters to the device, where graphs read them."""
        while self.changed_tables:
            self.changed_tables.pop()()

    @property
    def decode_rows(self) -> int:
        """Number of rows that the kernel for decodes runs on. Rows that are not decodes have a `decode_context_S` of 0."""
        if self.prompt_shape is not None:
            return self.prompt_shape.sequences
        return self.num_padded if self.is_decode_only else self.num_decodes

    @property
    def replayable_prompts(self) -> tuple[int, ...]:
        """Sizes for `fix_prompts`. Empty with several ranks, because their prompts have no common size."""
        return () if self._is_wide else PROMPT_SIZES

    def fix_prompts(self, sizes: Sequence[int]) -> None:
        """Pad later steps with prompts to one of these sizes if they fit, and others to a multiple of ROWS."""
        assert not (sizes and self._is_wide), "steps with prompts of several ranks have no common size"
        self.prompt_shapes = prompt_shapes(
            sizes, max_rows=self.max_rows, max_sequences=self.sizes[-1], block_tokens=self.block_tokens
        )

    @property
    def positions(self) -> Tensor:
        """Positions of all rows, padding included, on the device."""
        return self.on_device.position_P

    @property
    def model_positions(self) -> Tensor:
        """As `Step.model_positions`, on the device. The shape depends only on the model."""
        return self.on_device.axes_A.view(4, 1, -1) if self.takes_axes else self.positions[None]

    def fill(self, spans: Sequence[Span], num_decodes: int = 0, *, agreed_tokens: int = 0) -> None:
        """Fill the step. A decode's drafts become sequences of one token each, on the same blocks.

        So in a decode-only step every row is a sequence, its bits do not depend on drafts, and attention kernels need not
        know them: all rows' keys and values are in the pages before the first row attends. Recurrences walk a decode and
        its drafts as one sequence, row by row, and write the state after each.
        """
        if self._copied is not None:
            self._copied.synchronize()  # until then the copy reads what is filled here
        self._whole = spans
        super().fill(_one_by_one(spans, num_decodes), num_decodes, agreed_tokens=agreed_tokens)
        self.forget_derived()

    def forget_derived(self) -> None:
        """Let the next forward derive tiles and expansions again. Called before every recording, which must contain
        that work."""
        self._tiles_on_device.clear()
        self._expansions.clear()
        self._rows = self._image_ends_P = None
        self.derived.clear()

    def inputs(self, token_ids: Sequence[int], rows: Sequence[int], drawn: Drawn | None = None) -> Inputs:
        """Set the tokens of the filled batch, and copy the step to the device, as `Step.inputs`.

        In a step of fixed shape, `row_R` has the padded length: first the wanted rows, then arbitrary ones.
        """
        P, S, R = self.num_padded, self.num_sequences, len(rows)
        if self.is_decode_only:
            S = R = P
        elif self.prompt_shape is not None:
            self._has_room = len(rows) <= self.prompt_shape.sequences
            S, R = self.prompt_shape.sequences + 1, max(R, self.prompt_shape.sequences)
        new_blocks = self._take_new()
        N, D = len(new_blocks), 0 if drawn is None else len(drawn.rows)
        Z = P if self.has_states else 0
        walk_start, chunk_start = recurrent_starts = self._recurrent_starts(S)
        lengths = (
            P, P, P, R, S, S, S + 1, 1, Z, Z, Z, len(walk_start), len(chunk_start), P if self.tells_long else 0,
            4 * P if self.takes_axes else 0, P if self.num_adapters else 0, N, N, D, D,
        )  # fmt: skip
        # Every part begins at a multiple of 16 bytes: kernels are compiled for aligned pointers, and again for others.
        starts = [0, *accumulate(length + length % 2 for length in lengths)]
        host = [self._host_values[at : at + length] for at, length in zip(starts, lengths, strict=False)]
        self._write(host, token_ids, rows, new_blocks, recurrent_starts, drawn)
        self._device[: starts[-1]].copy_(self._host[: starts[-1]], non_blocking=True)
        *views, place_on_device_N, block_on_device_N, row_on_device_D, source_on_device_D = (
            self._device[at : at + length] for at, length in zip(starts, lengths, strict=False)
        )
        if N:
            self._device_table_SM.view(-1).index_copy_(0, place_on_device_N, block_on_device_N)
        self.on_device = OnDevice._make([*views, self._device_table_SM[:S]])
        if drawn is not None:
            token_D = drawn.token_R.index_select(0, source_on_device_D)
            self.on_device.token_P.index_copy_(0, row_on_device_D, token_D)
        if self._copied is not None:
            self._copied.record()
        return Inputs(self.on_device.token_P, self.on_device.row_R)

    def _write(
        self,
        host: Sequence[np.ndarray],
        token_ids: Sequence[int],
        rows: Sequence[int],
        new_blocks: np.ndarray,
        recurrent_starts: tuple[np.ndarray, np.ndarray],
        drawn: Drawn | None,
    ) -> None:
        """Write the step to the host's copy of its parts, with padding."""
        T = self.num_tokens
        (
            position_P, cache_slot_P, token_P, row_R, context_S, decode_context_S, query_start_S, num_decodes_1,
            state_before_P, state_after_P, row_before_P, walk_start_W, chunk_start_C, is_long_P, axes_A, adapter_P, place_N,
            block_N, row_D, source_D,
        ) = host  # fmt: skip
        position_P[:T], position_P[T:] = self._position[:T], 0
        cache_slot_P[:T], cache_slot_P[T:] = self._cache_slot[:T], -1
        token_P[:T], token_P[T:] = token_ids, 0
        row_R[: len(rows)], row_R[len(rows) :] = rows, 0
        n = self.num_sequences
        context_S[:n], context_S[n:] = self._context[:n], 0
        decode_context_S[:], decode_context_S[self.num_decodes :] = context_S, 0
        query_start_S[: n + 1], query_start_S[n + 1 :] = self._query_start[: n + 1], T
        num_decodes_1[:] = self.num_decodes
        state_before_P[:], state_after_P[:], row_before_P[:] = self._states_3P[:, : len(row_before_P)]
        walk_start_W[:], chunk_start_C[:] = recurrent_starts
        is_long_P[:] = 0
        if self.tells_long and self.has_long:
            is_long_P[:T] = self.long_T[:T].numpy()
        if self.takes_axes:
            axes_4P = axes_A.reshape(4, -1)
            axes_4P[:, :T] = self.axes_4T[:, :T].numpy() if self.has_axes else self._position[:T]
            axes_4P[:, T:] = 0
        adapter_P[:] = -1
        if self.num_adapters:
            adapter_P[:T] = self.adapter_T[:T].numpy()
        place_N[:], block_N[:] = new_blocks.T
        if drawn is not None:
            row_D[:], source_D[:] = drawn.rows, drawn.sources

    def _recurrent_starts(self, num_padded: int) -> tuple[np.ndarray, np.ndarray]:
        """Return first rows, and the end, of the sequences that recurrences walk, and of those computed in chunks.

        Decodes are walked together with their drafts. Prompts are computed in chunks, unless bits must not depend on
        cuts. In a step of fixed shape, some of them are empty: `num_padded` sequences are walked, and as many are
        computed in chunks as there may be prompts.
        """
        if not self.has_states:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        starts = np.cumsum([0, *(span.length for span in self._whole)])
        if self.is_decode_only:
            return _ending(starts, num_padded + 1), np.zeros(1, np.int64)
        num_walked = len(starts) - 1 if self.is_invariant else int(np.searchsorted(starts, self.num_decodes))
        walked, in_chunks = starts[: num_walked + 1], starts[num_walked:]
        if self.prompt_shape is None:
            return walked, in_chunks
        prompts = 0 if self.is_invariant else self.prompt_shape.prompts
        return _ending(walked, num_padded), _ending(in_chunks, prompts + 1)

    def _fill_pieces(self, _rows: Sequence[Span]) -> None:
        before_P, after_P, row_P = self._states_3P
        after_P[:], before_P[:], row_P[:] = NO_STATE, NO_STATE, 0
        begin = 0
        for span in self._whole:
            here = slice(begin, begin + span.length)
            row_P[here] = np.arange(span.length)
            if span.pieces:
                before_P[here] = span.pieces[0].read
                after_P[begin + np.cumsum([piece.length for piece in span.pieces]) - 1] = [
                    piece.write for piece in span.pieces
                ]
            begin += span.length

    def _write_blocks(self, row: int, begin: int, block_ids: Sequence[int]) -> None:
        super()._write_blocks(row, begin, block_ids)
        self._new.append((row, begin, block_ids))

    def _take_new(self) -> np.ndarray:
        """Return blocks missing on the device: [N, 2] of place and block. If there are many, copy whole rows instead."""
        new, self._new = self._new, []
        rows = sorted({row for row, _, _ in new})
        if sum(len(block_ids) for _, _, block_ids in new) > self._most_new:
            here = slice(rows[0], rows[-1] + 1)
            self._device_table_SM[here].copy_(self.block_table_SM[here], non_blocking=True)
            return np.empty((0, 2), np.int64)
        width = self._table.shape[1]
        # From the table, not from the parts: of entries written twice, only the last counts.
        places = sorted(
            {row * width + at for row, begin, ids in new for at in range(begin, begin + len(ids))}
        )
        flat = np.array(places, dtype=np.int64)
        return np.stack((flat, self._table.reshape(-1)[flat]), axis=1)

    def long_rows(self, rows: int) -> Tensor | None:
        """Never returns None, so that the step's launches do not depend on long sequences."""
        return self.on_device.is_long_P[:rows].bool()

    def adapters_on_device(self) -> Tensor:
        """Return the place of each row's adapter, -1 for rows without one and padding: int64 [num_padded]."""
        return self.on_device.adapter_P

    def adapters_of_blocks(self, blocks: Expansion) -> Tensor:
        """Return the place of the adapter of each block's sequence: int64 [X]."""
        on = self.on_device
        sequence_S = torch.arange(len(on.context_S), device=self.device)
        first = on.num_decodes_1 if self.prompt_shape is not None else blocks.sequences.start
        is_in_S = sequence_S >= first
        if self.prompt_shape is None:
            is_in_S &= sequence_S < blocks.sequences.stop
        count_S = torch.where(is_in_S, (on.context_S + self.block_tokens - 1) // self.block_tokens, 0)
        block_X = torch.arange(len(blocks.block_X), device=self.device)
        sequence_X = torch.searchsorted(count_S.cumsum(0), block_X, right=True)
        first_row_X = on.query_start_S[sequence_X.clamp(max=len(sequence_S) - 1)]
        return on.adapter_P[first_row_X.clamp(max=len(on.adapter_P) - 1)]

    def image_ends_on_device(self) -> Tensor | None:
        """Return `Step.image_end_T` on the device: int64 [num_padded]. None if no row is of an image."""
        if self.images and self._image_ends_P is None:
            values = np.zeros(self.num_padded, np.int64)
            values[: self.num_tokens] = self.image_end_T[: self.num_tokens].numpy()
            self._image_ends_P = self._upload(values)
        return self._image_ends_P

    def idle(self, size: int) -> Inputs:
        """Describe an empty decode step, padded to one of `graph_sizes`, for compilation and capture."""
        self.fill([], agreed_tokens=1 << max(size - 1, ROWS - 1).bit_length())
        self.num_padded = size
        return self.inputs([], [])

    def idle_prompts(self, shape: PromptShape) -> Inputs:
        """Describe an empty step with prompts of one of `prompt_shapes`, for compilation and capture."""
        self.fill([])
        self.prompt_shape, self.num_padded = shape, shape.rows
        return self.inputs([], [])

    def fill_with_prompts(self, num_blocks: int, vocabulary: int, num_rows: int = 1) -> Inputs:
        """Describe the largest possible step of prompts, on the first blocks of `num_blocks`, to compile and to find a
        lack of memory early. Sequences share blocks, so the cached values are meaningless. Up to `num_rows` rows have logits."""
        longest = min(self.max_context, num_blocks * self.block_tokens)
        left = min(self.max_tokens, longest * len(self.block_table_SM))
        spans = []
        while left > 0:
            length = min(longest, left)
            spans.append(Span(0, length, range(-(-length // self.block_tokens))))
            left -= length
        self.fill(spans)
        rows = range(min(num_rows, self.num_tokens))
        return self.inputs([at % vocabulary for at in range(self.num_tokens)], rows)

    @property
    def prompts(self) -> range:
        """The sequences that are not decodes."""
        return range(self.num_decodes, self.num_sequences)

    def tiles_on_device(self, tile_tokens: int, sequences: range | None = None) -> Tensor:
        """Return the tiles of some sequences (by default all except decodes), as `tiles`: [X, 3] int64.

        In a step of a `prompt_shape`, tiles of 0 tokens follow.
        """
        key = tile_tokens, self.prompts if sequences is None else sequences
        if key not in self._tiles_on_device:
            self._tiles_on_device[key] = self._make_tiles(*key)
        return self._tiles_on_device[key]

    def _make_tiles(self, tile_tokens: int, sequences: range) -> Tensor:
        shape = self.prompt_shape
        if shape is not None and sequences == self.prompts:
            most = (shape.rows + shape.prompts * (tile_tokens - 1)) // tile_tokens
            on = self.on_device
            return prompt_tiles(on.query_start_S, on.num_decodes_1, tile_tokens, most)
        tiles = self.tiles(tile_tokens)
        return self._upload(tiles[(tiles[:, 0] >= sequences.start) & (tiles[:, 0] < sequences.stop)])

    def expansions(self, most_blocks: int) -> list[Expansion]:
        """Lay the blocks of all sequences except decodes side by side, in groups of at most `most_blocks` blocks. A single
        sequence may exceed that.

        In a step of a `prompt_shape` there is one group, and the device derives it. Later steps only get such a shape if
        their blocks fit it.
        """
        if most_blocks not in self._expansions:
            shape = self.prompt_shape
            if shape is not None:
                self._expanding.add(shape)
            if shape is not None and self._prompt_load().blocks <= shape.blocks:
                on, most = self.on_device, shape.blocks
                made = expanded_blocks(on.context_S, on.num_decodes_1, on.table_SM, self.block_tokens, most)
                self._expansions[most_blocks] = [Expansion(self.prompts, *made)]
            else:
                self._expansions[most_blocks] = self._groups(most_blocks)
        return self._expansions[most_blocks]

    def rows_as_sequences(self, most_pairs: int) -> tuple[Tensor, Tensor]:
        """Return every prompt row's context [P], 0 for other rows, and the block table of its sequence [P, M].

        Only of a step of a `prompt_shape`. Later steps only get such a shape if all prompts' rows together see at most
        `most_pairs` tokens.
        """
        self._most_pairs = most_pairs
        if self._rows is None:
            on = self.on_device
            self._rows = prompt_rows(
                on.position_P, on.cache_slot_P, on.query_start_S, on.num_decodes_1, on.table_SM
            )
        return self._rows

    def _prompt_load(self) -> PromptLoad:
        n = self.num_sequences
        return prompt_load(self._query_start[: n + 1], self._context[:n], self.num_decodes, self.block_tokens)

    def _groups(self, most_blocks: int) -> list[Expansion]:
        counts = -(-self._context[: self.num_sequences] // self.block_tokens)
        made, first = [], self.num_decodes
        while first < self.num_sequences:
            together = np.cumsum(counts[first:]) <= most_blocks
            end = first + max(1, int(together.sum()))
            made.append(self._expansion(range(first, end), counts))
            first = end
        return made

    def _expansion(self, sequences: range, count_S: np.ndarray) -> Expansion:
        table_SM = np.zeros((self.num_sequences, int(count_S.max(initial=1))), np.int64)
        blocks, used = [], 0
        for sequence in sequences:
            count = int(count_S[sequence])
            blocks.append(self._table[sequence, :count])
            table_SM[sequence, :count] = np.arange(used, used + count)
            used += count
        return Expansion(sequences, self._upload(np.concatenate(blocks)), self._upload(table_SM))

    def _padded(self, num_tokens: int) -> int:
        self.prompt_shape, self._has_room = None, True
        if self._is_wide and self.is_decode_only and self.agreed_tokens:
            return min(self.agreed_tokens, self.sizes[-1])
        if self.is_decode_only:
            return self.sizes[bisect_left(self.sizes, num_tokens)]
        if self.prompt_shapes:
            load = self._prompt_load()
            fitting = (
                shape
                for shape in self.prompt_shapes
                if shape.fits(load, shape in self._expanding, self._most_pairs)
            )
            self.prompt_shape = next(fitting, None)
        return -(-num_tokens // ROWS) * ROWS if self.prompt_shape is None else self.prompt_shape.rows

    def _pinned(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _upload(self, values: np.ndarray) -> Tensor:
        """Copy to the device without waiting. torch's allocator keeps the pinned copy until that is done."""
        host = self._pinned(*values.shape)
        host.copy_(torch.from_numpy(np.ascontiguousarray(values)))
        return host.to(self.device, non_blocking=True)
