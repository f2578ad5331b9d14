# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: SIM102 - a condition that loads must not be evaluated beside the one that guards it
"""Low-latency combine as Triton kernels: answers go to their token's place at its rank, which sums them.

How ranks meet is said in `kernels`; legend as there.
"""

import triton
import triton.language as tl

from dispatch.gpu import nvshmem
from dispatch.gpu.casts import copy_row, narrow, widen
from dispatch.gpu.flags import CAME, half_at, is_sound


@triton.jit(do_not_specialize=["rank"])
def send_answers(
    y, starts, counts, row_places, row_choices, peers, mask, calls, rank, half_bytes, answers_at, staging_at,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, ANSWER_BYTES: tl.constexpr, TILE: tl.constexpr,
    IS_PACKED: tl.constexpr, HAS_REMOTE: tl.constexpr,
):  # fmt: skip
    """Program (local expert, lane): write each answer to its token's place [token, choice] at the source.

    An expert's answers begin at `starts`, int64 [L], if IS_PACKED, else every N rows of `y`.
    """
    local, lane = tl.program_id(0), tl.program_id(1)
    row, count = lane, tl.load(counts + local)
    start = tl.load(starts + local) if IS_PACKED else local.to(tl.int64) * N
    half = half_at(calls, half_bytes)
    answers_at, staging_at = answers_at + half, staging_at + half
    while row < count:  # not a range: the interpreter cannot count to a loaded number
        place, choice = tl.load(row_places + local * N + row), tl.load(row_choices + local * N + row)
        source, token = place // M, place % M
        at = answers_at + (token * K + choice).to(tl.int64) * ANSWER_BYTES
        answer = y + (start + row) * H
        if tl.load(mask + source) == 0:
            base = tl.load(peers + source)
            if base != 0:
                copy_row((base + at).to(tl.pointer_type(y.dtype.element_ty)), answer, H, TILE)
            elif HAS_REMOTE:
                own = tl.load(peers + rank)
                outgoing = own + staging_at + (start + row) * ANSWER_BYTES
                copy_row(outgoing.to(tl.pointer_type(y.dtype.element_ty)), answer, H, TILE)
                tl.debug_barrier()
                nvshmem.put_block(own + at, outgoing, ANSWER_BYTES, source)
        row += tl.num_programs(1)


@triton.jit
def sum_answers(
    answers, arrived, calls, half_bytes, topk, sent, weights, out,
    R: tl.constexpr, L: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, H: tl.constexpr,
    ANSWER_BYTES: tl.constexpr, TILE: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Program (token, tile): add weight times answer for k = 0..K-1 in float32, and round once.

    `answers`: address of [M, K] places, in the first half. `sent`: the choices as dispatched: a repeated expert answered at its first,
    and what was not dispatched adds nothing.
    """
    token, first = tl.program_id(0), tl.program_id(1) * TILE
    k = tl.arange(0, K_PAD)
    at = first + tl.arange(0, TILE)
    sent_K = tl.load(sent + token * K + k, mask=k < K, other=-1)
    total = tl.zeros([TILE], tl.float32)
    answers += half_at(calls, half_bytes)
    sound = is_sound(arrived, R)
    for i in range(K):
        expert = tl.load(topk + token * K + i)
        choice = tl.min(tl.where(sent_K == expert, k, K), axis=0)
        if sound & (expert >= 0) & (choice < K):
            if tl.load(arrived + expert // L) == CAME:
                place = answers + (token * K + choice).to(tl.int64) * ANSWER_BYTES
                answer = tl.load(place.to(tl.pointer_type(out.dtype.element_ty)) + at, mask=at < H, other=0)
                total += tl.load(weights + token * K + i) * widen(answer, IS_BFLOAT16)
    result = narrow(total, out.dtype.element_ty, IS_BFLOAT16)
    tl.store(out + token.to(tl.int64) * H + at, result, mask=at < H)
