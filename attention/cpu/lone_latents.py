"""Attention to latents for a few decodes with long contexts: the threads of a team share the work of one row.

`attention.cpu.latents` gives a row's whole context to one thread, because a sum is one chain over its tokens. Here many
threads compute the scores (those of a block depend on nothing else), one thread turns them into weights, and many threads
compute the sums, each for some dims. Every chain runs over the same tokens in the same order, so the bits are the same.

Legend: G groups of 16 heads, N blocks of a context, B tokens of a block (16), L latent dim.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from attention.cpu.cached import kernels_of, latent_room, read_latent_dims, read_latents
from attention.cpu.latent_tiles import mix_block, softmax_lanes, transpose_block
from attention.cpu.tiles import LANES, TILES_VERSION, address_of, load_f32, rows_times_panel_f32
from dispatch.compiled.native import bits_of, copy, float_of, floats, words
from dispatch.compiled.team import Kernel
from kvcache.step import Step

MOST = 4  # groups of heads over all tokens; more of them keep a team busy without these kernels
_BLOCKS = 16  # blocks per tile of scores
_MOST_PARTS = 8  # parts into which the dims of a row are cut
_LEAST_DIMS = 4 * LANES  # dims per tile of sums
_BLOCK_BYTES = (LANES * LANES + LANES) * 4  # scores, later weights [heads, B]; factors on earlier sums


@njit(nogil=True, inline="always")
def is_lone(chunk, groups, most):  # type: ignore[no-untyped-def]
    """Return whether these kernels take a chunk of `Step.chunks`: at most `most` groups of heads, in tiles of one token."""
    return chunk[1] * groups <= most and chunk[3] == chunk[1]


@njit(nogil=True, inline="always")
def _row_of(chunk, groups, query_starts, contexts, tables, table_stride, window, task):  # type: ignore[no-untyped-def]
    # Returns for a task (a tile's group): row in `query` and `out`, block table, first block, number of blocks, position.
    part = words(chunk[0] + task // groups * 24, 3)
    starts, context = words(query_starts + part[0] * 8, 2), words(contexts + part[0] * 8, 1)[0]
    position = context - (starts[1] - starts[0]) + part[1]
    first = max(0, position - window + 1) // LANES if window > 0 else 0
    place = (starts[0] + part[1] - chunk[2]) * groups + task % groups
    return place, tables + part[0] * table_stride, first, position // LANES + 1 - first, position


def _score(  # type: ignore[no-untyped-def]
    tile, chunk_at, groups, query_starts, contexts, tables, table_stride, window, most, room, task_bytes, latents, row_bytes,
    query, width, latent,
):  # fmt: skip
    # A tile is the scores [B, 16 heads] of some blocks.
    chunk = words(chunk_at, 4)
    if not is_lone(chunk, groups, most):
        return 0
    task = tiles = 0
    while task < chunk[1] * groups:
        place, table, first, blocks, _ = _row_of(
            chunk, groups, query_starts, contexts, tables, table_stride, window, task
        )
        here = (blocks + _BLOCKS - 1) // _BLOCKS
        if 0 <= tile < tiles + here:
            break
        tiles += here
        task += 1
    if tile < 0:
        return tiles
    panel, floats_of_page = query + place * width * LANES * 4, latent_room(row_bytes)
    begin = (tile - tiles) * _BLOCKS
    for block in range(begin, min(begin + _BLOCKS, blocks)):
        stored = latents + words(table + (first + block) * 8, 1)[0] * LANES * row_bytes
        page, page_bytes = read_latents(stored, row_bytes, latent, width, floats_of_page)
        rows_times_panel_f32(
            page,
            page_bytes,
            panel,
            LANES * 4,
            width,
            room + task * task_bytes + block * _BLOCK_BYTES,
            LANES * 4,
            LANES,
        )
    return 0


def _weigh(  # type: ignore[no-untyped-def]
    tile, chunk_at, groups, query_starts, contexts, tables, table_stride, window, most, room, task_bytes, scale_bits,
):  # fmt: skip
    # A tile turns a row's scores into weights, block after block. The total is stored behind the last block.
    chunk, scale = words(chunk_at, 4), float_of(scale_bits)
    if tile < 0:
        return chunk[1] * groups if is_lone(chunk, groups, most) else 0
    _, _, first, blocks, position = _row_of(
        chunk, groups, query_starts, contexts, tables, table_stride, window, tile
    )
    top, total = np.full(LANES, -np.inf, np.float32), np.zeros(LANES, np.float32)
    weights = np.empty((LANES, LANES), np.float32)
    for block in range(blocks):
        begin = (first + block) * LANES
        low = position - window + 1 - begin if window > 0 else 0
        scores = room + tile * task_bytes + block * _BLOCK_BYTES
        softmax_lanes(
            scores,
            scale,
            low,
            position + 1 - begin,
            address_of(top),
            address_of(total),
            scores + LANES * LANES * 4,
        )
        transpose_block(floats(scores, LANES * LANES).reshape(LANES, LANES), weights)
        copy(scores, address_of(weights), LANES * LANES * 4)
    copy(room + tile * task_bytes + blocks * _BLOCK_BYTES, address_of(total), LANES * 4)
    return 0


def _mix(  # type: ignore[no-untyped-def]
    tile, chunk_at, groups, query_starts, contexts, tables, table_stride, window, most, room, task_bytes, latents, row_bytes,
    out, latent_lanes, heads,
):  # fmt: skip
    # A tile is some dims of a row's means.
    chunk = words(chunk_at, 4)
    dims = max(_LEAST_DIMS, (latent_lanes // LANES + _MOST_PARTS - 1) // _MOST_PARTS * LANES)
    parts = (latent_lanes + dims - 1) // dims
    if tile < 0:
        return chunk[1] * groups * parts if is_lone(chunk, groups, most) else 0
    task, begin = tile // parts, tile % parts * dims
    end = min(begin + dims, latent_lanes)
    place, table, first, blocks, _ = _row_of(
        chunk, groups, query_starts, contexts, tables, table_stride, window, task
    )
    here_heads, floats_of_page = min(LANES, heads - task % groups * LANES), latent_room(row_bytes)
    sums = out + place * LANES * latent_lanes * 4
    for lane in range(LANES):
        floats(sums + (lane * latent_lanes + begin) * 4, end - begin)[:] = np.float32(0.0)
    for block in range(blocks):
        stored = latents + words(table + (first + block) * 8, 1)[0] * LANES * row_bytes
        page, page_bytes = read_latent_dims(stored, row_bytes, begin, end, floats_of_page)
        weights = room + task * task_bytes + block * _BLOCK_BYTES
        mix_block(
            weights,
            weights + LANES * LANES * 4,
            page,
            page_bytes,
            sums,
            latent_lanes * 4,
            begin,
            end,
            here_heads,
        )
    for lane in range(here_heads):
        total = load_f32(room + task * task_bytes + blocks * _BLOCK_BYTES + lane * 4)
        made = floats(sums + (lane * latent_lanes + begin) * 4, end - begin)
        for dim in range(end - begin):
            made[dim] /= total
    return 0


SCORE, WEIGH, MIX = kernels_of(_score), Kernel(_weigh, TILES_VERSION), kernels_of(_mix)


def lone_kernels(dtype: torch.dtype) -> tuple[Kernel[...], ...]:
    """Return the kernels for pages of this type."""
    return SCORE[dtype], WEIGH, MIX[dtype]


def most_lone(step: Step) -> int:
    """Return the largest number of groups for these kernels. They cost more and pay off if half the team would be idle."""
    return 0 if step.team is None else min(MOST, int(step.team.num_threads) // 2)


def lone_floats(max_blocks: int) -> int:
    """Return the float32 values of the room for each of MOST groups, with contexts of up to `max_blocks` blocks."""
    return max_blocks * _BLOCK_BYTES // 4 + LANES


def lone_rows(
    chunk: int, query: int, out: int, room: int, latents_NBW: Tensor, step: Step, *, heads: int, width: int,
    latent_dim: int, scale: float, window: int,
) -> list[list[int]]:  # fmt: skip
    """Return rows of a program for the chunks that `latents.ATTEND` skips; they do nothing for other chunks.

    Args:
        room: Address of [MOST, `lone_floats`] float32.
        width: Dims of a latent and its rotary key. latent_dim: those of the latent.
        others: As in `latents.latent_rows`.
    """
    table, latents, dtype = step.block_table_SM, latents_NBW.data_ptr(), latents_NBW.dtype
    row_bytes, latent_lanes = latents_NBW.shape[2] * dtype.itemsize, -(-latent_dim // LANES) * LANES
    about = (
        chunk, -(-heads // LANES), step.query_start_S.data_ptr(), step.context_S.data_ptr(), table.data_ptr(),
        table.stride(0) * 8, window, most_lone(step), room, lone_floats(table.shape[1]) * 4,
    )  # fmt: skip
    return [
        SCORE[dtype].row(*about, latents, row_bytes, query, width, latent_dim),
        WEIGH.row(*about, bits_of(scale)),
        MIX[dtype].row(*about, latents, row_bytes, out, latent_lanes, heads),
    ]
