"""`layout` for the CPU, compiled: one pass each to plan, pack, unpack, pack answers and sum them.

Works on addresses, so that a call costs a microsecond and rows are copied directly to and from a wire's windows.
This rank's own rows do not travel: they are read in place. Every argument is an int64.
Modules in the order of a token's path: `sending`, `receiving`, `answers`. `fp8` casts rows; `message` defines the format.
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
