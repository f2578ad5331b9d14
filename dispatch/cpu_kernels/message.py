"""What travels between two ranks, and the scratch that the passes of one dispatch and its combine share.

A message, all parts 64-byte aligned:
    header: 8 words (HEADER_*), then for dispatch: local slots int32 [room, K], then rows [room, row_bytes];
    for combine: answers [pairs, row_bytes].
The room is the number of rows, or in low-latency mode the agreed capacity, whatever is sent: then a message has one
size and each part one place.

`tables` is int64 [NUM_TABLES, R]. Numba caches a kernel by its own file: after a change here, delete `__pycache__`.
"""

from typing import Any

from dispatch.native import inlined, words

ALIGNMENT = 64
HEADER_BYTES = 64
HEADER_WORDS = 8
HEADER_ROWS, HEADER_PAIRS = 0, 1  # of this message; what follows must be equal on all ranks
HEADER_ROW_BYTES, HEADER_CHOICES, HEADER_CALL, HEADER_SLOTS, HEADER_CAPACITY, HEADER_FORMAT = 2, 3, 4, 5, 6, 7

# Rows of the scratch, each with one int64 per rank.
ROW_COUNTS = 0  # rows for each rank
PAIR_COUNTS = 1  # answers that will come back from each rank
RECV_ROWS = 2  # rows from each rank
RECV_PAIRS = 3  # answers to send to each rank
CURSOR, LAST_TOKEN = 4, 5
SENT_BYTES, ANSWERED_BYTES = 6, 7  # counters: bytes sent to each rank by dispatch and by combine so far
NUM_TABLES = 8


@inlined
def table(tables: int, R: int, row: int) -> Any:
    """One row of the scratch."""
    return words(tables + 8 * R * row, R)


@inlined
def rows_at(num_rows: int, K: int, capacity: int) -> int:
    """Where a dispatch message's rows begin."""
    room = capacity if capacity > 0 else num_rows
    return HEADER_BYTES + (4 * room * K + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@inlined
def message_bytes(num_rows: int, K: int, capacity: int, row_bytes: int) -> int:
    """Size of a dispatch message."""
    room = capacity if capacity > 0 else num_rows
    return rows_at(num_rows, K, capacity) + room * row_bytes
