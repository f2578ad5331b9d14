"""The sender's side of a dispatch: count, size the messages, write them into the wire's windows.

Legend as in `layout`.
"""

from dispatch.cpu_kernels.message import (
    CURSOR,
    HEADER_BYTES,
    HEADER_CAPACITY,
    HEADER_PAIRS,
    HEADER_ROW_BYTES,
    HEADER_ROWS,
    HEADER_WORDS,
    LAST_TOKEN,
    PAIR_COUNTS,
    ROW_COUNTS,
    SENT_BYTES,
    message_bytes,
    rows_at,
    table,
)
from dispatch.native import compiled, copy, int32s, words


@compiled
def plan(
    slots: int, T: int, K: int, S: int, R: int, rank: int, tables: int, row_bytes: int, capacity: int,
    rank_of_slot: int, mask: int, send_bytes: int, choices: int,
) -> int:  # fmt: skip
    """Count rows and pairs per rank, size the messages, and note for each choice its rank and answer.

    `rank_of_slot`: int32 [R*S]. `mask`: int64 [R], 1 for a rank that is lost: its slots count as no choice.
    `choices`: int32 [T*K, 2], (rank, index among that rank's answers), or (-1, 0).
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
                to = homes[slot[i]]
                if last_token[to] != t:
                    last_token[to] = t
                    row_counts[to] += 1
                choice[2 * i], choice[2 * i + 1] = to, pair_counts[to]
                pair_counts[to] += 1
            i += 1
    for r in range(R):
        is_peer = r != rank and masked[r] == 0
        sizes[r] = message_bytes(row_counts[r], K, capacity, row_bytes) if is_peer else 0
        sent[r] += sizes[r]
    return -1


@compiled
def pack(
    x: int, slots: int, choices: int, T: int, K: int, S: int, R: int, rank: int, tables: int, header: int,
    mask: int, send_addresses: int, own_tokens: int, own_slots: int,
) -> None:  # fmt: skip
    """Write each rank's message; for this rank only its tokens (int64) and local slots (int32 [rows, K]).

    `header`: the words of HEADER_*, of which rows and pairs are filled in per rank.
    """
    row_counts, pair_counts = table(tables, R, ROW_COUNTS), table(tables, R, PAIR_COUNTS)
    cursor, last_token = table(tables, R, CURSOR), table(tables, R, LAST_TOKEN)
    windows, common, masked = words(send_addresses, R), words(header, HEADER_WORDS), words(mask, R)
    row_bytes, capacity = common[HEADER_ROW_BYTES], common[HEADER_CAPACITY]
    for r in range(R):
        cursor[r] = last_token[r] = -1
        if r != rank and masked[r] == 0:
            copy(windows[r], header, HEADER_BYTES)
            own = words(windows[r], HEADER_WORDS)
            own[HEADER_ROWS], own[HEADER_PAIRS] = row_counts[r], pair_counts[r]
    slot, tokens, choice = words(slots, T * K), words(own_tokens, T), int32s(choices, 2 * T * K)
    for t in range(T):
        for k in range(K):
            to = choice[2 * (t * K + k)]
            if to < 0:
                continue
            chosen = own_slots if to == rank else windows[to] + HEADER_BYTES
            if last_token[to] != t:
                last_token[to] = t
                cursor[to] += 1
                fresh = int32s(chosen + 4 * K * cursor[to], K)
                for other in range(K):
                    fresh[other] = -1
                if to == rank:
                    tokens[cursor[to]] = t
                else:
                    at = windows[to] + rows_at(row_counts[to], K, capacity) + cursor[to] * row_bytes
                    copy(at, x + t * row_bytes, row_bytes)
            int32s(chosen + 4 * K * cursor[to], K)[k] = slot[t * K + k] - to * S
