# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: SIM102 - a condition that loads must not be evaluated together with its guard
"""Low-latency dispatch and combine as Triton kernels over a table of the ranks' memory.

A call is a chain of launches: send, wait, order, deliver; then answer, wait, sum. Sending begins and posts the call itself
(BEGINS). Through NVSHMEM, and with very many answers, begin and post are launches too. `flags` has them, and wait. Every rank
has the same layout of symmetric memory (`symmetric`). `peers` holds each rank's base address, or 0 for a peer that NVSHMEM
reaches by puts (`HAS_REMOTE`; compiled, never run).

A message holds, for every token of its sender, the token's choices as the receiver's experts (-1: on another rank), and
the row itself if there is one. A token's label, if there are labels, is in the upper bits of its choices (`pairs.with_label`). A token has one place at every peer, source * M + token. So ranks do not count before
sending and no atomics decide an order: the bits are the reference's. An answer goes to its token's place, one per choice.
The service and DeepEP's interface differ in the position of a row and its answer on the rank that computes:
packed by slot (`pairs.order_pairs`, `deliver_rows`) or in a block of R*M rows for each expert (`order_blocks`,
`deliver_blocks`). Either writes a table `at_NK` with the position of every choice, which the answers use on their way back.

Ideas: DeepEP's low-latency kernels (DeepSeek); flags with numbers: Triton-distributed. Rejected: DeepEP's row
places from atomic counters: their order changes from run to run.

Legend: R ranks, L experts (or slots) of a rank, M most tokens of a rank, K choices, H hidden, N = R*M places. Addresses
are int64; offsets (`_at`) are within the half of the memory that the call uses.
"""

import triton
import triton.language as tl

from dispatch.gpu import nvshmem
from dispatch.gpu.kernels.casts import copy_row, narrow, restore_row, see_row, widen, write_row
from dispatch.gpu.kernels.flags import CAME, end_call, half_at, is_sound, number_of_call
from dispatch.gpu.kernels.pairs import label_of, with_label


@triton.jit(do_not_specialize=["num_tokens", "rank", "kind"])
def send_rows(
    x, topk, labels, sent, sent_bytes, peers, mask, calls, ended, num_tokens, rank, half_bytes, choices_at, rows_at,
    staging_at, kind,
    R: tl.constexpr, L: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, H: tl.constexpr,
    ROW_BYTES: tl.constexpr, SCALES_AT: tl.constexpr, GROUPS: tl.constexpr, IS_FP8: tl.constexpr,
    ROUND_SCALE: tl.constexpr, IS_BFLOAT16: tl.constexpr, HAS_REMOTE: tl.constexpr, BEGINS: tl.constexpr,
):  # fmt: skip
    """Program (token): write the token's choices to every rank, and the row to ranks that hold a chosen expert.

    Runs for all M places; a place without a token is written as one without choices. `sent`, int64 [M, K], keeps the
    choices for the sum. The host does not check choices: one out of range counts as none. Increases `sent_bytes`, int64 [R].
    `labels`: int64, or None.
    """
    token = tl.program_id(0)
    number = number_of_call(calls, BEGINS)
    half = (number & 1) * half_bytes
    choices_at, rows_at, staging_at = choices_at + half, rows_at + half, staging_at + half
    k = tl.arange(0, K_PAD)
    chosen = tl.load(topk + token * K + k, mask=(k < K) & (token < num_tokens), other=-1)
    expert = tl.where((chosen >= 0) & (chosen < R * L), chosen, -1).to(tl.int32)
    tl.store(sent + token * K + k, expert.to(tl.int64), mask=k < K)
    owner = tl.where(expert >= 0, expert // L, -1)
    label = tl.full([], -1, tl.int32)
    if labels is not None:
        label = tl.load(labels + token, mask=token < num_tokens, other=-1).to(tl.int32)
    place = (rank * M + token).to(tl.int64)
    row = x + token.to(tl.int64) * H
    own = tl.load(peers + rank)
    outgoing = own + staging_at + token.to(tl.int64) * ROW_BYTES
    if HAS_REMOTE:
        if token < num_tokens:  # `x` ends with the last token
            write_row(outgoing, row, H, SCALES_AT, GROUPS, IS_FP8, ROUND_SCALE, IS_BFLOAT16)
    for to in range(R):
        local = tl.where(owner == to, expert - to * L, -1)
        is_wanted = tl.max(local, axis=0) >= 0
        if labels is not None:
            local = with_label(local, label)
        if tl.load(mask + to) == 0:
            base = tl.load(peers + to)
            if base != 0:
                choices = (base + choices_at + place * (4 * K)).to(tl.pointer_type(tl.int32))
                tl.store(choices + k, local, mask=k < K)
                if is_wanted:
                    write_row(
                        base + rows_at + place * ROW_BYTES, row,
                        H, SCALES_AT, GROUPS, IS_FP8, ROUND_SCALE, IS_BFLOAT16,
                    )  # fmt: skip
            elif HAS_REMOTE:
                staged = own + staging_at + M * ROW_BYTES + (to * M + token).to(tl.int64) * (4 * K)
                tl.store(staged.to(tl.pointer_type(tl.int32)) + k, local, mask=k < K)
                tl.debug_barrier()
                nvshmem.put_block(own + choices_at + place * (4 * K), staged, 4 * K, to)
                if is_wanted:
                    nvshmem.put_block(own + rows_at + place * ROW_BYTES, outgoing, ROW_BYTES, to)
            if to != rank:
                num_bytes = tl.where(is_wanted, 4 * K + ROW_BYTES, 4 * K)
                tl.atomic_add(sent_bytes + to, num_bytes.to(tl.int64), sem="relaxed")
    if BEGINS:
        end_call(peers, mask, calls, ended, rank, number, half_bytes, kind, tl.num_programs(0), R)


@triton.jit
def deliver_rows(
    rows, choices, at_NK, calls, half_bytes, x_out, labels_out,
    K: tl.constexpr, K_PAD: tl.constexpr, H: tl.constexpr, ROW_BYTES: tl.constexpr, SCALES_AT: tl.constexpr,
    GROUPS: tl.constexpr, IS_FP8: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Program (place): copy its row to x_out [N, H] if a choice is on this rank, widened if it travelled in FP8.

    `rows` and `choices`: addresses of what was received in the first half. `labels_out`, int64 [N], gets the row's label. It is
    None if there are no labels. Other rows of both outputs are not written.
    """
    place, k = tl.program_id(0).to(tl.int64), tl.arange(0, K_PAD)
    if tl.max(tl.load(at_NK + place * K + k, mask=k < K, other=-1), axis=0) >= 0:
        if labels_out is not None:
            chosen = (choices + half_at(calls, half_bytes)).to(tl.pointer_type(tl.int32)) + place * K + k
            label = tl.max(label_of(tl.load(chosen, mask=k < K, other=-1)), axis=0)
            tl.store(labels_out + place, label.to(tl.int64))
        source = rows + half_at(calls, half_bytes) + place * ROW_BYTES
        if IS_FP8:
            restore_row(x_out + place * H, source, H, SCALES_AT, GROUPS, IS_BFLOAT16)
        else:
            copy_row(x_out + place * H, see_row(source, x_out.dtype.element_ty), H)


@triton.jit
def order_blocks(
    choices, arrived, calls, half_bytes, at_NK, counts, layout_range, source_tokens, stats,
    R: tl.constexpr, L: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, TILE: tl.constexpr,
    HAS_STATS: tl.constexpr,
):  # fmt: skip
    """Program (expert, source): order the source's tokens for this expert after those of lower sources.

    A token has one row in an expert's block, even if it chose the expert several times. Every program counts the tokens
    of lower sources itself, so that no program waits for another.

    `choices`: address of int32 [R, M, K] as received, in the first half. `arrived`: int32 [R]. `at_NK`: int32, expert * N +
    row, -1 elsewhere. `counts`: int32 [L]. `layout_range`: int64 [L, R]. `source_tokens`: int32 [L, N].
    """
    local, source = tl.program_id(0), tl.program_id(1)
    k, sound = tl.arange(0, K_PAD), is_sound(arrived, R)
    choices = (choices + half_at(calls, half_bytes)).to(tl.pointer_type(tl.int32))
    before, every = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for place0 in range(0, R * M, TILE):
        place = place0 + tl.arange(0, TILE)
        is_read = place < R * M
        came = tl.load(arrived + place // M, mask=is_read, other=0) == CAME
        at = place[:, None] * K + k[None, :]
        entry = tl.load(choices + at, mask=(is_read & came & sound)[:, None] & (k < K)[None, :], other=-1)
        is_chosen = tl.max((entry == local).to(tl.int32), axis=1)
        every += is_chosen
        before += tl.where(place < source * M, is_chosen, 0)
        if local == 0:
            is_none = is_read[:, None] & (k < K)[None, :] & (entry < 0) & (place // M == source)[:, None]
            tl.store(at_NK + at, -1, mask=is_none)
    first = tl.sum(before, axis=0)
    begin = first
    did_come = sound & (tl.load(arrived + source) == CAME)
    for token0 in range(0, M, TILE):
        token = token0 + tl.arange(0, TILE)
        at = (source * M + token[:, None]) * K + k[None, :]
        is_read = ((token < M) & did_come)[:, None] & (k < K)[None, :]
        is_mine = tl.load(choices + at, mask=is_read, other=-1) == local
        is_chosen = tl.max(is_mine.to(tl.int32), axis=1)
        row = local * (R * M) + begin + tl.cumsum(is_chosen, axis=0) - 1
        tl.store(source_tokens + row, token, mask=is_chosen != 0)
        tl.store(at_NK + at, row[:, None] + tl.zeros([TILE, K_PAD], tl.int32), mask=is_mine)
        begin += tl.sum(is_chosen, axis=0)
    packed = (first.to(tl.int64) << 32) | (begin - first).to(tl.int64)
    tl.store(layout_range + local * R + source, packed)
    if source == 0:
        count = tl.sum(every, axis=0)
        tl.store(counts + local, count)
        if HAS_STATS:
            tl.store(stats + local, tl.load(stats + local) + count)


@triton.jit
def deliver_blocks(
    rows, at_NK, calls, half_bytes, x_out, scales_out,
    N: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, H: tl.constexpr, ROW_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALES: tl.constexpr, SCALES_PAD: tl.constexpr, IS_FP8: tl.constexpr,
    IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Program (place, choice): copy the place's row to the block of this choice, and the scales to their columns.

    `x_out`: [L, N, H]. `scales_out`: [L, SCALES or words, N]: float32, or with IS_UE8M0 uint8 of [L, words, N, 4].
    """
    place, choice, k = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, K_PAD)
    at = tl.load(at_NK + place * K + choice)
    earlier = tl.load(at_NK + place * K + k, mask=k < choice, other=-1)
    if (at >= 0) & (tl.sum((earlier == at).to(tl.int32), axis=0) == 0):
        source = rows + half_at(calls, half_bytes) + place * ROW_BYTES
        copy_row(x_out + at.to(tl.int64) * H, see_row(source, x_out.dtype.element_ty), H)
        if IS_FP8:
            local, row, b = at // N, at % N, tl.arange(0, SCALES_PAD)
            scale = tl.load(see_row(source + SCALES_AT, tl.int32) + b, mask=b < SCALES, other=0)
            if IS_UE8M0:
                words: tl.constexpr = (SCALES + 3) // 4
                column = ((local * words + b // 4) * N + row) * 4 + b % 4
                tl.store(scales_out + column, ((scale >> 23) & 255).to(tl.uint8), mask=b < 4 * words)
            else:
                tl.store(scales_out + (local * SCALES + b) * N + row, scale, mask=b < SCALES)


@triton.jit(do_not_specialize=["rank", "kind"])
def send_answers(
    y, at_NK, sent_bytes, peers, mask, calls, ended, rank, half_bytes, answers_at, staging_at, kind,
    R: tl.constexpr, M: tl.constexpr, K: tl.constexpr, H: tl.constexpr, ANSWER_BYTES: tl.constexpr,
    HAS_REMOTE: tl.constexpr, BEGINS: tl.constexpr,
):  # fmt: skip
    """Program (place, choice): write the choice's answer, a row of `y`, to its place [token, choice] at the source.

    `sent_bytes`, int64 [R], is increased.
    """
    place, choice = tl.program_id(0), tl.program_id(1)
    number = number_of_call(calls, BEGINS)
    at = tl.load(at_NK + place * K + choice)
    if at >= 0:
        source, token = place // M, place % M
        if tl.load(mask + source) == 0:
            half = (number & 1) * half_bytes
            base, answer = tl.load(peers + source), y + at.to(tl.int64) * H
            target = answers_at + half + (token * K + choice).to(tl.int64) * ANSWER_BYTES
            if base != 0:
                copy_row(see_row(base + target, y.dtype.element_ty), answer, H)
            elif HAS_REMOTE:
                own = tl.load(peers + rank)
                outgoing = own + staging_at + half + (place * K + choice).to(tl.int64) * ANSWER_BYTES
                copy_row(see_row(outgoing, y.dtype.element_ty), answer, H)
                tl.debug_barrier()
                nvshmem.put_block(own + target, outgoing, ANSWER_BYTES, source)
            if source != rank:
                tl.atomic_add(sent_bytes + source, tl.full([], ANSWER_BYTES, tl.int64), sem="relaxed")
    if BEGINS:
        programs = tl.num_programs(0) * tl.num_programs(1)
        end_call(peers, mask, calls, ended, rank, number, half_bytes, kind, programs, R)


@triton.jit
def sum_answers(
    answers, arrived, calls, half_bytes, topk, sent, weights, added, out,
    R: tl.constexpr, L: tl.constexpr, K: tl.constexpr, H: tl.constexpr, ANSWER_BYTES: tl.constexpr,
    TILE: tl.constexpr, IS_BFLOAT16: tl.constexpr, HAS_BFLOAT16_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Program (token, tile): add weight times answer for k = 0..K-1 in float32, and round once. As in `pairs.sum_pairs`, the
    loop is unrolled and masks replace branches, so that all answers are loaded at once.

    `answers`: address of [M, K] places in the first half. `sent`: the dispatched choices. A choice in `topk` that
    differs from them adds nothing, and neither does a choice of a rank without answers. `added` has a row for each token,
    added to the rounded sum, or is None.
    """
    token, at = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    answers += half_at(calls, half_bytes)
    sound = is_sound(arrived, R)
    for k in tl.static_range(K):
        expert = tl.load(topk + token * K + k)
        is_there = sound & (expert >= 0) & (expert == tl.load(sent + token * K + k))
        is_there &= tl.load(arrived + expert // L, mask=is_there, other=0) == CAME
        place = see_row(answers + (token * K + k).to(tl.int64) * ANSWER_BYTES, out.dtype.element_ty)
        answer = tl.load(place + at, mask=(at < H) & is_there, other=0)
        weight = widen(tl.load(weights + token * K + k, mask=is_there, other=0), HAS_BFLOAT16_WEIGHTS)
        total += weight * widen(answer, IS_BFLOAT16)
    result = narrow(total, out.dtype.element_ty, IS_BFLOAT16)
    row = token.to(tl.int64) * H
    if added is not None:
        other = widen(tl.load(added + row + at, mask=at < H, other=0), IS_BFLOAT16)
        result = narrow(widen(result, IS_BFLOAT16) + other, out.dtype.element_ty, IS_BFLOAT16)
    tl.store(out + row + at, result, mask=at < H)
