# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Checksum of a record on a GPU (`kvcache.unit`): one launch, in which each program sums some of the words.

torch's operations take six launches per part of a record, and eight bytes of memory for each byte of it. Sums modulo 2^64 do
not depend on their order, so both have the same bits.

Legend: W words of a record, P programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcache.unit import FIRST, MASK, STEP

BLOCK = 2048  # words of a program
_WARPS = 4
_STEP, _FIRST = tl.constexpr(STEP), tl.constexpr(FIRST)


@triton.jit
def sum_words(words, sums, num_words, BLOCK: tl.constexpr):
    """Program p sums its words, each times the weight of its place."""
    program = tl.program_id(0)
    place = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + place, mask=place < num_words, other=0).to(tl.int64) & 0xFFFFFFFF
    tl.store(sums + program, tl.sum(word * (place * _STEP + _FIRST), axis=0))


def sum_record(record: Tensor) -> int:
    """Return the checksum of a record in one piece. Waits for the device.

    Args:
        record: uint8 [4 * W], contiguous.
    """
    words_W = record.view(torch.int32)
    num_programs = triton.cdiv(len(words_W), BLOCK)
    sums_P = torch.empty(num_programs, dtype=torch.int64, device=record.device)
    sum_words[(num_programs,)](words_W, sums_P, len(words_W), BLOCK=BLOCK, num_warps=_WARPS)
    return int(sums_P.sum()) & MASK
