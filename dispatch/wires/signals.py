"""Flags between processes in shared memory: post a numbered message to peers, wait for theirs.

Per (receiver, sender, parity of the number) there is one line with the sender's flag and a few words of payload. The
flag is the number, stored last. Numbers only grow, so nothing is ever cleared. Two parities are enough: a peer posts
its second message after n only after it has received this rank's first after n, which this rank posts when done with n.

An int64 table [R] holds the number to send to and receive from each peer. A peer with 0 takes no part: nothing is
written to it and it is not waited for. This rank's own entry must be 0.

A waiter spins for a bounded time, then sleeps on its doorbell (futex). A sender rings only if the receiver sleeps.
The two fences make sure that either the sender sees the sleeper or the sleeper sees the flag (Dekker).

Layout, in lines of LINE_BYTES: per rank a block of [state, doorbell, sleeping, flags of (parity, sender)...].
"""

from typing import Any

from dispatch.compiled.native import (
    compiled,
    fence,
    fetch_add,
    futex_wait,
    futex_wake,
    inlined,
    load,
    now_ns,
    pause,
    store,
    words,
)

LINE_BYTES = 128  # two cache lines: cores fetch neighbours in pairs
PAYLOAD_WORDS = LINE_BYTES // 8 - 1
_STATE, _DOORBELL, _SLEEPING, _FLAGS = 0, 1, 2, 3
_SPINS_PER_CLOCK = 32


@inlined
def block_bytes(R: int) -> int:
    """Return the size of one rank's block, in bytes."""
    return LINE_BYTES * (_FLAGS + 2 * R)


@inlined
def _line(base: int, R: int, rank: int, index: int) -> int:
    return base + rank * block_bytes(R) + index * LINE_BYTES


@inlined
def _flag(base: int, R: int, receiver: int, sender: int, number: int) -> int:
    return _line(base, R, receiver, _FLAGS + (number & 1) * R + sender)


@compiled
def payload(base: int, R: int, receiver: int, sender: int, number: int) -> int:
    """Return the address of the payload of message `number` from `sender` to `receiver`."""
    return _flag(base, R, receiver, sender, number) + 8


@compiled
def post(base: int, R: int, rank: int, numbers: int) -> None:
    """Set this rank's flag at the peers of the table, after the payload and all its other writes. Wake sleeping peers."""
    number = words(numbers, R)
    for peer in range(R):
        if number[peer] != 0:
            store(_flag(base, R, peer, rank, number[peer]), number[peer])
    fence()
    for peer in range(R):
        if number[peer] != 0 and load(_line(base, R, peer, _SLEEPING)) != 0:
            ring(base, R, peer)


@compiled
def ring(base: int, R: int, peer: int) -> None:
    """Wake a sleeping peer, or keep it from falling asleep."""
    fetch_add(_line(base, R, peer, _DOORBELL), 1)
    futex_wake(_line(base, R, peer, _DOORBELL))


@compiled
def set_state(base: int, R: int, rank: int, state: int) -> None:
    """Publish this rank's state and wake every peer. 0 is alive; the caller defines the other values."""
    store(_line(base, R, rank, _STATE), state)
    fence()
    for peer in range(R):
        if peer != rank:
            ring(base, R, peer)


@compiled
def state_of(base: int, R: int, rank: int) -> int:
    """Return the state that a rank last set."""
    return int(load(_line(base, R, rank, _STATE)))


@compiled
def missing(base: int, R: int, rank: int, numbers: int) -> int:
    """Return the first peer of the table with a missing message, or -1."""
    number = words(numbers, R)
    for peer in range(R):
        if number[peer] != 0 and load(_flag(base, R, rank, peer, number[peer])) < number[peer]:
            return peer
    return -1


@compiled
def flag_of(base: int, R: int, rank: int, sender: int, number: int) -> int:
    """Return the flag in the line of `number` from `sender`: a later number if the sender is ahead."""
    return int(load(_flag(base, R, rank, sender, number)))


@compiled
def wait_all(base: int, R: int, rank: int, numbers: int, spin_ns: int, slice_ns: int, scratch: int) -> int:
    """Wait for the message of every peer of the table: spin for `spin_ns`, then sleep, for at most `slice_ns` in all.

    Returns -1, or a peer with a missing message if the slice is over or if that peer has left.
    `scratch`: address of two words.
    """
    number = words(numbers, R)
    begin, late = 0, missing(base, R, rank, numbers)
    while late >= 0:
        for _ in range(_SPINS_PER_CLOCK):
            pause()
            if load(_flag(base, R, rank, late, number[late])) >= number[late]:
                break
        late = missing(base, R, rank, numbers)
        now = now_ns(scratch)
        begin = now if begin == 0 else begin
        if late >= 0 and (now - begin >= slice_ns or load(_line(base, R, late, _STATE)) != 0):
            return late
        if late >= 0 and now - begin >= spin_ns:
            _sleep(base, R, rank, numbers, slice_ns - (now - begin), scratch)
            late = missing(base, R, rank, numbers)
    return -1


@compiled
def _sleep(base: int, R: int, rank: int, numbers: int, timeout_ns: int, scratch: int) -> None:
    """Sleep until the doorbell rings. Return at once if no message is missing."""
    doorbell, sleeping = _line(base, R, rank, _DOORBELL), _line(base, R, rank, _SLEEPING)
    seen = load(doorbell)
    store(sleeping, 1)
    fence()
    late = missing(base, R, rank, numbers)
    if late >= 0 and load(_line(base, R, late, _STATE)) == 0:
        futex_wait(doorbell, seen, timeout_ns, scratch)
    store(sleeping, 0)


@compiled
def write_payload(base: int, R: int, rank: int, number: int, values: int, count: int) -> None:
    """Write the same `count` words for every peer as the payload of message `number`; `post` publishes them."""
    source = words(values, count)
    for peer in range(R):
        target: Any = words(payload(base, R, peer, rank, number), count)
        for i in range(count):
            target[i] = source[i]


@compiled
def read_payloads(base: int, R: int, rank: int, number: int, values: int, count: int) -> None:
    """Copy every rank's words, including this rank's, to `values` [R, count]."""
    for peer in range(R):
        source = words(payload(base, R, rank, peer, number), count)
        target = words(values + 8 * count * peer, count)
        for i in range(count):
            target[i] = source[i]


KERNELS = (post, set_state, state_of, missing, wait_all, write_payload, read_payloads)
