"""Format of messages between two ranks, and the tables that the passes of one exchange share.

A message, all parts 64-byte aligned:
    header: 8 words (HEADER_*);
    note: a few int64 for every other rank, the same number on all ranks, often none;
    of a dispatch: entries int32 [rows, 1 + K]: each row's origin (by default its token at the source), then its choices
    as slots of the receiver, -1 for a choice on another rank; then rows [rows, row_bytes];
    of a combine: answers [pairs, row_bytes] in the order of (row, choice), which both sides know.
A message holds only what is sent; wires transmit the sizes in the exchange itself.

All messages between ranks on CPUs have this format: normal and low-latency mode, both stages of node-limited
dispatch, and DeepEP's interfaces. (GPU kernels write to each other's memory instead, see `gpu.symmetric`.)

`tables` is int64 [NUM_TABLES, R]. Numba caches a kernel by its own file: after a change here, delete `__pycache__`.
"""

from typing import Any

from dispatch.compiled.native import aligned, inlined, words

HEADER_BYTES = 64
HEADER_WORDS = 8
HEADER_ROWS, HEADER_PAIRS = 0, 1  # of this message; the other words must be equal on all ranks
HEADER_ROW_BYTES, HEADER_CHOICES, HEADER_CALL, HEADER_SLOTS, HEADER_CAPACITY, HEADER_FORMAT = 2, 3, 4, 5, 6, 7
NOTE_SHIFT = 16  # in HEADER_FORMAT, the number of a note's words is above the code of dtype and row format
FIELDS = {
    HEADER_ROW_BYTES: "bytes per row",
    HEADER_CHOICES: "K",
    HEADER_CALL: "call number",
    HEADER_SLOTS: "slots per rank",
    HEADER_CAPACITY: "capacity of low-latency mode (0: normal)",
    HEADER_FORMAT: "code of dtype, row format and note",
}

# Rows of the tables, each with one int64 per rank.
ROW_COUNTS = 0  # rows for each rank
PAIR_COUNTS = 1  # answers to receive from each rank
RECV_ROWS = 2  # rows from each rank
RECV_PAIRS = 3  # answers to send to each rank
CURSOR, LAST_TOKEN, NEXT_PAIR = 4, 5, 6  # working state of passes
SENT_BYTES, ANSWERED_BYTES = 7, 8  # counters: bytes sent to each rank by dispatch and by combine so far
NUM_TABLES = 9


@inlined
def table(tables: int, R: int, row: int) -> Any:
    """Return one row of the tables."""
    return words(tables + 8 * R * row, R)


@inlined
def entries_at(format_word: int) -> int:
    """Return the offset of a dispatch message's entries. `format_word`: its header's HEADER_FORMAT."""
    return HEADER_BYTES + aligned(8 * (format_word >> NOTE_SHIFT))


@inlined
def rows_at(num_rows: int, K: int, format_word: int) -> int:
    """Return the offset of a dispatch message's rows."""
    return entries_at(format_word) + aligned(4 * num_rows * (1 + K))
