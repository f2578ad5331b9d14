"""Receive a dispatch: read the headers, order the pairs and gather the rows.

Two orders: `receive` gathers rows in order of arrival and orders the pairs by slot (the service). `deliver` copies each
row to every slot that chose it, with equal room per slot (DeepEP's low-latency results). `forward` keeps (row, choice),
for a rank that sends rows on. All three send answers in the order of (row, choice): `pair_of_answer` is the pair of
each answer.
If the buffers are large enough, `receive` does everything in one call: a call from Python costs more than a small step.

Legend: as in `layout`. A lost peer (`Wire.mask`) has no window: its address is 0.
"""

from numba import carray, types

from dispatch.compiled.native import compiled, copy, inlined, int32s, pointer, words
from dispatch.cpu_kernels.message import (
    CURSOR,
    HEADER_FORMAT,
    HEADER_PAIRS,
    HEADER_ROW_BYTES,
    HEADER_ROWS,
    HEADER_WORDS,
    NEXT_PAIR,
    PAIR_COUNTS,
    RECV_PAIRS,
    RECV_ROWS,
    ROW_COUNTS,
    entries_at,
    rows_at,
    table,
)


@compiled
def read_headers(header: int, R: int, rank: int, tables: int, recv_addresses: int) -> tuple[int, int, int]:
    """Record how much each rank sent. Return (rows, pairs, -1), or the first rank that disagrees in place of -1.

    `header`: this rank's own, as given to `pack`.
    """
    recv_rows, recv_pairs = table(tables, R, RECV_ROWS), table(tables, R, RECV_PAIRS)
    windows, common = words(recv_addresses, R), words(header, HEADER_WORDS)
    num_rows = num_pairs = 0
    for r in range(R):
        recv_rows[r] = recv_pairs[r] = 0
        if r == rank:
            recv_rows[r] = table(tables, R, ROW_COUNTS)[r]
            recv_pairs[r] = table(tables, R, PAIR_COUNTS)[r]
        elif windows[r] != 0:
            theirs = words(windows[r], HEADER_WORDS)
            for word in range(HEADER_ROW_BYTES, HEADER_WORDS):
                if theirs[word] != common[word]:
                    return 0, 0, r
            recv_rows[r], recv_pairs[r] = theirs[HEADER_ROWS], theirs[HEADER_PAIRS]
        num_rows += recv_rows[r]
        num_pairs += recv_pairs[r]
    return num_rows, num_pairs, -1


@inlined
def _begin_walk(R: int, tables: int) -> None:
    """Set the position of each source's next row and answer."""
    recv_pairs, next_row, next_answer = (
        table(tables, R, RECV_PAIRS),
        table(tables, R, CURSOR),
        table(tables, R, NEXT_PAIR),
    )
    answer = 0
    for r in range(R):
        next_row[r], next_answer[r] = 0, answer
        answer += recv_pairs[r]


@compiled
def order_pairs(
    header: int, K: int, S: int, R: int, rank: int, num_groups: int, tables: int, recv_addresses: int, own_entries: int,
    row_of_pair: int, num_pairs: int, slot_offsets: int, pair_of_answer: int,
) -> None:  # fmt: skip
    """Sort the pairs by slot (counting sort). Fills row_of_pair [P], slot_offsets [S+1], pair_of_answer [P] (int64).

    `num_groups`: rows are ordered by group (the origin, in which each source sent them), then source. 1: by source.
    """
    recv_rows, windows = table(tables, R, RECV_ROWS), words(recv_addresses, R)
    next_row, next_answer = table(tables, R, CURSOR), table(tables, R, NEXT_PAIR)
    first, width = entries_at(words(header, HEADER_WORDS)[HEADER_FORMAT]), 1 + K
    offsets = words(slot_offsets, S + 1)
    rows, pairs = words(row_of_pair, num_pairs), words(pair_of_answer, num_pairs)
    offsets[:] = 0
    for r in range(R):
        entries = int32s(own_entries if r == rank else windows[r] + first, recv_rows[r] * width)
        for i in range(recv_rows[r]):
            for k in range(i * width + 1, (i + 1) * width):
                if entries[k] >= 0:
                    offsets[entries[k] + 1] += 1
    for s in range(S):
        offsets[s + 1] += offsets[s]
    _begin_walk(R, tables)
    row = 0
    for group in range(num_groups):
        for r in range(R):
            entries = int32s(own_entries if r == rank else windows[r] + first, recv_rows[r] * width)
            i, answer = next_row[r], next_answer[r]
            while i < recv_rows[r] and (num_groups == 1 or entries[i * width] == group):
                for k in range(i * width + 1, (i + 1) * width):
                    if entries[k] >= 0:
                        pair = offsets[entries[k]]
                        offsets[entries[k]] += 1
                        rows[pair] = row
                        pairs[answer] = pair
                        answer += 1
                row += 1
                i += 1
            next_row[r], next_answer[r] = i, answer
    for s in range(S, 0, -1):  # each offset has advanced to the start of the next slot
        offsets[s] = offsets[s - 1]
    offsets[0] = 0


@compiled
def unpack(
    x: int, header: int, K: int, R: int, rank: int, num_groups: int, tables: int, recv_addresses: int, own_tokens: int,
    own_entries: int, x_out: int,
) -> None:  # fmt: skip
    """Copy the rows of all ranks, by group and rank, to `x_out` [N, row_bytes]."""
    recv_rows, windows = table(tables, R, RECV_ROWS), words(recv_addresses, R)
    next_row = table(tables, R, CURSOR)
    common = words(header, HEADER_WORDS)
    row_bytes, format_word, width = common[HEADER_ROW_BYTES], common[HEADER_FORMAT], 1 + K
    at = x_out
    _begin_walk(R, tables)
    for group in range(num_groups):
        for r in range(R):
            begin, end = next_row[r], recv_rows[r]
            if num_groups > 1:
                entries = int32s(
                    own_entries if r == rank else windows[r] + entries_at(format_word), recv_rows[r] * width
                )
                end = begin
                while end < recv_rows[r] and entries[end * width] == group:
                    end += 1
            next_row[r] = end
            if r == rank:
                tokens = words(own_tokens, recv_rows[r])
                for i in range(begin, end):
                    copy(at + (i - begin) * row_bytes, x + tokens[i] * row_bytes, row_bytes)
            elif end > begin:
                source = windows[r] + rows_at(recv_rows[r], K, format_word) + begin * row_bytes
                copy(at, source, (end - begin) * row_bytes)
            at += (end - begin) * row_bytes


@compiled
def receive(
    header: int, K: int, S: int, R: int, rank: int, num_groups: int, tables: int, recv_addresses: int, own_entries: int,
    row_of_pair: int, slot_offsets: int, pair_of_answer: int, pair_room: int,
    x: int, own_tokens: int, x_out: int, row_room: int, rows_in_place: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Run `read_headers`, then `order_pairs` and `unpack` if there is room for all pairs and rows.

    `rows_in_place`: a call with this many rows needs no unpacking: they must be all of this rank's own.
    """
    num_rows, num_pairs, stranger = read_headers(header, R, rank, tables, recv_addresses)
    in_place = num_rows == rows_in_place
    if stranger < 0 and num_pairs <= pair_room and (in_place or num_rows <= row_room):
        order_pairs(
            header, K, S, R, rank, num_groups, tables, recv_addresses, own_entries, row_of_pair, num_pairs,
            slot_offsets, pair_of_answer,
        )  # fmt: skip
        if not in_place:
            unpack(x, header, K, R, rank, num_groups, tables, recv_addresses, own_tokens, own_entries, x_out)
    return num_rows, num_pairs, stranger


@compiled
def forward(
    header: int, K: int, R: int, rank: int, tables: int, recv_addresses: int, own_entries: int,
    slots: int, origins: int, pair_of_answer: int,
) -> None:  # fmt: skip
    """Split the entries of rows to send on: slots int64 [N, K], and each row's source in int32 origins [N].

    Pairs are (row, choice): pair_of_answer [P] holds row * K + choice.
    """
    recv_rows, windows = table(tables, R, RECV_ROWS), words(recv_addresses, R)
    first, width = entries_at(words(header, HEADER_WORDS)[HEADER_FORMAT]), 1 + K
    row = answer = 0
    for r in range(R):
        entries = int32s(own_entries if r == rank else windows[r] + first, recv_rows[r] * width)
        slot, source = words(slots + 8 * row * K, recv_rows[r] * K), int32s(origins + 4 * row, recv_rows[r])
        for i in range(recv_rows[r]):
            source[i] = r
            for k in range(K):
                slot[i * K + k] = entries[i * width + 1 + k]
                if slot[i * K + k] >= 0:
                    words(pair_of_answer + 8 * answer, 1)[0] = (row + i) * K + k
                    answer += 1
        row += recv_rows[r]


@compiled
def read_origins(
    header: int, K: int, R: int, rank: int, tables: int, recv_addresses: int, own_entries: int, origins: int
) -> None:
    """Write each row's origin to int32 [N], in order of source."""
    recv_rows, windows = table(tables, R, RECV_ROWS), words(recv_addresses, R)
    first, width = entries_at(words(header, HEADER_WORDS)[HEADER_FORMAT]), 1 + K
    row = 0
    for r in range(R):
        entries = int32s(own_entries if r == rank else windows[r] + first, recv_rows[r] * width)
        origin = int32s(origins + 4 * row, recv_rows[r])
        for i in range(recv_rows[r]):
            origin[i] = entries[i * width]
        row += recv_rows[r]


@compiled
def deliver(
    header: int, K: int, S: int, R: int, rank: int, tables: int, recv_addresses: int, own_entries: int, own_tokens: int,
    x: int, room: int, pair_of_answer: int, value_bytes: int, x_out: int, origins: int, counts: int, ranges: int,
    stats: int, scales_at: int, num_scales: int, is_ue8m0: int, scales_out: int,
) -> None:  # fmt: skip
    """Copy every row to each slot that chose it, by source, then in order of arrival, with its origin and scales.

    `room`: rows per slot; pair i of slot s is s * room + i. `x_out`: [S, room, value_bytes]. `origins`: int32 [S, room].
    `counts`: int32 [S]. `ranges`: int64 [S, R], (begin << 32) | count. `stats`: int32 [S] to add the counts to, or 0.
    `scales_out`: column-major, float32 [S, num_scales, room] or exponents int32 [S, ceil(num_scales / 4), room].
    """
    recv_rows, windows = table(tables, R, RECV_ROWS), words(recv_addresses, R)
    common = words(header, HEADER_WORDS)
    row_bytes, format_word, width = common[HEADER_ROW_BYTES], common[HEADER_FORMAT], 1 + K
    count, placed, origin = int32s(counts, S), words(ranges, S * R), int32s(origins, S * room)
    count[:] = 0
    answer = 0
    for r in range(R):
        entries = int32s(
            own_entries if r == rank else windows[r] + entries_at(format_word), recv_rows[r] * width
        )
        tokens = words(own_tokens, recv_rows[r])
        first = 0 if r == rank else windows[r] + rows_at(recv_rows[r], K, format_word)
        for s in range(S):
            placed[s * R + r] = count[s]
        for i in range(recv_rows[r]):
            row = x + tokens[i] * row_bytes if r == rank else first + i * row_bytes
            for k in range(i * width + 1, (i + 1) * width):
                s = entries[k]
                if s < 0:
                    continue
                at = count[s]
                count[s] += 1
                origin[s * room + at] = entries[i * width]
                words(pair_of_answer + 8 * answer, 1)[0] = s * room + at
                answer += 1
                copy(x_out + (s * room + at) * value_bytes, row, value_bytes)
                if num_scales > 0:
                    _place_scales(row + scales_at, num_scales, is_ue8m0, scales_out, s, room, at)
        for s in range(S):
            begin = placed[s * R + r]
            placed[s * R + r] = begin << 32 | (count[s] - begin)
    if stats != 0:
        total = int32s(stats, S)
        for s in range(S):
            total[s] += count[s]


@inlined
def _place_scales(
    row_scales: int, num_scales: int, is_ue8m0: int, scales_out: int, slot: int, room: int, at: int
) -> None:
    bits = int32s(row_scales, num_scales)
    if is_ue8m0 == 0:
        column = int32s(scales_out + 4 * slot * num_scales * room, num_scales * room)
        for b in range(num_scales):
            column[b * room + at] = bits[b]
    else:
        num_words = (num_scales + 3) // 4
        address = scales_out + 4 * slot * num_words * room
        packed = carray(pointer(address), (4 * num_words * room,), types.uint8)
        for b in range(4 * num_words):
            packed[4 * (b // 4 * room + at) + b % 4] = (bits[b] >> 23) & 255 if b < num_scales else 0
