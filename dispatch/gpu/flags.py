# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: SIM102 - a condition that loads must not be evaluated beside the one that guards it
"""Flags of the low-latency Triton kernels: say to every peer that a call's contents are there, or that it is refused.

A flag is one int64 at the receiver, by source: the call's number in its upper half, in its lower half what call it
is (its kind), so that ranks which disagree notice; 0 there is a refusal, whose text lies beside. Numbers only grow, so
nothing is ever cleared. A kernel's end orders what it stored before the release in the next one; within one, a barrier
does.
The number is counted on the device (`calls`, int64 [1]), and with it goes the half of the memory that the call uses: the
host passes nothing that changes from call to call, so a CUDA graph can replay the launches.

Legend: R ranks. Addresses are int64; offsets (`_at`) are within a half of `half_bytes`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dispatch.gpu import nvshmem

LATE = tl.constexpr(0)  # of a source: masked, or its flag has not come
CAME = tl.constexpr(1)
REFUSED = tl.constexpr(2)
OTHER_CALL = tl.constexpr(3)
WAS_LATE = tl.constexpr(4)  # as trouble
POLLS_PER_STOP = tl.constexpr(256)  # looks at a flag for each at the host's word


@triton.jit
def begin_call(calls):
    """One program, the first launch of every call: count it."""
    tl.store(calls, tl.load(calls) + 1)


@triton.jit
def half_at(calls, half_bytes):
    """Where the half of this call begins."""
    return (tl.load(calls) & 1) * half_bytes


@triton.jit(do_not_specialize=["rank", "kind"])
def post_flags(peers, mask, calls, rank, half_bytes, kind, HAS_REMOTE: tl.constexpr):
    """Program (peer): publish what earlier launches wrote there, with the call's number and kind."""
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
    """Program (peer): write a text of TEXT_BYTES, a power of two, in place of contents, then the flag."""
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


@triton.jit(do_not_specialize=["rank", "kind", "max_polls"])
def wait_flags(
    peers, mask, arrived, trouble, waits, calls, stop, rank, half_bytes, kind, max_polls,
    IS_LAST: tl.constexpr, IS_MASKING: tl.constexpr, ANY_CALL: tl.constexpr, HAS_CLOCK: tl.constexpr,
):  # fmt: skip
    """Program (source): wait for its flag, looking at most `max_polls` times more than once; note what came.

    `arrived`: int32 [R], LATE, CAME, REFUSED or OTHER_CALL (with ANY_CALL, for a rank that refuses, all that came is
    CAME). `trouble`: int64 [R], which keeps number * 8 + REFUSED, OTHER_CALL or, if IS_LAST, WAS_LATE until the host has
    looked; a source that is late then is masked where IS_MASKING, and else looked at only once until then, so that the
    calls of a step do not each wait for a rank that is gone. `waits`: int64 [R], to which nanoseconds are added if
    HAS_CLOCK. `stop`: address of an int64 in the host's memory; waiting ends when the host has set it.
    """
    source = tl.program_id(0)
    flag = (tl.load(peers + rank) + half_at(calls, half_bytes)).to(tl.pointer_type(tl.int64)) + source
    number, stop = tl.load(calls), stop.to(tl.pointer_type(tl.int64))
    word = (number << 32) | kind
    status, looks = 0, tl.full([], 0, tl.int32)
    if tl.load(mask + source) == 0:
        if HAS_CLOCK:
            begin = globaltimer()
        polls = tl.where((tl.load(trouble + source) & 7) == WAS_LATE, 0, max_polls)
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while ((seen >> 32) < number) & (looks < polls):
            if looks % POLLS_PER_STOP == 0:  # it lies behind a bus: a look takes longer than one at the flag
                polls = tl.where(tl.load(stop, volatile=True) != 0, 0, polls)
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            looks += 1
        if (seen >> 32) >= number:
            status = tl.where(seen == word, CAME, tl.where(seen == (number << 32), REFUSED, OTHER_CALL))
            status = CAME if ANY_CALL else status
            if status != CAME:
                tl.store(trouble + source, number * 8 + status)
        elif IS_LAST:
            tl.store(trouble + source, number * 8 + WAS_LATE)
            if IS_MASKING:
                tl.store(mask + source, 1)
        if HAS_CLOCK:
            if source != rank:
                tl.store(waits + source, tl.load(waits + source) + (globaltimer() - begin))
    tl.store(arrived + source, status)


@triton.jit
def is_sound(arrived, R: tl.constexpr):
    """Whether no source refused the call or made another: then it delivers nothing at all."""
    worst = 0
    for source in range(R):
        worst = tl.maximum(worst, tl.load(arrived + source))
    return worst <= CAME
