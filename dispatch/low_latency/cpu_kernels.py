"""The passes of low-latency dispatch for the CPU, compiled: plan, pack, order and deliver. `cpu_answers` has combine's.

They work on addresses, as `dispatch.cpu_kernels` does and for its reasons; every argument is an int64. Nothing here
allocates, and nothing is looked at from Python in between. This rank's own rows never travel.

A dispatch message: a header of 8 words (HEADER_*); int32 [rows, 1 + K], each row's source token and local experts, -1
for none; then the rows, 64-byte aligned.

Legend: T tokens of this rank, M most tokens of a rank, K choices, H hidden, R ranks, L experts per rank, N = R*M rows
of an expert.
"""

from typing import Any

from numba import carray, types

from dispatch.native import compiled, copy, inlined, int32s, pointer, words

HEADER_BYTES = 64
HEADER_ROWS, HEADER_ROW_BYTES, HEADER_CHOICES, HEADER_KIND = 0, 1, 2, 3
HEADER_EXPERTS, HEADER_MAX_TOKENS = 4, 5
DISPATCH, COMBINE = 0x4C4C44, 0x4C4C43  # kinds: a message of another call is not read as one of this


@inlined
def _octets(address: int, count: int) -> Any:
    return carray(pointer(address), (count,), types.uint8)


@inlined
def _rows_at(num_rows: int, K: int) -> int:
    """Where a dispatch message's rows begin."""
    return HEADER_BYTES + (4 * num_rows * (1 + K) + 63) // 64 * 64


@compiled
def find_bad_expert(topk: int, T: int, K: int, num_experts: int) -> int:
    """Return the flat index of the first id outside [-1, num_experts), or -1."""
    chosen = words(topk, T * K)
    for i in range(T * K):
        if chosen[i] < -1 or chosen[i] >= num_experts:
            return i
    return -1


@compiled
def plan(
    topk: int, T: int, K: int, L: int, R: int, row_counts: int, pair_counts: int, firsts: int,
    sent: int, answers: int,
) -> None:  # fmt: skip
    """Count each rank's rows and answers, keep the choices, and note which of its rank's answers each one gets.

    `row_counts`, `pair_counts`: int64 [R]. `firsts`: scratch, int64 [R*L]. `sent`: int64 [T, K], the choices.
    `answers`: int32 [T, K]. A choice that repeats one of its token's gets the same answer.
    """
    chosen, kept, answer = words(topk, T * K), words(sent, T * K), int32s(answers, T * K)
    rows, pairs, first = words(row_counts, R), words(pair_counts, R), words(firsts, R * L)
    rows[:] = 0
    pairs[:] = 0
    first[:] = 0
    for i in range(T * K):
        expert = chosen[i]
        kept[i], answer[i] = expert, 0
        if expert < 0:
            continue
        twin, is_first_row = -1, 1
        for j in range(i // K * K, i):
            if kept[j] == expert:
                twin = j
            if kept[j] >= 0 and kept[j] // L == expert // L:
                is_first_row = 0
        rows[expert // L] += is_first_row
        if twin >= 0:
            answer[i] = answer[twin]
        else:
            pairs[expert // L] += 1
            answer[i] = first[expert]
            first[expert] += 1
    for r in range(R):
        begin = 0
        for expert in range(r * L, r * L + L):
            count = first[expert]
            first[expert] = begin
            begin += count
    for i in range(T * K):
        if kept[i] >= 0:
            answer[i] += first[kept[i]]


@compiled
def size_rows(row_counts: int, row_bytes: int, K: int, R: int, rank: int, mask: int, send_bytes: int) -> None:
    """Size the dispatch messages."""
    rows, masked, sizes = words(row_counts, R), words(mask, R), words(send_bytes, R)
    for r in range(R):
        sizes[r] = _rows_at(rows[r], K) + rows[r] * row_bytes
        if r == rank or masked[r] != 0:
            sizes[r] = 0


@compiled
def pack(
    rows: int, row_bytes: int, topk: int, T: int, K: int, L: int, R: int, rank: int, M: int, mask: int,
    row_counts: int, cursors: int, send_addresses: int, own_entries: int,
) -> None:  # fmt: skip
    """Write each rank's message; for this rank only its entries. `cursors`: scratch, int64 [2, R]."""
    windows, counts, masked = words(send_addresses, R), words(row_counts, R), words(mask, R)
    cursor, last_token = words(cursors, R), words(cursors + 8 * R, R)
    for r in range(R):
        cursor[r] = last_token[r] = -1
        if r != rank and masked[r] == 0:
            header = words(windows[r], 8)
            header[HEADER_ROWS], header[HEADER_ROW_BYTES], header[HEADER_CHOICES] = counts[r], row_bytes, K
            header[HEADER_KIND], header[HEADER_EXPERTS], header[HEADER_MAX_TOKENS] = DISPATCH, L, M
    chosen = words(topk, T * K)
    for i in range(T * K):
        to, t = chosen[i] // L, i // K
        if chosen[i] < 0 or (to != rank and masked[to] != 0):
            continue
        entries = own_entries if to == rank else windows[to] + HEADER_BYTES
        if last_token[to] != t:
            last_token[to] = t
            cursor[to] += 1
            fresh = int32s(entries + 4 * (1 + K) * cursor[to], 1 + K)
            fresh[:] = -1
            fresh[0] = t
            if to != rank:
                at = windows[to] + _rows_at(counts[to], K) + cursor[to] * row_bytes
                copy(at, rows + t * row_bytes, row_bytes)
        entry = int32s(entries + 4 * (1 + K) * cursor[to], 1 + K)
        local, is_twin = chosen[i] - to * L, False
        for k in range(i % K):
            is_twin = is_twin or entry[1 + k] == local
        if not is_twin:
            entry[1 + i % K] = local


@compiled
def find_stranger(
    row_bytes: int, K: int, L: int, R: int, rank: int, M: int, recv_addresses: int, kind: int
) -> int:
    """Return the first rank whose message is not of this kind and shape, or -1. K, L and M are 0 in a combine."""
    windows = words(recv_addresses, R)
    for r in range(R):
        if r == rank or windows[r] == 0:
            continue
        header = words(windows[r], 8)
        if header[HEADER_KIND] != kind or header[HEADER_ROW_BYTES] != row_bytes:
            return r
        if header[HEADER_CHOICES] != K or header[HEADER_EXPERTS] != L or header[HEADER_MAX_TOKENS] != M:
            return r
        if M > 0 and header[HEADER_ROWS] > M:
            return r
    return -1


@inlined
def _entries_of(source: int, rank: int, recv_addresses: int, R: int, own_entries: int) -> int:
    return own_entries if source == rank else words(recv_addresses, R)[source] + HEADER_BYTES


@inlined
def _count_of(source: int, rank: int, recv_addresses: int, R: int, row_counts: int) -> int:
    """Rows that a source sent here; none if it is masked."""
    if source == rank:
        return int(words(row_counts, R)[rank])
    window = words(recv_addresses, R)[source]
    return 0 if window == 0 else int(words(window, 8)[HEADER_ROWS])


@compiled
def order_rows(
    K: int, L: int, R: int, rank: int, recv_addresses: int, own_entries: int, row_counts: int, cursors: int,
    counts_out: int, layout_range: int, pair_counts: int, stats: int,
) -> None:  # fmt: skip
    """Count each expert's rows and place the sources in ascending order.

    `cursors`: int64 [L*R], where each source's next row goes. `counts_out`: int32 [L]. `layout_range`: int64 [L*R].
    `pair_counts`: int64 [R], answers owed to each source. `stats`: int32 [L] to add the counts to, or 0.
    """
    cursor, ranges, pairs = words(cursors, L * R), words(layout_range, L * R), words(pair_counts, R)
    counts = int32s(counts_out, L)
    cursor[:] = 0
    pairs[:] = 0
    for source in range(R):
        num_rows = _count_of(source, rank, recv_addresses, R, row_counts)
        entries = int32s(_entries_of(source, rank, recv_addresses, R, own_entries), num_rows * (1 + K))
        for i in range(num_rows):
            for k in range(1, 1 + K):
                local = entries[i * (1 + K) + k]
                if local >= 0:
                    cursor[local * R + source] += 1
    for local in range(L):
        begin = 0
        for source in range(R):
            count = cursor[local * R + source]
            ranges[local * R + source] = begin << 32 | count
            cursor[local * R + source] = begin
            pairs[source] += count
            begin += count
        counts[local] = begin
        if stats != 0:
            int32s(stats, L)[local] += begin


@compiled
def deliver(
    rows: int, row_bytes: int, value_bytes: int, K: int, L: int, R: int, rank: int, M: int,
    recv_addresses: int, own_entries: int, row_counts: int, cursors: int, x_out: int, source_tokens: int,
    scales_at: int, num_scales: int, is_ue8m0: int, scales_out: int,
) -> None:  # fmt: skip
    """Copy every row to each expert that it is for, with its source token and scales.

    `rows`: this rank's own, by token. `x_out`: [L, N, value_bytes]. `source_tokens`: int32 [L, N]. `scales_out`:
    column-major, float32 [L, num_scales, N] or exponents int32 [L, ceil(num_scales / 4), N].
    """
    cursor, N = words(cursors, L * R), R * M
    tokens = int32s(source_tokens, L * N)
    for source in range(R):
        num_rows = _count_of(source, rank, recv_addresses, R, row_counts)
        entries = int32s(_entries_of(source, rank, recv_addresses, R, own_entries), num_rows * (1 + K))
        first = 0 if source == rank else words(recv_addresses, R)[source] + _rows_at(num_rows, K)
        for i in range(num_rows):
            token = entries[i * (1 + K)]
            row = rows + token * row_bytes if source == rank else first + i * row_bytes
            for k in range(1, 1 + K):
                local = entries[i * (1 + K) + k]
                if local < 0:
                    continue
                at = cursor[local * R + source]
                cursor[local * R + source] += 1
                tokens[local * N + at] = token
                copy(x_out + (local * N + at) * value_bytes, row, value_bytes)
                if num_scales > 0:
                    _place_scales(row + scales_at, num_scales, is_ue8m0, scales_out, local, N, at)


@inlined
def _place_scales(
    row_scales: int, num_scales: int, is_ue8m0: int, scales_out: int, local: int, N: int, at: int
) -> None:
    bits = int32s(row_scales, num_scales)
    if is_ue8m0 == 0:
        column = int32s(scales_out + 4 * local * num_scales * N, num_scales * N)
        for b in range(num_scales):
            column[b * N + at] = bits[b]
    else:
        num_words = (num_scales + 3) // 4
        packed = _octets(scales_out + 4 * local * num_words * N, 4 * num_words * N)
        for b in range(4 * num_words):
            packed[4 * (b // 4 * N + at) + b % 4] = (bits[b] >> 23) & 255 if b < num_scales else 0


@compiled
def add_wait(stats: int, R: int, rank: int, mask: int, waited_ns: int) -> None:
    """Add a time to the int64 [R] statistics of every peer that is not masked."""
    times, masked = words(stats, R), words(mask, R)
    for r in range(R):
        if r != rank and masked[r] == 0:
            times[r] += waited_ns


KERNELS = (find_bad_expert, plan, size_rows, pack, find_stranger, order_rows, deliver, add_wait)
