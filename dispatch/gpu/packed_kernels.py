# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Bring what a low-latency dispatch delivered into the form that the service computes on, without the host.

The service's experts read rows where they lie and pairs by slot, packed; DeepEP's interface has a block of R*M rows per
expert instead, in which a token lies once per expert. Here a row is copied once per rank, so that what is written is a
K-th where all choices are here, and memory does not grow with the number of slots.

Legend as in `kernels`; P pairs, of which there is room for `room`; a place is source * M + token.
"""

import triton
import triton.language as tl

from dispatch.gpu.casts import copy_row, restore_row
from dispatch.gpu.flags import CAME, half_at, is_sound


@triton.jit
def deliver_places(
    entries, rows, arrived, calls, half_bytes, x_out,
    R: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, H: tl.constexpr, ROW_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr, GROUPS: tl.constexpr, IS_FP8: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Program (place): copy its row to x_out [R*M, H] where one has come, widened if it travelled in FP8.

    `entries`, `rows`: addresses in the first half, of int32 [R, M, K] and of what has travelled.
    """
    place = tl.program_id(0)
    k, half = tl.arange(0, K_PAD), half_at(calls, half_bytes)
    if is_sound(arrived, R) & (tl.load(arrived + place // M) == CAME):
        entry = tl.load((entries + half).to(tl.pointer_type(tl.int32)) + place * K + k, mask=k < K, other=-1)
        if tl.max(entry, axis=0) >= 0:
            source = rows + half + place.to(tl.int64) * ROW_BYTES
            target = x_out + place.to(tl.int64) * H
            if IS_FP8:
                restore_row(target, source, H, SCALES_AT, GROUPS, IS_BFLOAT16)
            else:
                copy_row(target, source.to(tl.pointer_type(x_out.dtype.element_ty)), H, GROUPS * 128)


@triton.jit(do_not_specialize=["rank", "room"])
def pack_pairs(
    counts, row_places, layout_range, sent, offsets, row_of_pair, sent_bytes, answer_bytes, rank, room,
    R: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    TILE: tl.constexpr, ROW_BYTES: tl.constexpr, ANSWER_BYTES: tl.constexpr,
):  # fmt: skip
    """Program (local expert): its pairs' rows, behind those of the experts before it. Program L ends the offsets and fills
    what is left of the room with row 0; the R programs behind it count what goes to each rank, now and as answers.

    `offsets`: int64 [L+1]. `row_of_pair`: int64 [room]. `sent_bytes`, `answer_bytes`: int64 [R], added to.
    """
    local, expert = tl.program_id(0), tl.arange(0, L_PAD)
    if local <= L:
        count_L = tl.load(counts + expert, mask=expert < L, other=0)
        begin = tl.sum(tl.where(expert < local, count_L, 0), axis=0)
        own = tl.sum(tl.where(expert == local, count_L, 0), axis=0)
        count = tl.where(local < L, own, room - begin)
        tl.store(offsets + local, begin.to(tl.int64))
        row = 0
        while row < count:  # not a range: the interpreter cannot count to a loaded number
            at = row + tl.arange(0, TILE)
            place = tl.load(row_places + local * (R * M) + at, mask=(at < count) & (local < L), other=0)
            tl.store(row_of_pair + begin + at, place.to(tl.int64), mask=at < count)
            row += TILE
    elif local - (L + 1) != rank:
        peer = local - (L + 1)
        _count_sent(sent, sent_bytes + peer, peer, L, M, K, K_PAD, TILE, ROW_BYTES)
        owed = tl.load(layout_range + expert * R + peer, mask=expert < L, other=0) & 0xFFFFFFFF
        tl.store(answer_bytes + peer, tl.load(answer_bytes + peer) + tl.sum(owed, axis=0) * ANSWER_BYTES)


@triton.jit
def _count_sent(
    sent, total, peer,
    L: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, TILE: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Add the bytes of entries and rows that a peer was sent."""
    k, num_rows = tl.arange(0, K_PAD), tl.zeros([TILE], tl.int64)
    for token0 in range(0, M, TILE):
        token = token0 + tl.arange(0, TILE)
        is_read = (token[:, None] < M) & (k[None, :] < K)
        chosen = tl.load(sent + token[:, None] * K + k[None, :], mask=is_read, other=-1)
        is_there = (chosen >= peer * L) & (chosen < (peer + 1) * L)
        num_rows += tl.max(is_there.to(tl.int64), axis=1)
    num_bytes = tl.sum(num_rows, axis=0) * ROW_BYTES + M * (4 * K)
    tl.store(total, tl.load(total) + num_bytes)
