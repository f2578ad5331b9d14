"""Sizes of short steps with prompts. Their launches depend only on the size, and the device derives lists for them.

Attention reads tiles of prompts' rows; of models with latents every row as a sequence, or the blocks of prompts' contexts side
by side. The host makes these lists for other steps (`DeviceStep.tiles_on_device`, `expansions`). A captured graph has
lists of fixed length and fills them from the step's own sequences. About a dozen small launches per step, not per layer,
replace a second copy. Nothing is read back.

A size has room for a limited number of prompts, because every possible prompt adds a tile, and programs without work
take time too. The largest size has room for any number. Rejected: expanding the longest possible contexts in every step,
which takes longer than launching a step; steps with longer contexts run without a graph.

Legend: S sequences, the last one empty, M blocks that a sequence may have, X tiles or blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Rows. A larger step computes for longer than the host takes to launch it.
PROMPT_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)
_LEAST_PROMPTS, _TOKENS_OF_PROMPT = 8, 16
_LEAST_EXPANDED, _EXPANDED_OF_ROW = 1024, 2  # tokens of contexts


class PromptShape(NamedTuple):
    """What fits a step of one size. It determines all that the step launches.

    Attributes:
        rows: Tokens, padding included.
        sequences: Decodes and prompts, and also rows with logits. The step has one more sequence, which is empty.
        prompts: Sequences that are not decodes.
        blocks: Of the contexts of all prompts. Limits only models that expand latents.
    """

    rows: int
    sequences: int
    prompts: int
    blocks: int

    def fits(self, load: "PromptLoad", expands: bool, most_pairs: int) -> bool:
        """Whether a step may have this shape. `expands`: the model expands latents in it. `most_pairs`: limit of `load.pairs`."""
        return (
            load.tokens <= self.rows
            and load.sequences <= self.sequences
            and load.prompts <= self.prompts
            and (load.blocks <= self.blocks or not expands)
            and load.pairs <= most_pairs
        )


class PromptLoad(NamedTuple):
    """The size of a step with prompts, to be compared with a shape."""

    tokens: int
    sequences: int
    prompts: int
    blocks: int  # of the prompts' contexts
    pairs: int  # of a prompt's row and a token that it sees


def prompt_load(
    query_start: np.ndarray, context: np.ndarray, num_decodes: int, block_tokens: int
) -> PromptLoad:
    """Return the load of a step from first rows (and their end) and contexts of all sequences."""
    lengths, contexts = np.diff(query_start)[num_decodes:], context[num_decodes:]
    return PromptLoad(
        tokens=int(query_start[-1]),
        sequences=len(context),
        prompts=len(contexts),
        blocks=int((-(-contexts // block_tokens)).sum()),
        pairs=int((lengths * (2 * contexts - lengths + 1)).sum()) // 2,
    )


def prompt_shapes(
    sizes: Sequence[int], *, max_rows: int, max_sequences: int, block_tokens: int
) -> tuple[PromptShape, ...]:
    """Return the shapes of steps of up to `max_rows` rows, smallest first. If `max_rows` lies between two sizes, it is the
    last."""
    most = min(max_rows, max(sizes, default=0))
    shapes = []
    for rows in (*sorted(size for size in sizes if size < most), most) if most else ():
        sequences = min(rows, max_sequences)
        prompts = sequences if rows == most else max(_LEAST_PROMPTS, rows // _TOKENS_OF_PROMPT)
        blocks = -(-max(_LEAST_EXPANDED, _EXPANDED_OF_ROW * rows) // block_tokens)
        shapes.append(PromptShape(rows, sequences, min(sequences, prompts), blocks))
    return tuple(shapes)


def prompt_tiles(query_start_S: Tensor, num_decodes_1: Tensor, tile_tokens: int, most: int) -> Tensor:
    """Cut the rows of all sequences except decodes into tiles, as `Step.tiles`.

    Args:
        query_start_S: int64 [S + 1], first row of each sequence and the end.
        num_decodes_1: int64 [1], sequences at the beginning that get no tiles.
        most: Number of tiles to return, at least as many as there are.

    Returns:
        [most, 3] int64: sequence, first query token within its rows, number of query tokens. The last ones have 0 tokens,
        of the empty sequence.
    """
    length_S = query_start_S.diff()
    number_X, sequence_X, begin_X = _share_out(
        (length_S + tile_tokens - 1) // tile_tokens, num_decodes_1, most
    )
    length_X = length_S[sequence_X]
    first_X = torch.minimum((number_X - begin_X) * tile_tokens, length_X)
    return torch.stack((sequence_X, first_X, (length_X - first_X).clamp(max=tile_tokens)), dim=1)


def expanded_blocks(
    context_S: Tensor, num_decodes_1: Tensor, table_SM: Tensor, block_tokens: int, most: int
) -> tuple[Tensor, Tensor]:
    """Lay the blocks of all sequences except decodes side by side.

    Args:
        context_S: int64 [S], tokens of each sequence. table_SM: int64, their blocks.
        most: Number of blocks to return, at least as many as there are.

    Returns:
        [most] int64, the blocks by sequence and position, then arbitrary ones of the pool; and for each sequence the
        places of its blocks in that order, [S, at most M].
    """
    used_S = (context_S + block_tokens - 1) // block_tokens
    number_X, sequence_X, begin_X = _share_out(used_S, num_decodes_1, most)
    width = min(table_SM.shape[1], most)
    block_X = table_SM[sequence_X, (number_X - begin_X).clamp(max=width - 1)]
    begin_S = _ends(used_S, num_decodes_1) - used_S
    place_SM = begin_S[:, None] + torch.arange(width, device=context_S.device)
    return block_X, place_SM.clamp(0, most - 1)


def prompt_rows(
    position_P: Tensor, cache_slot_P: Tensor, query_start_S: Tensor, num_decodes_1: Tensor, table_SM: Tensor
) -> tuple[Tensor, Tensor]:
    """Describe every row of a prompt as a sequence that ends there.

    Returns:
        [P] int64, tokens that each row sees, 0 for decodes and padding; and [P, M], the blocks of its sequence.
    """
    row_P = torch.arange(len(position_P), device=position_P.device)
    is_prompt_P = (row_P >= num_decodes_1) & (cache_slot_P >= 0)
    sequence_P = torch.searchsorted(query_start_S[1:], row_P, right=True).clamp(max=len(table_SM) - 1)
    return torch.where(is_prompt_P, position_P + 1, 0), table_SM[sequence_P]


def _ends(count_S: Tensor, num_decodes_1: Tensor) -> Tensor:
    """Return the sums of the counts up to each sequence; decodes count 0."""
    number_S = torch.arange(len(count_S), device=count_S.device)
    return torch.where(number_S < num_decodes_1, 0, count_S).cumsum(0)


def _share_out(count_S: Tensor, num_decodes_1: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Number `most` things that belong to sequences in order, `count_S` to each, none to decodes.

    Returns:
        Each thing's number, its sequence, and the number of the sequence's first thing.
    """
    end_S = _ends(count_S, num_decodes_1)
    number_X = torch.arange(most, device=count_S.device)
    sequence_X = torch.searchsorted(end_S, number_X, right=True).clamp(max=len(count_S) - 1)
    return number_X, sequence_X, (end_S - count_S)[sequence_X]
