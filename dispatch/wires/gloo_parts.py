"""The compiled part of `gloo`: layout of an exchange's messages in the two tensors of an all-to-all.

Outgoing messages are placed one after the other. Each follows a prefix with its size, the exchange and the epoch, so a
kernel that fills a window writes directly to the memory that is sent. Incoming, every peer has a part of the same length,
for any message size: gloo accepts a message that is shorter than the posted receive. So the receiver does not need to
know sizes, and a rank that refuses does not need its peers'. (A tensor of such parts is mostly address space: only
written pages take memory.) If a message is longer than a part, its rest follows between the two ranks.

All functions begin with R, rank, bytes of a part and the table of masked ranks. Every argument is an int64; tables
are addresses of int64 [R].
"""

from dispatch.compiled.native import aligned, compiled, inlined, words
from dispatch.wires.wire import REFUSED

PREFIX_BYTES = 64  # size, number, epoch, bytes of a refusal's text, and padding for alignment
DISAGREEMENT, REFUSAL, OUT_OF_STEP = 0, 1, 2  # kinds of problems that `find_messages` reports
_SIZE, _NUMBER, _EPOCH, _TEXT_BYTES = 0, 1, 2, 3


@compiled
def place_messages(
    R: int, rank: int, part_bytes: int, mask: int,
    send_bytes: int, outgoing: int, capacity: int, number: int, epoch: int, text_bytes: int,
    table: int, lengths: int,
) -> int:  # fmt: skip
    """Set the address of each message and its length, prefix included, and write the prefixes.

    `text_bytes`: length of the refusal if all messages are one, otherwise negative.
    Returns the bytes of all messages. Writes nothing if `capacity` is less.
    """
    sizes, addresses, length = words(send_bytes, R), words(table, R), words(lengths, R)
    total = 0
    for to in range(R):
        if to != rank:
            total += aligned(PREFIX_BYTES + sizes[to])
    if total > capacity:
        return total
    at = outgoing
    for to in range(R):
        addresses[to] = length[to] = 0
        if to != rank:
            addresses[to] = at + PREFIX_BYTES
            length[to] = aligned(PREFIX_BYTES + sizes[to])
            prefix = words(at, 4)
            prefix[_SIZE] = sizes[to] if text_bytes < 0 else REFUSED
            prefix[_NUMBER], prefix[_EPOCH], prefix[_TEXT_BYTES] = number, epoch, text_bytes
            at += length[to]
    return total


@compiled
def find_messages(
    R: int, rank: int, part_bytes: int, mask: int,
    incoming: int, number: int, epoch: int, expected: int, found: int, table: int,
) -> int:  # fmt: skip
    """Set the address and size of each message. `expected`: table of expected sizes, or 0 to accept any size.

    Returns the length of the longest message, prefix included, or -1 - (kind of problem * R + peer). The peer is at
    another exchange (then `found` is its number and `table` its epoch), refused (then `found` is its text's length), or
    sent another size.
    """
    sizes, addresses, masked = words(found, R), words(table, R), words(mask, R)
    longest, problem, at = 0, 0, incoming
    for source in range(R):
        addresses[source] = sizes[source] = 0
        if source == rank:
            continue
        prefix = words(at, 4)
        message = at + PREFIX_BYTES
        at += part_bytes
        if masked[source] != 0:
            continue
        if prefix[_NUMBER] != number or prefix[_EPOCH] != epoch:
            sizes[source], addresses[source] = prefix[_NUMBER], prefix[_EPOCH]
            return -1 - (OUT_OF_STEP * R + source)
        addresses[source], sizes[source] = message, prefix[_SIZE]
        if sizes[source] == REFUSED:
            sizes[source] = prefix[_TEXT_BYTES]
            problem = -1 - (REFUSAL * R + source) if _is_lesser(problem, R) else problem
        elif expected != 0 and words(expected, R)[source] != sizes[source] and problem == 0:
            problem = -1 - (DISAGREEMENT * R + source)
        longest = max(longest, PREFIX_BYTES + sizes[source])
    return problem if problem != 0 else longest


@inlined
def _is_lesser(problem: int, R: int) -> bool:
    """Whether a refusal takes precedence over the problem found so far."""
    return problem == 0 or (-1 - problem) // R == DISAGREEMENT


KERNELS = (place_messages, find_messages)
