"""The receiver's side of a dispatch: read the headers, order the pairs, bring the rows together.

`receive` does all in one call where the buffers are large enough: a call from Python costs more than small steps do.

Legend as in `layout`. A peer that is lost (`Wire.mask`) has no window: its address is 0.
"""

from dispatch.cpu_kernels.message import (
    HEADER_BYTES,
    HEADER_CAPACITY,
    HEADER_PAIRS,
    HEADER_ROW_BYTES,
    HEADER_ROWS,
    HEADER_WORDS,
    PAIR_COUNTS,
    RECV_PAIRS,
    RECV_ROWS,
    ROW_COUNTS,
    rows_at,
    table,
)
from dispatch.native import compiled, copy, int32s, words


@compiled
def read_headers(header: int, R: int, rank: int, tables: int, recv_addresses: int) -> tuple[int, int, int]:
    """Note how much each rank sent; return (rows, pairs, -1), or the first rank that disagrees as the third.

    `header`: this rank's own, as `pack` had it.
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


@compiled
def order_pairs(
    K: int, S: int, R: int, rank: int, tables: int, recv_addresses: int, own_slots: int,
    row_of_pair: int, num_pairs: int, slot_offsets: int, pair_of_answer: int,
) -> None:  # fmt: skip
    """Counting sort of the pairs by slot: fill row_of_pair [P], slot_offsets [S+1], pair_of_answer [P] (int64)."""
    recv_rows, windows = table(tables, R, RECV_ROWS), words(recv_addresses, R)
    offsets = words(slot_offsets, S + 1)
    rows, pairs = words(row_of_pair, num_pairs), words(pair_of_answer, num_pairs)
    offsets[:] = 0
    for r in range(R):
        local = int32s(own_slots if r == rank else windows[r] + HEADER_BYTES, recv_rows[r] * K)
        for i in range(recv_rows[r] * K):
            if local[i] >= 0:
                offsets[local[i] + 1] += 1
    for s in range(S):
        offsets[s + 1] += offsets[s]
    row = answer = 0
    for r in range(R):
        local = int32s(own_slots if r == rank else windows[r] + HEADER_BYTES, recv_rows[r] * K)
        for i in range(recv_rows[r]):
            for k in range(i * K, i * K + K):
                if local[k] >= 0:
                    pair = offsets[local[k]]
                    offsets[local[k]] += 1
                    rows[pair] = row
                    pairs[answer] = pair
                    answer += 1
            row += 1
    for s in range(S, 0, -1):  # each offset has moved on to the next one's place
        offsets[s] = offsets[s - 1]
    offsets[0] = 0


@compiled
def unpack(
    x: int, row_bytes: int, capacity: int, K: int, R: int, rank: int, tables: int, recv_addresses: int,
    own_tokens: int, x_out: int,
) -> None:  # fmt: skip
    """Copy the rows of all ranks, in order of rank, to `x_out` [N, row_bytes]."""
    recv_rows, windows = table(tables, R, RECV_ROWS), words(recv_addresses, R)
    at = x_out
    for r in range(R):
        if r == rank:
            tokens = words(own_tokens, recv_rows[r])
            for i in range(recv_rows[r]):
                copy(at + i * row_bytes, x + tokens[i] * row_bytes, row_bytes)
        elif recv_rows[r] > 0:
            copy(at, windows[r] + rows_at(recv_rows[r], K, capacity), recv_rows[r] * row_bytes)
        at += recv_rows[r] * row_bytes


@compiled
def receive(
    header: int, K: int, S: int, R: int, rank: int, tables: int, recv_addresses: int, own_slots: int,
    row_of_pair: int, slot_offsets: int, pair_of_answer: int, pair_room: int,
    x: int, own_tokens: int, x_out: int, row_room: int, rows_in_place: int,
) -> tuple[int, int, int]:  # fmt: skip
    """As `read_headers`, then `order_pairs` and `unpack`, if there is room for so many pairs and rows.

    `rows_in_place`: this many rows need no unpacking, as they can only be all of this rank's own.
    """
    num_rows, num_pairs, stranger = read_headers(header, R, rank, tables, recv_addresses)
    in_place = num_rows == rows_in_place
    if stranger < 0 and num_pairs <= pair_room and (in_place or num_rows <= row_room):
        order_pairs(
            K,
            S,
            R,
            rank,
            tables,
            recv_addresses,
            own_slots,
            row_of_pair,
            num_pairs,
            slot_offsets,
            pair_of_answer,
        )
        if not in_place:
            common = words(header, HEADER_WORDS)
            row_bytes, capacity = common[HEADER_ROW_BYTES], common[HEADER_CAPACITY]
            unpack(x, row_bytes, capacity, K, R, rank, tables, recv_addresses, own_tokens, x_out)
    return num_rows, num_pairs, stranger
