"""The compiled part of `shm`: address of each message in shared memory, and the chunks of large messages.

The two ranks of a pair agree on the number of rounds, from the sizes in the first round. A pair that is done takes
no part in the rounds of others. So if some ranks have lost a rank and others have not yet, they stay in step.
Rejected: one number of rounds for all pairs, the largest. All ranks would have to compute the same number.

A round's number is exchange * STRIDE + chunk. STRIDE and the number of rounds of a pair are odd, so a pair's parities
alternate from chunk to chunk and from exchange to exchange. Two regions per pair are enough: `signals` explains it
for flags, and a rank posts a number only after it is done with all windows of the number before.

All functions begin with the place: signals, first region, R, rank, bytes of a region, the table of numbers that the
round posts and waits for (written here), and the mask. Every argument is an int64; tables are addresses of int64 [R].
"""

from dispatch.compiled.native import aligned, compiled, copy, inlined, words
from dispatch.wires import signals
from dispatch.wires.wire import REFUSED

STRIDE = (1 << 20) + 1
DISAGREEMENT, REFUSAL, OUT_OF_STEP = 0, 1, 2  # kinds of problems that `find_windows` reports
_SIZE, _TEXT_BYTES = 0, 1  # words of a flag's payload


@inlined
def _region(start: int, R: int, region_bytes: int, source: int, to: int, number: int) -> int:
    pair = source * (R - 1) + (to if to < source else to - 1)
    return start + (2 * pair + (number & 1)) * region_bytes


@compiled
def place_windows(
    base: int, start: int, R: int, rank: int, region_bytes: int, numbers: int, mask: int,
    exchange: int, send_bytes: int, staging: int, table: int,
) -> int:  # fmt: skip
    """Set the address of each message: its region, or staging if the message is larger or its receiver is masked.

    Returns the staging bytes needed.
    """
    sizes, addresses, masked = words(send_bytes, R), words(table, R), words(mask, R)
    staged = 0
    for to in range(R):
        if to == rank:
            addresses[to] = 0
        elif sizes[to] <= region_bytes and masked[to] == 0:
            addresses[to] = _region(start, R, region_bytes, rank, to, exchange * STRIDE)
        else:
            addresses[to] = staging + staged
            staged += aligned(sizes[to])
    return staged


@compiled
def post_first_round(
    base: int, start: int, R: int, rank: int, region_bytes: int, numbers: int, mask: int,
    exchange: int, send_bytes: int, table: int,
) -> None:  # fmt: skip
    """Write the sizes, copy the first chunk of each staged message to its region, and post to all unmasked peers."""
    sizes, addresses = words(send_bytes, R), words(table, R)
    round_, masked = words(numbers, R), words(mask, R)
    number = exchange * STRIDE
    for to in range(R):
        round_[to] = 0
        if to == rank or masked[to] != 0:
            continue
        round_[to] = number
        if sizes[to] > region_bytes:
            copy(_region(start, R, region_bytes, rank, to, number), addresses[to], region_bytes)
        words(signals.payload(base, R, to, rank, number), 2)[_SIZE] = sizes[to]
    signals.post(base, R, rank, numbers)


@compiled
def post_refusal(
    base: int, start: int, R: int, rank: int, region_bytes: int, numbers: int, mask: int,
    exchange: int, text: int, text_bytes: int,
) -> None:  # fmt: skip
    """Post a refusal in place of all messages."""
    round_, masked = words(numbers, R), words(mask, R)
    number = exchange * STRIDE
    for to in range(R):
        round_[to] = 0
        if to == rank or masked[to] != 0:
            continue
        round_[to] = number
        copy(_region(start, R, region_bytes, rank, to, number), text, text_bytes)
        payload = words(signals.payload(base, R, to, rank, number), 2)
        payload[_SIZE], payload[_TEXT_BYTES] = REFUSED, text_bytes
    signals.post(base, R, rank, numbers)


@compiled
def find_windows(
    base: int, start: int, R: int, rank: int, region_bytes: int, numbers: int, mask: int,
    exchange: int, send_bytes: int, expected: int, found: int, rounds: int, table: int,
) -> int:  # fmt: skip
    """Set each message's address and size, and its pair's number of rounds. `expected`: table of sizes, or 0 for any.

    Returns the most rounds of any pair, or -1 - (kind of problem * R + peer); for a refusal, `found` is its length.
    """
    sizes, addresses, round_ = words(found, R), words(table, R), words(numbers, R)
    pair_rounds, sent = words(rounds, R), words(send_bytes, R)
    most, problem = 1, 0
    for source in range(R):
        addresses[source] = sizes[source] = pair_rounds[source] = 0
        if round_[source] == 0:
            continue
        addresses[source] = _region(start, R, region_bytes, source, rank, round_[source])
        payload = words(signals.payload(base, R, rank, source, round_[source]), 2)
        sizes[source] = payload[_SIZE]
        if signals.flag_of(base, R, rank, source, round_[source]) != round_[source]:
            problem = -1 - (OUT_OF_STEP * R + source) if problem == 0 else problem
        elif sizes[source] == REFUSED:
            sizes[source] = payload[_TEXT_BYTES]
            return -1 - (REFUSAL * R + source)
        elif expected != 0 and words(expected, R)[source] != sizes[source]:
            problem = -1 - (DISAGREEMENT * R + source) if problem == 0 else problem
        longest = max(sizes[source], sent[source])
        pair_rounds[source] = ((longest + region_bytes - 1) // region_bytes) | 1
        most = max(most, pair_rounds[source])
    return problem if problem != 0 else most


@compiled
def stage_windows(
    base: int, start: int, R: int, rank: int, region_bytes: int, numbers: int, mask: int,
    found: int, staging: int, table: int,
) -> int:  # fmt: skip
    """Set the addresses of large messages to private memory. Returns its bytes; with `staging` 0 only counts them."""
    sizes, addresses = words(found, R), words(table, R)
    staged = 0
    for source in range(R):
        if sizes[source] > region_bytes:
            if staging != 0:
                addresses[source] = staging + staged
            staged += aligned(sizes[source])
    return staged


@compiled
def post_next_round(
    base: int, start: int, R: int, rank: int, region_bytes: int, numbers: int, mask: int,
    exchange: int, index: int, rounds: int, send_bytes: int, table: int,
) -> None:  # fmt: skip
    """Copy chunk `index` of each staged message to its region, and post to the pairs that still have rounds."""
    sizes, addresses = words(send_bytes, R), words(table, R)
    round_, pair_rounds, masked = words(numbers, R), words(rounds, R), words(mask, R)
    number, first = exchange * STRIDE + index, index * region_bytes
    for to in range(R):
        round_[to] = 0
        if index >= pair_rounds[to] or masked[to] != 0:
            continue
        round_[to] = number
        if sizes[to] > region_bytes and first < sizes[to]:
            region = _region(start, R, region_bytes, rank, to, number)
            copy(region, addresses[to] + first, min(region_bytes, sizes[to] - first))
    signals.post(base, R, rank, numbers)


@compiled
def take_chunks(
    base: int, start: int, R: int, rank: int, region_bytes: int, numbers: int, mask: int,
    index: int, found: int, table: int,
) -> None:  # fmt: skip
    """Copy chunk `index` of each large message out of its region."""
    sizes, addresses, round_ = words(found, R), words(table, R), words(numbers, R)
    first = index * region_bytes
    for source in range(R):
        if round_[source] != 0 and sizes[source] > region_bytes and first < sizes[source]:
            region = _region(start, R, region_bytes, source, rank, round_[source])
            copy(addresses[source] + first, region, min(region_bytes, sizes[source] - first))


KERNELS = (
    place_windows, post_first_round, post_refusal, find_windows, stage_windows, post_next_round, take_chunks,
)  # fmt: skip
