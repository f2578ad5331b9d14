"""`layout` for the CPU, compiled: one pass each to plan, pack, unpack, pack answers and sum them.

Works on addresses, so that a call costs a microsecond and rows go straight into a wire's windows and out of
them. This rank's own rows never travel: they are read from where they are. Every argument is an int64.
Modules follow a token's way: `message` (what travels), `sending`, `receiving`, `answers`.
"""

from dispatch.cpu_kernels.answers import (
    check_answers,
    gather_answers,
    pack_answers,
    size_answers,
    sum_answers_bfloat16,
    sum_answers_float32,
)
from dispatch.cpu_kernels.receiving import order_pairs, read_headers, receive, unpack
from dispatch.cpu_kernels.sending import pack, plan

KERNELS = (
    plan, pack, receive, read_headers, order_pairs, unpack, size_answers, pack_answers, check_answers,
    sum_answers_float32, sum_answers_bfloat16, gather_answers,
)  # fmt: skip

__all__ = [
    "KERNELS",
    "check_answers",
    "gather_answers",
    "order_pairs",
    "pack",
    "pack_answers",
    "plan",
    "read_headers",
    "receive",
    "size_answers",
    "sum_answers_bfloat16",
    "sum_answers_float32",
    "unpack",
]
