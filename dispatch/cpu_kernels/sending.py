"""Send a dispatch: count rows, size the messages, and write them into the wire's windows.

Legend: as in `layout`.
"""

from dispatch.compiled.native import compiled, copy, int32s, words
from dispatch.cpu_kernels.message import (
    CURSOR,
    HEADER_BYTES,
    HEADER_FORMAT,
    HEADER_PAIRS,
    HEADER_ROW_BYTES,
    HEADER_ROWS,
    HEADER_WORDS,
    LAST_TOKEN,
    NEXT_PAIR,
    NOTE_SHIFT,
    PAIR_COUNTS,
    ROW_COUNTS,
    SENT_BYTES,
    entries_at,
    rows_at,
    table,
)


@compiled
def find_bad_slot(slots: int, count: int, num_slots: int) -> int:
    """Return the flat index of the first slot outside [-1, num_slots), or -1. For a check before `plan`."""
    slot = words(slots, count)
    for i in range(count):
        if slot[i] < -1 or slot[i] >= num_slots:
            return i
    return -1


@compiled
def plan(
    slots: int, T: int, K: int, S: int, R: int, rank: int, tables: int, row_bytes: int, format_word: int,
    rank_of_slot: int, mask: int, send_bytes: int, choices: int, is_unique: int,
) -> int:  # fmt: skip
    """Count rows and pairs per rank, size the messages, and record the rank and answer of each choice.

    `rank_of_slot`: int32 [R*S]. `mask`: int64 [R], 1 for a lost rank: its slots count as no choice.
    `choices`: int32 [T*K, 2], (rank, index among that rank's answers), or (-1, 0).
    `is_unique`: 1 if a slot that a token repeats has one answer, 0 if each repetition has its own.
    Returns -1, or the flat index of the first slot id out of range.
    """
    row_counts, pair_counts = table(tables, R, ROW_COUNTS), table(tables, R, PAIR_COUNTS)
    last_token, sizes, sent = table(tables, R, LAST_TOKEN), words(send_bytes, R), table(tables, R, SENT_BYTES)
    homes, masked = int32s(rank_of_slot, R * S), words(mask, R)
    for r in range(R):
        row_counts[r] = pair_counts[r] = 0
        last_token[r] = -1
    slot, choice = words(slots, T * K), int32s(choices, 2 * T * K)
    i = 0
    for t in range(T):
        for _ in range(K):
            choice[2 * i], choice[2 * i + 1] = -1, 0
            if slot[i] < -1 or slot[i] >= R * S:
                return i
            if slot[i] >= 0 and masked[homes[slot[i]]] == 0:
                to, twin = homes[slot[i]], -1
                if is_unique != 0:
                    for j in range(t * K, i):
                        twin = j if slot[j] == slot[i] and twin < 0 else twin
                if last_token[to] != t:
                    last_token[to] = t
                    row_counts[to] += 1
                choice[2 * i], choice[2 * i + 1] = to, pair_counts[to]
                if twin >= 0:
                    choice[2 * i + 1] = choice[2 * twin + 1]
                else:
                    pair_counts[to] += 1
            i += 1
    for r in range(R):
        is_peer = r != rank and masked[r] == 0
        sizes[r] = rows_at(row_counts[r], K, format_word) + row_counts[r] * row_bytes if is_peer else 0
        sent[r] += sizes[r]
    return -1


@compiled
def pack(
    x: int, slots: int, choices: int, origins: int, T: int, K: int, S: int, R: int, rank: int, tables: int,
    header: int, note: int, mask: int, send_addresses: int, own_tokens: int, own_entries: int,
) -> None:  # fmt: skip
    """Write each rank's message to its window. For this rank itself, record its tokens and their entries.

    `x`: rows, row_bytes apart. `origins`: int32 [T] to write in front of the entries, or 0 for the tokens' own numbers.
    `header`: HEADER_WORDS, the common part of all messages; the counts are filled in per rank. `note`: int64.
    """
    row_counts, pair_counts = table(tables, R, ROW_COUNTS), table(tables, R, PAIR_COUNTS)
    cursor, last_token = table(tables, R, CURSOR), table(tables, R, LAST_TOKEN)
    next_pair = table(tables, R, NEXT_PAIR)
    windows, common, masked = words(send_addresses, R), words(header, HEADER_WORDS), words(mask, R)
    row_bytes, format_word, width = common[HEADER_ROW_BYTES], common[HEADER_FORMAT], 1 + K
    for r in range(R):
        cursor[r] = last_token[r] = -1
        next_pair[r] = 0
        if r != rank and masked[r] == 0:
            copy(windows[r], header, HEADER_BYTES)
            copy(windows[r] + HEADER_BYTES, note, 8 * (format_word >> NOTE_SHIFT))
            own = words(windows[r], HEADER_WORDS)
            own[HEADER_ROWS], own[HEADER_PAIRS] = row_counts[r], pair_counts[r]
    first = entries_at(format_word)
    slot, tokens, choice = words(slots, T * K), words(own_tokens, T), int32s(choices, 2 * T * K)
    origin = int32s(origins, T)
    for t in range(T):
        for k in range(K):
            to = choice[2 * (t * K + k)]
            if to < 0:
                continue
            entries = own_entries if to == rank else windows[to] + first
            if last_token[to] != t:
                last_token[to] = t
                cursor[to] += 1
                fresh = int32s(entries + 4 * width * cursor[to], width)
                fresh[0] = origin[t] if origins != 0 else t
                for other in range(1, width):
                    fresh[other] = -1
                if to == rank:
                    tokens[cursor[to]] = t
                else:
                    at = windows[to] + rows_at(row_counts[to], K, format_word) + cursor[to] * row_bytes
                    copy(at, x + t * row_bytes, row_bytes)
            if choice[2 * (t * K + k) + 1] == next_pair[to]:  # otherwise it shares an earlier choice's answer
                next_pair[to] += 1
                int32s(entries + 4 * width * cursor[to], width)[1 + k] = slot[t * K + k] - to * S
