"""Combine: pack the answers, and sum them at the source in the order of the choices.

LLVM vectorises the sum but never reorders it, and multiply and add are not contracted (numba's default; a test
compares bits). Legend: as in `layout`. A lost peer has no window; its answers add nothing.
"""

from numba import carray, types

from dispatch.compiled.native import compiled, copy, floats, inlined, int32s, pointer, uint16s, words
from dispatch.cpu_kernels.message import (
    ANSWERED_BYTES,
    HEADER_BYTES,
    HEADER_CALL,
    HEADER_PAIRS,
    HEADER_ROW_BYTES,
    HEADER_WORDS,
    PAIR_COUNTS,
    RECV_PAIRS,
    table,
)


@compiled
def size_answers(
    row_bytes: int, R: int, rank: int, tables: int, mask: int, send_bytes: int, recv_bytes: int
) -> None:
    """Compute the size of a combine's messages in both directions. Answers carry a header and no metadata."""
    sends, receives, masked = words(send_bytes, R), words(recv_bytes, R), words(mask, R)
    for r in range(R):
        sends[r] = receives[r] = 0
        if r != rank and masked[r] == 0:
            sends[r] = HEADER_BYTES + table(tables, R, RECV_PAIRS)[r] * row_bytes
            receives[r] = HEADER_BYTES + table(tables, R, PAIR_COUNTS)[r] * row_bytes
        table(tables, R, ANSWERED_BYTES)[r] += sends[r]


@compiled
def pack_answers(
    y: int, row_bytes: int, R: int, rank: int, tables: int, send_bytes: int, send_addresses: int,
    pair_of_answer: int, call: int,
) -> None:  # fmt: skip
    """Write the answers for each other rank's rows, in order of (row, choice)."""
    recv_pairs, windows = table(tables, R, RECV_PAIRS), words(send_addresses, R)
    sizes = words(send_bytes, R)
    first = 0
    for r in range(R):
        pairs = words(pair_of_answer + 8 * first, recv_pairs[r])
        first += recv_pairs[r]
        if sizes[r] == 0:
            continue
        header = words(windows[r], HEADER_WORDS)
        header[HEADER_PAIRS], header[HEADER_ROW_BYTES], header[HEADER_CALL] = recv_pairs[r], row_bytes, call
        for i in range(recv_pairs[r]):
            copy(windows[r] + HEADER_BYTES + i * row_bytes, y + pairs[i] * row_bytes, row_bytes)


@compiled
def keep_own_answers(
    y: int, row_bytes: int, R: int, rank: int, tables: int, pair_of_answer: int, out: int
) -> None:
    """Copy this rank's answers to itself to `out`, in order. After that, y may change."""
    count = table(tables, R, RECV_PAIRS)[rank]
    pairs = words(_own_answers(R, rank, tables, pair_of_answer), count)
    for i in range(count):
        copy(out + i * row_bytes, y + pairs[i] * row_bytes, row_bytes)


@compiled
def choose_again(chosen: int, sent: int, choices: int, num_choices: int, out: int) -> int:
    """Write the dispatch's choices to `out`, without those that are now -1.

    Returns -1, or the flat index of the first choice that is neither -1 nor the one sent.
    """
    now, before = words(chosen, num_choices), words(sent, num_choices)
    choice, kept = int32s(choices, 2 * num_choices), int32s(out, 2 * num_choices)
    for i in range(num_choices):
        if now[i] != -1 and now[i] != before[i]:
            return i
        kept[2 * i] = choice[2 * i] if now[i] != -1 else -1
        kept[2 * i + 1] = choice[2 * i + 1]
    return -1


@compiled
def check_answers(row_bytes: int, R: int, rank: int, recv_addresses: int, call: int) -> int:
    """Return -1, or the first rank whose message is not the answer to this call."""
    windows = words(recv_addresses, R)
    for r in range(R):
        if r != rank and windows[r] != 0:
            header = words(windows[r], HEADER_WORDS)
            if header[HEADER_CALL] != call or header[HEADER_ROW_BYTES] != row_bytes:
                return r
    return -1


@inlined
def _own_answers(R: int, rank: int, tables: int, pair_of_answer: int) -> int:
    """Address of the part of `pair_of_answer` for this rank's answers to itself. 0 if these were kept in order
    (`keep_own_answers`)."""
    recv_pairs = table(tables, R, RECV_PAIRS)
    first = 0
    for r in range(rank):
        first += recv_pairs[r]
    return pair_of_answer + 8 * first if pair_of_answer != 0 else 0


@inlined
def _answer_at(to: int, index: int, row_bytes: int, y: int, own: int, rank: int, recv_addresses: int) -> int:
    """Address of one answer, in this rank's own pairs or in the window of the rank that sent it. 0 if there is none."""
    if to < 0:
        return 0
    if to == rank:
        return int(y + (words(own + 8 * index, 1)[0] if own != 0 else index) * row_bytes)
    window = words(recv_addresses + 8 * to, 1)[0]
    return int(window + HEADER_BYTES + index * row_bytes) if window != 0 else 0


@compiled
def sum_answers_float32(
    y: int, weights: int, choices: int, T: int, K: int, H: int, R: int, rank: int, tables: int,
    recv_addresses: int, pair_of_answer: int, scratch: int, out: int, call: int,
) -> int:  # fmt: skip
    """Sum float32 rows: out[t] = sum over k, in order, of weights[t, k] * answer. `scratch` is not used.

    Returns the result of `check_answers`; sums only if that is -1.
    """
    stranger = check_answers(4 * H, R, rank, recv_addresses, call)
    if stranger >= 0:
        return stranger
    own = _own_answers(R, rank, tables, pair_of_answer)
    weight, choice = floats(weights, T * K), int32s(choices, 2 * T * K)
    for t in range(T):
        total = floats(out + t * 4 * H, H)
        total[:] = 0.0
        for i in range(t * K, t * K + K):
            at = _answer_at(choice[2 * i], choice[2 * i + 1], 4 * H, y, own, rank, recv_addresses)
            if at != 0:
                answer, w = floats(at, H), weight[i]
                for h in range(H):
                    total[h] += w * answer[h]
    return -1


@compiled
def sum_answers_bfloat16(
    y: int, weights: int, choices: int, T: int, K: int, H: int, R: int, rank: int, tables: int,
    recv_addresses: int, pair_of_answer: int, scratch: int, out: int, call: int,
) -> int:  # fmt: skip
    """Sum bfloat16 rows: converted to float32 (exact), summed there, rounded once to nearest even.

    `scratch`: 8*H bytes. Returns as `sum_answers_float32`.
    """
    stranger = check_answers(2 * H, R, rank, recv_addresses, call)
    if stranger >= 0:
        return stranger
    own = _own_answers(R, rank, tables, pair_of_answer)
    weight, choice = floats(weights, T * K), int32s(choices, 2 * T * K)
    total, wide = floats(scratch, H), floats(scratch + 4 * H, H)
    total_bits, wide_bits = int32s(scratch, H), int32s(scratch + 4 * H, H)
    for t in range(T):
        total[:] = 0.0
        for i in range(t * K, t * K + K):
            at = _answer_at(choice[2 * i], choice[2 * i + 1], 2 * H, y, own, rank, recv_addresses)
            if at != 0:
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
    return -1


@compiled
def gather_answers(
    y: int, row_bytes: int, choices: int, T: int, K: int, R: int, rank: int, tables: int,
    recv_addresses: int, pair_of_answer: int, out: int, has_choice: int,
) -> None:  # fmt: skip
    """Copy each choice's answer to out [T*K, row_bytes], for types without a sum above.

    `has_choice`: bool [T*K], false if a choice is -1 or its answer is lost.
    """
    own = _own_answers(R, rank, tables, pair_of_answer)
    choice = int32s(choices, 2 * T * K)
    found = carray(pointer(has_choice), (T * K,), types.uint8)
    for i in range(T * K):
        at = _answer_at(choice[2 * i], choice[2 * i + 1], row_bytes, y, own, rank, recv_addresses)
        found[i] = 1 if at != 0 else 0
        if at != 0:
            copy(out + i * row_bytes, at, row_bytes)
