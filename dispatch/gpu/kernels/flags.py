# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: SIM102 - a condition that loads must not be evaluated together with its guard
"""Flags of the low-latency Triton kernels: publish to every peer that a call's contents are complete, or a refusal.

A flag is one int64 at the receiver, by source: the call's number in its upper half and its kind in the lower half, so
that ranks that disagree are detected. Kind 0 is a refusal; its text is stored separately. Numbers only grow, so nothing
is ever cleared. The end of a kernel orders its stores before the release in the next one; within one, a barrier does.
The device counts the number (`calls`, int64 [1]), which also selects the half of the memory for the call. No argument
from the host changes from call to call, so a CUDA graph can replay the launches.

A kernel that writes a call's contents can also begin and end the call (`number_of_call`, `end_call`), which saves two launches.
Its programs count themselves, and the last one publishes: each program's stores happen before its count, and all counts before
the flags. NVSHMEM's puts keep their own launch: the last program could only wait for its own puts.

Legend: R ranks. Addresses are int64; offsets (`_at`) are within a half of `half_bytes`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dispatch.gpu import nvshmem

LATE = tl.constexpr(0)  # status of a source: masked, or its flag has not arrived
CAME = tl.constexpr(1)
REFUSED = tl.constexpr(2)
OTHER_CALL = tl.constexpr(3)
WAS_LATE = tl.constexpr(4)  # in `trouble`
POLLS_PER_STOP = tl.constexpr(256)  # polls of a flag for each poll of the host's word


@triton.jit
def begin_call(calls):
    """Count a call. One program, the first launch of every call."""
    tl.store(calls, tl.load(calls) + 1)


@triton.jit
def half_at(calls, half_bytes):
    """Return the offset of this call's half."""
    return (tl.load(calls) & 1) * half_bytes


@triton.jit
def number_of_call(calls, BEGINS: tl.constexpr):
    """Return the number of the call that this kernel belongs to, or that it begins."""
    return tl.load(calls) + 1 if BEGINS else tl.load(calls)


@triton.jit
def end_call(peers, mask, calls, ended, rank, number, half_bytes, kind, num_programs, R: tl.constexpr):
    """Publish a call that this kernel began, in its last program. Every program calls this once, after its stores.

    `ended`: int32 [1], programs that have ended; 0 between launches.
    """
    tl.debug_barrier()
    if tl.atomic_add(ended, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        tl.store(ended, 0)
        tl.store(calls, number)
        for peer in range(R):
            if tl.load(mask + peer) == 0:
                flag = (tl.load(peers + peer) + (number & 1) * half_bytes).to(
                    tl.pointer_type(tl.int64)
                ) + rank
                tl.atomic_xchg(flag, (number << 32) | kind, sem="release", scope="sys")


@triton.jit(do_not_specialize=["rank", "kind"])
def post_flags(peers, mask, calls, rank, half_bytes, kind, HAS_REMOTE: tl.constexpr):
    """Program (peer): publish the stores of earlier launches there, with the call's number and kind."""
    peer = tl.program_id(0)
    flags_at = half_at(calls, half_bytes)
    word = (tl.load(calls) << 32) | kind
    if tl.load(mask + peer) == 0:
        base = tl.load(peers + peer)
        if base != 0:
            flag = (base + flags_at).to(tl.pointer_type(tl.int64)) + rank
            tl.atomic_xchg(flag, word, sem="release", scope="sys")
        elif HAS_REMOTE:
            own = tl.load(peers + rank)
            nvshmem.quiet()
            nvshmem.set_flag(own + flags_at + rank * 8, word, peer)


@triton.jit(do_not_specialize=["rank"])
def post_refusal(
    text, peers, mask, calls, rank, half_bytes, texts_at, TEXT_BYTES: tl.constexpr, HAS_REMOTE: tl.constexpr
):
    """Program (peer): write a text of TEXT_BYTES (a power of two) in place of contents, then the flag."""
    peer = tl.program_id(0)
    flags_at = half_at(calls, half_bytes)
    texts_at += flags_at
    word = tl.load(calls) << 32
    at = tl.arange(0, TEXT_BYTES)
    content = tl.load(text + at)
    if tl.load(mask + peer) == 0:
        base = tl.load(peers + peer)
        if base != 0:
            place = (base + texts_at).to(tl.pointer_type(tl.uint8)) + rank * TEXT_BYTES
            tl.store(place + at, content)
            tl.debug_barrier()
            flag = (base + flags_at).to(tl.pointer_type(tl.int64)) + rank
            tl.atomic_xchg(flag, word, sem="release", scope="sys")
        elif HAS_REMOTE:
            own = tl.load(peers + rank)
            outgoing = own + texts_at + rank * TEXT_BYTES
            tl.store(outgoing.to(tl.pointer_type(tl.uint8)) + at, content)
            tl.debug_barrier()
            nvshmem.put_block(outgoing, outgoing, TEXT_BYTES, peer)
            nvshmem.quiet()
            nvshmem.set_flag(own + flags_at + rank * 8, word, peer)


@triton.jit(do_not_specialize=["rank", "kind", "limit"])
def wait_flags(
    peers, mask, arrived, trouble, waits, calls, stop, rank, half_bytes, kind, limit,
    IS_LAST: tl.constexpr, IS_MASKING: tl.constexpr, ANY_CALL: tl.constexpr, HAS_CLOCK: tl.constexpr,
    HAS_WAITS: tl.constexpr,
):  # fmt: skip
    """Program (source): poll its flag once, then until it arrives or the limit is reached, and record the status.

    `limit`: int64, nanoseconds with HAS_CLOCK (a GPU), otherwise polls (the interpreter has no clock).

    `arrived`: int32 [R], LATE, CAME, REFUSED or OTHER_CALL (with ANY_CALL, for a rank that refuses, every flag is
    CAME). `trouble`: int64 [R], keeps number * 8 + REFUSED, OTHER_CALL or, if IS_LAST, WAS_LATE until the host has
    checked. A source that is late then is masked if IS_MASKING. Otherwise it is polled only once until that check, so
    that not every call of a step waits for a rank that is gone. `waits`: int64 [R], nanoseconds are added if
    HAS_WAITS. `stop`: address of an int64 in the host's memory; the wait ends when the host has set it.
    """
    source = tl.program_id(0)
    flag = (tl.load(peers + rank) + half_at(calls, half_bytes)).to(tl.pointer_type(tl.int64)) + source
    number, stop = tl.load(calls), stop.to(tl.pointer_type(tl.int64))
    word = (number << 32) | kind
    status, looks, passed = 0, tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if tl.load(mask + source) == 0:
        if HAS_CLOCK:
            begin = globaltimer()
        until = tl.where((tl.load(trouble + source) & 7) == WAS_LATE, 0, limit.to(tl.int64))
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while ((seen >> 32) < number) & (passed < until):
            # The word is behind a bus: polling it takes longer than polling the flag.
            if looks % POLLS_PER_STOP == 0:
                until = tl.where(tl.load(stop, volatile=True) != 0, 0, until)
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            looks += 1
            passed = looks
            if HAS_CLOCK:
                passed = globaltimer() - begin
        if (seen >> 32) >= number:
            status = tl.where(seen == word, CAME, tl.where(seen == (number << 32), REFUSED, OTHER_CALL))
            status = CAME if ANY_CALL else status
            if status != CAME:
                tl.store(trouble + source, number * 8 + status)
        elif IS_LAST:
            tl.store(trouble + source, number * 8 + WAS_LATE)
            if IS_MASKING:
                tl.store(mask + source, 1)
        if HAS_WAITS:
            if source != rank:
                tl.store(waits + source, tl.load(waits + source) + (globaltimer() - begin))
    tl.store(arrived + source, status)


@triton.jit
def is_sound(arrived, R: tl.constexpr):
    """Return whether no source refused the call or made another one. Otherwise it delivers nothing."""
    worst = 0
    for source in range(R):
        worst = tl.maximum(worst, tl.load(arrived + source))
    return worst <= CAME
