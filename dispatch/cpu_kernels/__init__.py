"""`layout` for the CPU, compiled: one pass each to plan, pack, unpack, pack answers and sum them.

Works on addresses, so that a call costs a microsecond and rows go straight into a wire's windows and out of
them. This rank's own rows never travel: they are read from where they are. Every argument is an int64.
Modules follow a token's way: `sending`, `receiving`, `answers`; `fp8` casts rows. `dispatch.cpu_kernels.message` says what travels.
"""

from dispatch.cpu_kernels.answers import (
    check_answers,
    choose_again,
    gather_answers,
    keep_own_answers,
    pack_answers,
    size_answers,
    sum_answers_bfloat16,
    sum_answers_float32,
)
from dispatch.cpu_kernels.receiving import (
    deliver,
    forward,
    order_pairs,
    read_headers,
    read_origins,
    receive,
    unpack,
)
from dispatch.cpu_kernels.sending import find_bad_slot, pack, plan

KERNELS = (
    find_bad_slot, plan, pack, receive, read_headers, read_origins, order_pairs, unpack, forward, deliver, size_answers, pack_answers,
    keep_own_answers, choose_again, check_answers, sum_answers_float32, sum_answers_bfloat16, gather_answers,
)  # fmt: skip

__all__ = [
    "KERNELS",
    "check_answers",
    "choose_again",
    "deliver",
    "find_bad_slot",
    "forward",
    "gather_answers",
    "keep_own_answers",
    "order_pairs",
    "pack",
    "pack_answers",
    "plan",
    "read_headers",
    "read_origins",
    "receive",
    "size_answers",
    "sum_answers_bfloat16",
    "sum_answers_float32",
    "unpack",
]
