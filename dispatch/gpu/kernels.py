# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: SIM102 - a condition that loads must not be evaluated beside the one that guards it
"""Low-latency dispatch as Triton kernels over a table of the ranks' memory: store to the peer, raise a flag, wait.

Every rank has the same layout of symmetric memory (`symmetric.py`); the table holds each rank's base address, or 0 for a
peer that cannot be addressed and is reached by NVSHMEM (`HAS_REMOTE`, `triton_nvshmem.py`; compiled, never run). Two
phases are enough, as in `wires.signals`.
No atomics decide an order: a token has one place at each peer, and receivers count. Hence the same bits as the oracle.

A call is a chain of launches: begin, send, post, wait, place, deliver; begin, answer, post, wait, sum (`flags`,
`answers`, `casts`).

Ideas: DeepEP's low-latency kernels (DeepSeek); flags that carry a number: Triton-distributed. Rejected: DeepEP's row
places by atomic counters, whose order changes from run to run.

Legend: R ranks, L experts per rank, M most tokens of a rank, K choices, H hidden, N = R*M. Addresses are int64.
"""

import triton
import triton.language as tl

from dispatch.gpu import nvshmem
from dispatch.gpu.casts import copy_row, write_row
from dispatch.gpu.flags import CAME, half_at, is_sound


@triton.jit(do_not_specialize=["num_tokens", "rank"])
def send_rows(
    x, topk, sent, peers, mask, calls, num_tokens, rank, half_bytes, entries_at, rows_at, staging_at,
    R: tl.constexpr, L: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, H: tl.constexpr,
    ROW_BYTES: tl.constexpr, SCALES_AT: tl.constexpr, GROUPS: tl.constexpr, IS_FP8: tl.constexpr,
    ROUND_SCALE: tl.constexpr, IS_BFLOAT16: tl.constexpr, HAS_REMOTE: tl.constexpr,
):  # fmt: skip
    """Program (token): tell every rank which of its experts the token chose, and give the row to those that have one.

    Runs for all M places, so that a place without a token says so. `sent` int64 [M, K] keeps the choices for the sum.
    A choice out of range is no choice: nobody looked before, and nothing is to be written out of place.
    """
    token = tl.program_id(0)
    half = half_at(calls, half_bytes)
    entries_at, rows_at, staging_at = entries_at + half, rows_at + half, staging_at + half
    k = tl.arange(0, K_PAD)
    is_choice = (k < K) & (token < num_tokens)
    chosen = tl.load(topk + token * K + k, mask=is_choice, other=-1)
    expert = tl.where((chosen >= 0) & (chosen < R * L), chosen, -1).to(tl.int32)
    tl.store(sent + token * K + k, expert.to(tl.int64), mask=k < K)
    is_twin = (expert[:, None] == expert[None, :]) & (k[None, :] < k[:, None])
    expert = tl.where(tl.sum(is_twin.to(tl.int32), axis=1) > 0, -1, expert)
    owner = tl.where(expert >= 0, expert // L, -1)
    place = (rank * M + token).to(tl.int64)
    _announce(
        expert, owner, place, token, peers, mask, rank, entries_at, staging_at, R, L, M, K, K_PAD, ROW_BYTES, HAS_REMOTE,
    )  # fmt: skip
    row = x + token.to(tl.int64) * H
    if HAS_REMOTE:
        write_row(
            tl.load(peers + rank) + staging_at + token.to(tl.int64) * ROW_BYTES, row,
            H, SCALES_AT, GROUPS, IS_FP8, ROUND_SCALE, IS_BFLOAT16,
        )  # fmt: skip
        tl.debug_barrier()
    for i in range(K):
        to = tl.max(tl.where(k == i, owner, -1), axis=0)
        is_first = tl.sum(((owner == to) & (k < i)).to(tl.int32), axis=0) == 0
        if (to >= 0) & is_first:
            if tl.load(mask + to) == 0:
                base = tl.load(peers + to)
                if base != 0:
                    write_row(
                        base + rows_at + place * ROW_BYTES, row,
                        H, SCALES_AT, GROUPS, IS_FP8, ROUND_SCALE, IS_BFLOAT16,
                    )  # fmt: skip
                elif HAS_REMOTE:
                    own = tl.load(peers + rank)
                    outgoing = own + staging_at + token.to(tl.int64) * ROW_BYTES
                    nvshmem.put_block(own + rows_at + place * ROW_BYTES, outgoing, ROW_BYTES, to)


@triton.jit
def _announce(
    expert, owner, place, token, peers, mask, rank, entries_at, staging_at,
    R: tl.constexpr, L: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, ROW_BYTES: tl.constexpr,
    HAS_REMOTE: tl.constexpr,
):  # fmt: skip
    """Write to every rank which of its experts a token is for, at its place; -1 for those of others."""
    k = tl.arange(0, K_PAD)
    for r in range(R):
        base = tl.load(peers + r)
        entry = tl.where(owner == r, expert - r * L, -1)
        if tl.load(mask + r) == 0:
            if base != 0:
                tl.store(
                    (base + entries_at + place * (4 * K)).to(tl.pointer_type(tl.int32)) + k, entry, mask=k < K
                )
            elif HAS_REMOTE:
                own = tl.load(peers + rank)
                outgoing = own + staging_at + M * ROW_BYTES + (r * M + token).to(tl.int64) * (4 * K)
                tl.store(outgoing.to(tl.pointer_type(tl.int32)) + k, entry, mask=k < K)
                tl.debug_barrier()
                nvshmem.put_block(own + entries_at + place * (4 * K), outgoing, 4 * K, r)


@triton.jit
def place_rows(
    entries, arrived, calls, half_bytes, counts, layout_range, source_tokens, row_places, row_choices, stats,
    R: tl.constexpr, L: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, TILE: tl.constexpr,
    HAS_STATS: tl.constexpr,
):  # fmt: skip
    """Program (local expert): count its rows and order them by source, then token.

    `entries`: address of int32 [R, M, K] as received, in the first half. `arrived`: int32 [R]. `row_places`: int32 [L, N],
    source * M + token. `row_choices`: int32 [L, N], which of its token's choices this expert is: where the answer goes.
    """
    local = tl.program_id(0)
    k = tl.arange(0, K_PAD)
    begin = tl.full([], 0, tl.int32)
    sound = is_sound(arrived, R)
    entries = (entries + half_at(calls, half_bytes)).to(tl.pointer_type(tl.int32))
    for source in range(R):
        first = begin
        if sound & (tl.load(arrived + source) == CAME):
            for token0 in range(0, M, TILE):
                token = token0 + tl.arange(0, TILE)
                at = (source * M + token[:, None]) * K + k[None, :]
                entry = tl.load(entries + at, mask=(token[:, None] < M) & (k[None, :] < K), other=-1)
                is_mine = (entry == local).to(tl.int32)
                is_chosen = tl.max(is_mine, axis=1)
                row = local * (R * M) + begin + tl.cumsum(is_chosen, axis=0) - 1
                tl.store(source_tokens + row, token, mask=is_chosen != 0)
                tl.store(row_places + row, source * M + token, mask=is_chosen != 0)
                tl.store(row_choices + row, tl.max(is_mine * k[None, :], axis=1), mask=is_chosen != 0)
                begin += tl.sum(is_chosen, axis=0)
        packed = (first.to(tl.int64) << 32) | (begin - first).to(tl.int64)
        tl.store(layout_range + local * R + source, packed)
    tl.store(counts + local, begin)
    if HAS_STATS:
        tl.store(stats + local, tl.load(stats + local) + begin)


@triton.jit
def deliver_rows(
    rows, counts, row_places, calls, half_bytes, x_out, scales_out,
    N: tl.constexpr, H: tl.constexpr, ROW_BYTES: tl.constexpr, SCALES_AT: tl.constexpr, SCALES: tl.constexpr,
    SCALES_PAD: tl.constexpr, TILE: tl.constexpr, IS_FP8: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Program (local expert, lane): copy every lanes-th of its rows, and the scales to their columns.

    `rows`: address of the received rows, in the first half. `x_out`: [L, N, H]. `scales_out`: [L, SCALES or words, N]: float32, or with
    IS_UE8M0 uint8 of [L, words, N, 4].
    """
    local, lane = tl.program_id(0), tl.program_id(1)
    row, count = lane, tl.load(counts + local)
    rows += half_at(calls, half_bytes)
    while row < count:  # not a range: the interpreter cannot count to a loaded number
        source = rows + tl.load(row_places + local * N + row).to(tl.int64) * ROW_BYTES
        target = x_out + (local * N + row).to(tl.int64) * H
        copy_row(target, source.to(tl.pointer_type(x_out.dtype.element_ty)), H, TILE)
        if IS_FP8:
            b = tl.arange(0, SCALES_PAD)
            scale = tl.load((source + SCALES_AT).to(tl.pointer_type(tl.int32)) + b, mask=b < SCALES, other=0)
            if IS_UE8M0:
                words: tl.constexpr = (SCALES + 3) // 4
                at = ((local * words + b // 4) * N + row) * 4 + b % 4
                tl.store(scales_out + at, ((scale >> 23) & 255).to(tl.uint8), mask=b < 4 * words)
            else:
                tl.store(scales_out + (local * SCALES + b) * N + row, scale, mask=b < SCALES)
        row += tl.num_programs(1)
