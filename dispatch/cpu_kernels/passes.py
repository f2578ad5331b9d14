"""An exchange's passes as kernels of a program. Python only waits between them.

The passes are those of this folder, applied to windows in shared memory. They read all arguments from the
exchange's block of words. If a pass cannot do its work (a message is larger than its window, or there is no room for the
rows), it records the reason. The passes after it then do nothing until Python has done the work (`dispatch.programmed`).

Legend: as in `layout`.
"""

import zlib
from pathlib import Path
from typing import Any

from dispatch import cpu_kernels as passes
from dispatch.compiled.native import inlined, words
from dispatch.compiled.team import Kernel
from dispatch.cpu_kernels import message
from dispatch.wires import shm_regions as regions

# The block's words; names with `_AT` are addresses.
STATE, FOUND = 0, 1  # why a pass stopped, and what it found
NUM_TOKENS, NUM_ROWS = 2, 3  # tokens of this rank, and received rows
EXCHANGE = 4  # number of the wire's next exchange
RANKS, RANK, SLOTS, TABLES_AT, HEADER_AT, HOMES_AT, MASK_AT = range(5, 12)
ROW_SIZES_AT, ANSWER_SIZES_AT, ANSWERS_DUE_AT, CHOICES_AT, OWN_TOKENS_AT, OWN_ENTRIES_AT = range(12, 18)
SEND_AT, RECV_AT, OFFSETS_AT, ROW_OF_PAIR_AT, PAIR_OF_ANSWER_AT, PAIR_ROOM = range(18, 24)
ROWS_AT, ROW_ROOM = 24, 25  # destination of received rows
ANSWER_CALL, ANSWER_CHOICES = 26, 27  # of the answers to receive; by then the header is that of the next rows
ANSWERS_AT, ANSWER_PAIRS_AT = 28, 29  # this rank's answers to itself, see `cpu_kernels.sum_answers_float32`
SIGNALS_AT, REGIONS_AT, REGION_BYTES, NUMBERS_AT = range(30, 34)
BLOCK_WORDS = 34

# States. FOUND is the flat index of a slot, or a rank.
FINE, BAD_SLOT, ROWS_TOO_LARGE, NO_ROOM, OTHER_CALL, ANSWERS_TOO_LARGE, OTHER_ANSWERS = range(7)

_TILE_VALUES = 1 << 14
_HERE, _DISPATCH = Path(__file__).parent, Path(__file__).parents[1]
# Covers all code that is compiled into the kernels: numba's cache checks only their own file.
_VERSION = zlib.crc32(
    b"".join(
        path.read_bytes()
        for path in (
            *sorted(_HERE.glob("*.py")),
            *(_DISPATCH / "wires" / f"{name}.py" for name in ("signals", "shm_regions")),
            _DISPATCH / "compiled" / "native.py",
        )
    )
)


@inlined
def _open_windows(b: Any, sizes: int) -> int:
    # Returns the bytes of messages without a window.
    staged: int = regions.place_windows(
        b[SIGNALS_AT], b[REGIONS_AT], b[RANKS], b[RANK], b[REGION_BYTES], b[NUMBERS_AT], b[MASK_AT], b[EXCHANGE],
        sizes, 0, b[SEND_AT],
    )  # fmt: skip
    return staged


@inlined
def _post(b: Any, sizes: int) -> None:
    regions.post_first_round(
        b[SIGNALS_AT], b[REGIONS_AT], b[RANKS], b[RANK], b[REGION_BYTES], b[NUMBERS_AT], b[MASK_AT], b[EXCHANGE],
        sizes, b[SEND_AT],
    )  # fmt: skip


def _send_rows(tile, block, x, slots, num_tokens_at):  # type: ignore[no-untyped-def]
    if tile < 0:
        return 1
    b = words(block, BLOCK_WORDS)
    if b[STATE] != FINE:
        return 0
    num_tokens = words(num_tokens_at, 1)[0]
    header = words(b[HEADER_AT], message.HEADER_WORDS)
    choices, sizes = header[message.HEADER_CHOICES], b[ROW_SIZES_AT]
    b[NUM_TOKENS] = num_tokens
    bad = passes.plan(
        slots, num_tokens, choices, b[SLOTS], b[RANKS], b[RANK], b[TABLES_AT], header[message.HEADER_ROW_BYTES],
        header[message.HEADER_FORMAT], b[HOMES_AT], b[MASK_AT], sizes, b[CHOICES_AT], 0,
    )  # fmt: skip
    if bad >= 0:
        b[STATE], b[FOUND] = BAD_SLOT, bad
        return 0
    if _open_windows(b, sizes) > 0:
        b[STATE] = ROWS_TOO_LARGE
        return 0
    passes.pack(
        x, slots, b[CHOICES_AT], 0, num_tokens, choices, b[SLOTS], b[RANKS], b[RANK], b[TABLES_AT], b[HEADER_AT], 0,
        b[MASK_AT], b[SEND_AT], b[OWN_TOKENS_AT], b[OWN_ENTRIES_AT],
    )  # fmt: skip
    _post(b, sizes)
    return 0


def _receive_rows(tile, block, x):  # type: ignore[no-untyped-def]
    if tile < 0:
        return 1
    b = words(block, BLOCK_WORDS)
    choices = words(b[HEADER_AT], message.HEADER_WORDS)[message.HEADER_CHOICES]
    if b[STATE] == FINE:
        num_rows, num_pairs, stranger = passes.receive(
            b[HEADER_AT], choices, b[SLOTS], b[RANKS], b[RANK], 1, b[TABLES_AT], b[RECV_AT], b[OWN_ENTRIES_AT],
            b[ROW_OF_PAIR_AT], b[OFFSETS_AT], b[PAIR_OF_ANSWER_AT], b[PAIR_ROOM], x, b[OWN_TOKENS_AT], b[ROWS_AT],
            b[ROW_ROOM], -1,
        )  # fmt: skip
        b[NUM_ROWS] = num_rows
        if stranger >= 0:
            b[STATE], b[FOUND] = OTHER_CALL, stranger
        elif num_pairs > b[PAIR_ROOM] or num_rows > b[ROW_ROOM]:
            b[STATE] = NO_ROOM
    if b[STATE] != FINE:  # the experts get no rows
        b[NUM_ROWS] = 0
        words(b[OFFSETS_AT], b[SLOTS] + 1)[:] = 0
    return 0


def _send_answers(tile, block, y, row_bytes):  # type: ignore[no-untyped-def]
    if tile < 0:
        return 1
    b = words(block, BLOCK_WORDS)
    if b[STATE] != FINE:
        return 0
    sizes = b[ANSWER_SIZES_AT]
    b[ANSWERS_AT], b[ANSWER_PAIRS_AT] = y, b[PAIR_OF_ANSWER_AT]
    passes.size_answers(row_bytes, b[RANKS], b[RANK], b[TABLES_AT], b[MASK_AT], sizes, b[ANSWERS_DUE_AT])
    if _open_windows(b, sizes) > 0:
        b[STATE] = ANSWERS_TOO_LARGE
        return 0
    passes.pack_answers(
        y, row_bytes, b[RANKS], b[RANK], b[TABLES_AT], sizes, b[SEND_AT], b[PAIR_OF_ANSWER_AT], b[ANSWER_CALL]
    )
    _post(b, sizes)
    return 0


def _sum_answers(tile, block, weights, out, hidden):  # type: ignore[no-untyped-def]
    b = words(block, BLOCK_WORDS)
    num_tokens, choices = b[NUM_TOKENS], b[ANSWER_CHOICES]
    at_once = max(1, _TILE_VALUES // (hidden * (choices + 1)))
    if tile < 0:
        if b[STATE] != FINE:
            return 0
        stranger = passes.check_answers(4 * hidden, b[RANKS], b[RANK], b[RECV_AT], b[ANSWER_CALL])
        if stranger >= 0:
            b[STATE], b[FOUND] = OTHER_ANSWERS, stranger
            return 0
        return (num_tokens + at_once - 1) // at_once
    first = tile * at_once
    passes.sum_answers_float32(
        b[ANSWERS_AT], weights + 4 * choices * first, b[CHOICES_AT] + 8 * choices * first,
        min(at_once, num_tokens - first), choices, hidden, b[RANKS], b[RANK], b[TABLES_AT], b[RECV_AT],
        b[ANSWER_PAIRS_AT], 0, out + 4 * hidden * first, b[ANSWER_CALL],
    )  # fmt: skip
    return 0


SEND_ROWS, RECEIVE_ROWS = Kernel(_send_rows, _VERSION), Kernel(_receive_rows, _VERSION)
SEND_ANSWERS, SUM_ANSWERS = Kernel(_send_answers, _VERSION), Kernel(_sum_answers, _VERSION)
PASSES = SEND_ROWS, RECEIVE_ROWS, SEND_ANSWERS, SUM_ANSWERS


def pass_rows(
    block: int, *, x: int, slots: int, num_tokens: int, answers: int, weights: int, out: int, hidden: int
) -> Any:
    """Return rows of programs for one layer's exchange, in the order in which they run, for float32.

    Args:
        block: Address of the exchange's block.
        x: Address of the tokens [T, H], which stay until rows are received. slots: Address of [T, K] int64.
        num_tokens: Address of T, read when the program runs.
        answers: Address of [P, H], unweighted; they stay until they are summed. weights: Address of [T, K].
        out: Address of [T, H].

    Returns:
        Rows that send rows, receive rows, send answers and sum answers. After the first and third, wait for the peers.
    """
    return (
        SEND_ROWS.row(block, x, slots, num_tokens),
        RECEIVE_ROWS.row(block, x),
        SEND_ANSWERS.row(block, answers, 4 * hidden),
        SUM_ANSWERS.row(block, weights, out, hidden),
    )
