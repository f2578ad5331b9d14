"""`layout` for the CPU, compiled: one pass each to plan, pack, unpack, pack answers and sum them.

Works on addresses, so that a call costs a microsecond and rows go straight into a transport's windows and out of
them. This rank's own rows never travel: they are read from where they are. Every argument is an int64; addresses end
in no suffix. `tables` is the [NUM_TABLES, R] int64 scratch that the passes of one dispatch and its combine share.

A message to a rank, all parts 64-byte aligned:
    header: 8 words (HEADER_*), then for dispatch: local slots int32 [rows, K], then rows [rows, row_bytes];
    for combine: answers [pairs, row_bytes].
The sum is vectorised by LLVM but never reordered, and multiply and add are not contracted (numba's default; a test
compares bits).

Legend as in `layout`.
"""

from typing import Any

from dispatch.native import compiled, copy, floats, inlined, int32s, uint16s, words

ALIGNMENT = 64
HEADER_BYTES = 64
HEADER_ROWS, HEADER_PAIRS, HEADER_ROW_BYTES, HEADER_CHOICES, HEADER_CALL, HEADER_SLOTS = 0, 1, 2, 3, 4, 5


# Rows of the scratch, each with one int64 per rank.
_ROW_COUNTS = 0  # rows for each rank
_PAIR_COUNTS = 1  # answers that will come back from each rank
_RECV_ROWS = 2  # rows from each rank
_RECV_PAIRS = 3  # answers to send to each rank
_CURSOR, _LAST_TOKEN = 4, 5
NUM_TABLES = 6


@inlined
def _table(tables: int, R: int, row: int) -> Any:
    return words(tables + 8 * R * row, R)


@inlined
def _rows_at(num_rows: int, K: int) -> int:
    """Where a dispatch message's rows begin."""
    return HEADER_BYTES + (4 * num_rows * K + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@compiled
def plan(
    slots: int,
    T: int,
    K: int,
    S: int,
    R: int,
    rank: int,
    row_bytes: int,
    tables: int,
    send_bytes: int,
    choices: int,
) -> int:
    """Count rows and pairs per rank, size the messages, and note for each choice its rank and answer.

    `choices`: int32 [T*K, 2], (rank, index among that rank's answers), or (-1, 0).
    Returns -1, or the flat index of the first slot id out of range.
    """
    row_counts, pair_counts = _table(tables, R, _ROW_COUNTS), _table(tables, R, _PAIR_COUNTS)
    last_token, sizes = _table(tables, R, _LAST_TOKEN), words(send_bytes, R)
    for r in range(R):
        row_counts[r] = pair_counts[r] = 0
        last_token[r] = -1
    slot, choice = words(slots, T * K), int32s(choices, 2 * T * K)
    for i in range(T * K):
        choice[2 * i], choice[2 * i + 1] = -1, 0
        if slot[i] == -1:
            continue
        if slot[i] < 0 or slot[i] >= R * S:
            return i
        to = slot[i] // S
        if last_token[to] != i // K:
            last_token[to] = i // K
            row_counts[to] += 1
        choice[2 * i], choice[2 * i + 1] = to, pair_counts[to]
        pair_counts[to] += 1
    for r in range(R):
        sizes[r] = 0 if r == rank else _rows_at(row_counts[r], K) + row_counts[r] * row_bytes
    return -1


@compiled
def pack(
    x: int, row_bytes: int, slots: int, T: int, K: int, S: int, R: int, rank: int, tables: int,
    send_addresses: int, own_tokens: int, own_slots: int, call: int,
) -> None:  # fmt: skip
    """Write each rank's message; for this rank only its tokens (int64) and local slots (int32 [rows, K])."""
    row_counts, pair_counts = _table(tables, R, _ROW_COUNTS), _table(tables, R, _PAIR_COUNTS)
    cursor, last_token = _table(tables, R, _CURSOR), _table(tables, R, _LAST_TOKEN)
    windows = words(send_addresses, R)
    for r in range(R):
        cursor[r] = last_token[r] = -1
        if r != rank:
            header = words(windows[r], 8)
            header[HEADER_ROWS], header[HEADER_PAIRS] = row_counts[r], pair_counts[r]
            header[HEADER_ROW_BYTES], header[HEADER_CHOICES] = row_bytes, K
            header[HEADER_CALL], header[HEADER_SLOTS] = call, S
    slot, tokens = words(slots, T * K), words(own_tokens, T)
    for i in range(T * K):
        if slot[i] < 0:
            continue
        to, t = slot[i] // S, i // K
        chosen = own_slots if to == rank else windows[to] + HEADER_BYTES
        if last_token[to] != t:
            last_token[to] = t
            cursor[to] += 1
            fresh = int32s(chosen + 4 * K * cursor[to], K)
            for k in range(K):
                fresh[k] = -1
            if to == rank:
                tokens[cursor[to]] = t
            else:
                at = windows[to] + _rows_at(row_counts[to], K) + cursor[to] * row_bytes
                copy(at, x + t * row_bytes, row_bytes)
        int32s(chosen + 4 * K * cursor[to], K)[i % K] = slot[i] - to * S


@compiled
def read_headers(
    row_bytes: int, K: int, S: int, R: int, rank: int, tables: int, recv_addresses: int, call: int
) -> tuple[int, int, int]:
    """Note how much each rank sent; return (rows, pairs, -1), or the first rank that disagrees as the third."""
    recv_rows, recv_pairs = _table(tables, R, _RECV_ROWS), _table(tables, R, _RECV_PAIRS)
    windows = words(recv_addresses, R)
    num_rows = num_pairs = 0
    for r in range(R):
        if r == rank:
            recv_rows[r], recv_pairs[r] = (
                _table(tables, R, _ROW_COUNTS)[r],
                _table(tables, R, _PAIR_COUNTS)[r],
            )
        else:
            header = words(windows[r], 8)
            if header[HEADER_ROW_BYTES] != row_bytes or header[HEADER_CHOICES] != K:
                return 0, 0, r
            if header[HEADER_CALL] != call or header[HEADER_SLOTS] != S:
                return 0, 0, r
            recv_rows[r], recv_pairs[r] = header[HEADER_ROWS], header[HEADER_PAIRS]
        num_rows += recv_rows[r]
        num_pairs += recv_pairs[r]
    return num_rows, num_pairs, -1


@compiled
def order_pairs(
    K: int, S: int, R: int, rank: int, tables: int, recv_addresses: int, own_slots: int,
    row_of_pair: int, num_pairs: int, slot_offsets: int, pair_of_answer: int,
) -> None:  # fmt: skip
    """Counting sort of the pairs by slot: fill row_of_pair [P], slot_offsets [S+1], pair_of_answer [P] (int64)."""
    recv_rows, windows = _table(tables, R, _RECV_ROWS), words(recv_addresses, R)
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
    first = answer = 0
    for r in range(R):
        local = int32s(own_slots if r == rank else windows[r] + HEADER_BYTES, recv_rows[r] * K)
        for i in range(recv_rows[r] * K):
            if local[i] >= 0:
                pair = offsets[local[i]]
                offsets[local[i]] += 1
                rows[pair] = first + i // K
                pairs[answer] = pair
                answer += 1
        first += recv_rows[r]
    for s in range(S, 0, -1):  # each offset has moved on to the next one's place
        offsets[s] = offsets[s - 1]
    offsets[0] = 0


@compiled
def unpack(
    x: int,
    row_bytes: int,
    K: int,
    R: int,
    rank: int,
    tables: int,
    recv_addresses: int,
    own_tokens: int,
    x_out: int,
) -> None:
    """Copy the rows of all ranks, in order of rank, to `x_out` [N, row_bytes]."""
    recv_rows, windows = _table(tables, R, _RECV_ROWS), words(recv_addresses, R)
    at = x_out
    for r in range(R):
        if r == rank:
            tokens = words(own_tokens, recv_rows[r])
            for i in range(recv_rows[r]):
                copy(at + i * row_bytes, x + tokens[i] * row_bytes, row_bytes)
        else:
            copy(at, windows[r] + _rows_at(recv_rows[r], K), recv_rows[r] * row_bytes)
        at += recv_rows[r] * row_bytes


@compiled
def size_answers(row_bytes: int, R: int, rank: int, tables: int, send_bytes: int, recv_bytes: int) -> None:
    """Size the messages of a combine, both ways: answers carry a header and no metadata."""
    sends, receives = words(send_bytes, R), words(recv_bytes, R)
    for r in range(R):
        sends[r] = HEADER_BYTES + _table(tables, R, _RECV_PAIRS)[r] * row_bytes
        receives[r] = HEADER_BYTES + _table(tables, R, _PAIR_COUNTS)[r] * row_bytes
    sends[rank] = receives[rank] = 0


@compiled
def pack_answers(
    y: int,
    row_bytes: int,
    R: int,
    rank: int,
    tables: int,
    send_addresses: int,
    pair_of_answer: int,
    call: int,
) -> None:
    """Write to each other rank the answers to its rows, in order of (row, choice)."""
    recv_pairs, windows = _table(tables, R, _RECV_PAIRS), words(send_addresses, R)
    first = 0
    for r in range(R):
        pairs = words(pair_of_answer + 8 * first, recv_pairs[r])
        first += recv_pairs[r]
        if r == rank:
            continue
        header = words(windows[r], 8)
        header[HEADER_PAIRS], header[HEADER_ROW_BYTES], header[HEADER_CALL] = recv_pairs[r], row_bytes, call
        for i in range(recv_pairs[r]):
            copy(windows[r] + HEADER_BYTES + i * row_bytes, y + pairs[i] * row_bytes, row_bytes)


@compiled
def check_answers(row_bytes: int, R: int, rank: int, recv_addresses: int, call: int) -> int:
    """Return -1, or the first rank whose message is not the answer to this call."""
    windows = words(recv_addresses, R)
    for r in range(R):
        if r != rank:
            header = words(windows[r], 8)
            if header[HEADER_CALL] != call or header[HEADER_ROW_BYTES] != row_bytes:
                return r
    return -1


@inlined
def _own_answers(R: int, rank: int, tables: int, pair_of_answer: int) -> int:
    """Address of the part of `pair_of_answer` that says which pair each answer to this rank itself is."""
    recv_pairs = _table(tables, R, _RECV_PAIRS)
    first = 0
    for r in range(rank):
        first += recv_pairs[r]
    return pair_of_answer + 8 * first


@inlined
def _answer_at(to: int, index: int, row_bytes: int, y: int, own: int, rank: int, recv_addresses: int) -> int:
    """Address of one answer: among this rank's own pairs, or in the window of the rank that sent it."""
    if to == rank:
        return int(y + words(own + 8 * index, 1)[0] * row_bytes)
    return int(words(recv_addresses + 8 * to, 1)[0] + HEADER_BYTES + index * row_bytes)


@compiled
def sum_answers_float32(
    y: int, weights: int, choices: int, T: int, K: int, H: int, R: int, rank: int, tables: int,
    recv_addresses: int, pair_of_answer: int, scratch: int, out: int,
) -> None:  # fmt: skip
    """float32 rows: out[t] = sum over k in order of weights[t, k] * answer. `scratch` is not used."""
    own = _own_answers(R, rank, tables, pair_of_answer)
    weight, choice = floats(weights, T * K), int32s(choices, 2 * T * K)
    for t in range(T):
        total = floats(out + t * 4 * H, H)
        total[:] = 0.0
        for i in range(t * K, t * K + K):
            if choice[2 * i] >= 0:
                at = _answer_at(choice[2 * i], choice[2 * i + 1], 4 * H, y, own, rank, recv_addresses)
                answer, w = floats(at, H), weight[i]
                for h in range(H):
                    total[h] += w * answer[h]


@compiled
def sum_answers_bfloat16(
    y: int, weights: int, choices: int, T: int, K: int, H: int, R: int, rank: int, tables: int,
    recv_addresses: int, pair_of_answer: int, scratch: int, out: int,
) -> None:  # fmt: skip
    """The same for bfloat16 rows: exact to float32, summed there, rounded once to nearest even.

    `scratch`: 8*H bytes.
    """
    own = _own_answers(R, rank, tables, pair_of_answer)
    weight, choice = floats(weights, T * K), int32s(choices, 2 * T * K)
    total, wide = floats(scratch, H), floats(scratch + 4 * H, H)
    total_bits, wide_bits = int32s(scratch, H), int32s(scratch + 4 * H, H)
    for t in range(T):
        total[:] = 0.0
        for i in range(t * K, t * K + K):
            if choice[2 * i] >= 0:
                at = _answer_at(choice[2 * i], choice[2 * i + 1], 2 * H, y, own, rank, recv_addresses)
                answer, w = uint16s(at, H), weight[i]
                for h in range(H):
                    wide_bits[h] = answer[h] << 16
                for h in range(H):
                    total[h] += w * wide[h]
        rounded = uint16s(out + t * 2 * H, H)
        for h in range(H):
            bits = total_bits[h]
            is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
            rounded[h] = 0x7FC0 if is_nan else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@compiled
def gather_answers(
    y: int, row_bytes: int, choices: int, T: int, K: int, R: int, rank: int, tables: int,
    recv_addresses: int, pair_of_answer: int, out: int,
) -> None:  # fmt: skip
    """Copy the answer of each choice to out [T*K, row_bytes], for types that have no sum above."""
    own = _own_answers(R, rank, tables, pair_of_answer)
    choice = int32s(choices, 2 * T * K)
    for i in range(T * K):
        if choice[2 * i] >= 0:
            at = _answer_at(choice[2 * i], choice[2 * i + 1], row_bytes, y, own, rank, recv_addresses)
            copy(out + i * row_bytes, at, row_bytes)


KERNELS = (
    plan, pack, read_headers, order_pairs, unpack, size_answers, pack_answers, check_answers,
    sum_answers_float32, sum_answers_bfloat16, gather_answers,
)  # fmt: skip
