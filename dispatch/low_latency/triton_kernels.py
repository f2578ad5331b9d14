# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: SIM102 - a condition that loads must not be evaluated beside the one that guards it
"""Low-latency dispatch as Triton kernels over a table of the ranks' memory: store to the peer, raise a flag, wait.

Every rank has the same layout of symmetric memory (`symmetric.py`); the table holds each rank's base address, or 0 for a
peer that cannot be addressed and is reached by NVSHMEM (`HAS_REMOTE`, `triton_nvshmem.py`). Flags carry the number of
the call and numbers only grow, so nothing is ever cleared; two phases are enough, as in `transports.signals`.
No atomics decide an order: a token has one place at each peer, and receivers count. Hence the same bits as the oracle.

A call is a chain of launches: send, post, wait, place, deliver; answer, post, wait, sum. A kernel's end orders its
stores before the next one's release. Compile without floating-point fusion: products are rounded before they are added.
Casts to FP8 and bfloat16 are written in integers: the same in the interpreter, on every GPU and in torch.

Ideas: DeepEP's low-latency kernels (DeepSeek); flags that carry a number: Triton-distributed. Rejected: DeepEP's row
places by atomic counters, whose order changes from run to run.

Legend: R ranks, L experts per rank, M most tokens of a rank, K choices, H hidden, N = R*M. Addresses are int64.
"""

import triton
import triton.language as tl

from dispatch.low_latency import triton_nvshmem as nvshmem

_CHANNELS = tl.constexpr(128)  # per FP8 scale
_FP8_MAX = tl.constexpr(448.0)
_AMAX_FLOOR = tl.constexpr(1e-4)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NAN_BITS = tl.constexpr(0x7FC00000)
_NORMAL_FROM = tl.constexpr(121 << 23)  # see `cpu_fp8` for these
_SUBNORMAL_SHIFT = tl.constexpr(16384.0)
_SUBNORMAL_SHIFT_BITS = tl.constexpr(141 << 23)
_LOST_FROM = tl.constexpr(1087 << 20)
_REBIAS = tl.constexpr((7 - 127) * (1 << 23) + 0x7FFFF)


@triton.jit
def _e4m3_bits(values):
    """Round float32 to nearest e4m3, as its bits."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    normal = (magnitude + _REBIAS + ((magnitude >> 20) & 1)) >> 20
    shifted = magnitude.to(tl.float32, bitcast=True) + _SUBNORMAL_SHIFT
    small = shifted.to(tl.int32, bitcast=True) - _SUBNORMAL_SHIFT_BITS
    code = tl.where(magnitude >= _NORMAL_FROM, normal, small)
    code = tl.where(magnitude >= _LOST_FROM, 0x7F, code)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def _scales_of(values, ROUND_SCALE: tl.constexpr):
    """Return each row's scale and its inverse, as `dispatch.fp8` defines them."""
    top = tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)  # as integers NaN is the largest
    largest = top.to(tl.float32, bitcast=True)
    largest = tl.where(largest < _AMAX_FLOOR, _AMAX_FLOOR, largest)
    limit = tl.full(largest.shape, _FP8_MAX, tl.float32)
    scale, factor = tl.div_rn(largest, limit), tl.div_rn(limit, largest)
    if ROUND_SCALE:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = tl.where(exponent < 255, exponent << 23, _NAN_BITS).to(tl.float32, bitcast=True)
        factor = tl.where(exponent < 255, (254 - exponent) << 23, _NAN_BITS).to(tl.float32, bitcast=True)
    return scale, factor


@triton.jit
def _bfloat16_bits(values):
    """Round float32 to nearest even bfloat16, as its bits."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & _MAGNITUDE) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def _widen(values, IS_BFLOAT16: tl.constexpr):
    """Turn stored bits, int16 of bfloat16 or float32, into float32."""
    if IS_BFLOAT16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values


@triton.jit
def _copy_row(target, source, H: tl.constexpr, TILE: tl.constexpr):
    """Copy H elements of the pointers' type."""
    for first in range(0, H, TILE):
        at = first + tl.arange(0, TILE)
        tl.store(target + at, tl.load(source + at, mask=at < H), mask=at < H)


@triton.jit
def _quantise_row(
    target,
    scales,
    row,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUND_SCALE: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
):
    """Write a row's e4m3 bits to the uint8 address `target` and its scales to the float32 address `scales`."""
    for first in range(0, H, GROUPS * _CHANNELS):
        group, channel = tl.arange(0, GROUPS), tl.arange(0, _CHANNELS)
        at = first + group[:, None] * _CHANNELS + channel[None, :]
        values = _widen(tl.load(row + at, mask=at < H, other=0), IS_BFLOAT16)
        scale, factor = _scales_of(values, ROUND_SCALE)
        tl.store(target + at, _e4m3_bits(values * factor[:, None]), mask=at < H)
        index = first // _CHANNELS + group
        tl.store(scales + index, scale, mask=index * _CHANNELS < H)


@triton.jit(do_not_specialize=["num_tokens", "rank"])
def send_rows(
    x, topk, sent, peers, mask, num_tokens, rank, entries_at, rows_at, staging_at,
    R: tl.constexpr, L: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, H: tl.constexpr,
    ROW_BYTES: tl.constexpr, SCALES_AT: tl.constexpr, GROUPS: tl.constexpr, IS_FP8: tl.constexpr,
    ROUND_SCALE: tl.constexpr, IS_BFLOAT16: tl.constexpr, HAS_REMOTE: tl.constexpr,
):  # fmt: skip
    """Program (token): tell every rank which of its experts the token chose, and give the row to those that have one.

    Runs for all M places, so that a place without a token says so. `sent` [M, K] keeps the choices for the sum.
    """
    token = tl.program_id(0)
    k = tl.arange(0, K_PAD)
    is_choice = (k < K) & (token < num_tokens)
    expert = tl.load(topk + token * K + k, mask=is_choice, other=-1).to(tl.int32)
    tl.store(sent + token * K + k, expert, mask=k < K)
    is_twin = (expert[:, None] == expert[None, :]) & (k[None, :] < k[:, None])
    expert = tl.where(tl.sum(is_twin.to(tl.int32), axis=1) > 0, -1, expert)
    owner = tl.where(expert >= 0, expert // L, -1)
    place = (rank * M + token).to(tl.int64)
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
    row = x + token.to(tl.int64) * H
    if HAS_REMOTE:
        _write_row(
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
                    _write_row(
                        base + rows_at + place * ROW_BYTES, row,
                        H, SCALES_AT, GROUPS, IS_FP8, ROUND_SCALE, IS_BFLOAT16,
                    )  # fmt: skip
                elif HAS_REMOTE:
                    own = tl.load(peers + rank)
                    outgoing = own + staging_at + token.to(tl.int64) * ROW_BYTES
                    nvshmem.put_block(own + rows_at + place * ROW_BYTES, outgoing, ROW_BYTES, to)


@triton.jit
def _write_row(
    address, row, H: tl.constexpr, SCALES_AT: tl.constexpr, GROUPS: tl.constexpr, IS_FP8: tl.constexpr,
    ROUND_SCALE: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Write one row as it travels."""
    if IS_FP8:
        _quantise_row(
            address.to(tl.pointer_type(tl.uint8)), (address + SCALES_AT).to(tl.pointer_type(tl.float32)), row,
            H, GROUPS, ROUND_SCALE, IS_BFLOAT16,
        )  # fmt: skip
    else:
        _copy_row(address.to(tl.pointer_type(row.dtype.element_ty)), row, H, GROUPS * _CHANNELS)


@triton.jit(do_not_specialize=["rank", "number"])
def post_flags(peers, mask, rank, flags_at, number, HAS_REMOTE: tl.constexpr):
    """Program (peer): publish what earlier launches wrote there, with the call's number."""
    peer = tl.program_id(0)
    if tl.load(mask + peer) == 0:
        base = tl.load(peers + peer)
        if base != 0:
            flag = (base + flags_at).to(tl.pointer_type(tl.int32)) + rank
            tl.atomic_xchg(flag, number, sem="release", scope="sys")
        elif HAS_REMOTE:
            own = tl.load(peers + rank)
            nvshmem.quiet()
            nvshmem.set_flag(own + flags_at + rank * 4, number, peer)


@triton.jit(do_not_specialize=["rank", "number"])
def wait_flags(peers, mask, arrived, polls, rank, flags_at, number, max_polls, IS_MASKING: tl.constexpr):
    """Program (source): wait for its flag, at most `max_polls` times; note whether it came.

    `arrived`: int32 [R], 1 or 0. `polls`: int64 [R], to which the number of looks is added. A source that is late is
    masked where `IS_MASKING`; otherwise only `arrived` says so, and the host must look.
    """
    source = tl.program_id(0)
    flag = (tl.load(peers + rank) + flags_at).to(tl.pointer_type(tl.int32)) + source
    has_come, looks = 0, 0
    if tl.load(mask + source) == 0:
        has_come = (tl.atomic_add(flag, 0, sem="acquire", scope="sys") >= number).to(tl.int32)
        while (has_come == 0) & (looks < max_polls):
            has_come = (tl.atomic_add(flag, 0, sem="acquire", scope="sys") >= number).to(tl.int32)
            looks += 1
        if IS_MASKING:
            if has_come == 0:
                tl.store(mask + source, 1)
    tl.store(arrived + source, has_come)
    tl.store(polls + source, tl.load(polls + source) + looks)


@triton.jit
def place_rows(
    entries, arrived, counts, layout_range, source_tokens, row_places, row_choices, stats,
    R: tl.constexpr, L: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, TILE: tl.constexpr,
    HAS_STATS: tl.constexpr,
):  # fmt: skip
    """Program (local expert): count its rows and order them by source, then token.

    `entries`: address of int32 [R, M, K] as received. `row_places`: int32 [L, N], source * M + token. `row_choices`: int32 [L, N],
    which of its token's choices this expert is: where the answer goes.
    """
    local = tl.program_id(0)
    k = tl.arange(0, K_PAD)
    begin = tl.full([], 0, tl.int32)
    entries = entries.to(tl.pointer_type(tl.int32))
    for source in range(R):
        first = begin
        if tl.load(arrived + source) != 0:
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
    rows, counts, row_places, x_out, scales_out,
    N: tl.constexpr, H: tl.constexpr, ROW_BYTES: tl.constexpr, SCALES_AT: tl.constexpr, SCALES: tl.constexpr,
    SCALES_PAD: tl.constexpr, TILE: tl.constexpr, IS_FP8: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Program (local expert, lane): copy every lanes-th of its rows, and the scales to their columns.

    `rows`: address of the received rows. `x_out`: [L, N, H]. `scales_out`: [L, SCALES or words, N]: float32, or with
    IS_UE8M0 uint8 of [L, words, N, 4].
    """
    local, lane = tl.program_id(0), tl.program_id(1)
    row, count = lane, tl.load(counts + local)
    while row < count:  # not a range: the interpreter cannot count to a loaded number
        source = rows + tl.load(row_places + local * N + row).to(tl.int64) * ROW_BYTES
        target = x_out + (local * N + row).to(tl.int64) * H
        _copy_row(target, source.to(tl.pointer_type(x_out.dtype.element_ty)), H, TILE)
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


@triton.jit(do_not_specialize=["rank"])
def send_answers(
    y, counts, row_places, row_choices, peers, mask, rank, answers_at, staging_at,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, ANSWER_BYTES: tl.constexpr, TILE: tl.constexpr,
    HAS_REMOTE: tl.constexpr,
):  # fmt: skip
    """Program (local expert, lane): write each answer to its token's place [token, choice] at the source."""
    local, lane = tl.program_id(0), tl.program_id(1)
    row, count = lane, tl.load(counts + local)
    while row < count:  # not a range: the interpreter cannot count to a loaded number
        place, choice = tl.load(row_places + local * N + row), tl.load(row_choices + local * N + row)
        source, token = place // M, place % M
        at = answers_at + (token * K + choice).to(tl.int64) * ANSWER_BYTES
        answer = y + (local * N + row).to(tl.int64) * H
        if tl.load(mask + source) == 0:
            base = tl.load(peers + source)
            if base != 0:
                _copy_row((base + at).to(tl.pointer_type(y.dtype.element_ty)), answer, H, TILE)
            elif HAS_REMOTE:
                own = tl.load(peers + rank)
                outgoing = own + staging_at + (local * N + row).to(tl.int64) * ANSWER_BYTES
                _copy_row(outgoing.to(tl.pointer_type(y.dtype.element_ty)), answer, H, TILE)
                tl.debug_barrier()
                nvshmem.put_block(own + at, outgoing, ANSWER_BYTES, source)
        row += tl.num_programs(1)


@triton.jit
def sum_answers(
    answers, arrived, topk, sent, weights, out,
    L: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, H: tl.constexpr, ANSWER_BYTES: tl.constexpr,
    TILE: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Program (token, tile): add weight times answer for k = 0..K-1 in float32, and round once.

    `answers`: address of [M, K] places. `sent`: the choices as dispatched: a repeated expert answered at its first.
    """
    token, first = tl.program_id(0), tl.program_id(1) * TILE
    k = tl.arange(0, K_PAD)
    at = first + tl.arange(0, TILE)
    sent_K = tl.load(sent + token * K + k, mask=k < K, other=-1)
    total = tl.zeros([TILE], tl.float32)
    for i in range(K):
        expert = tl.load(topk + token * K + i).to(tl.int32)
        if expert >= 0:
            if tl.load(arrived + expert // L) != 0:
                choice = tl.min(tl.where(sent_K == expert, k, K), axis=0)
                place = answers + (token * K + choice).to(tl.int64) * ANSWER_BYTES
                answer = tl.load(place.to(tl.pointer_type(out.dtype.element_ty)) + at, mask=at < H, other=0)
                total += tl.load(weights + token * K + i) * _widen(answer, IS_BFLOAT16)
    result = _bfloat16_bits(total) if IS_BFLOAT16 else total
    tl.store(out + token.to(tl.int64) * H + at, result, mask=at < H)
