# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Log-probabilities of rows of logits on a GPU: a few numbers per row go to the host, the logits do not.

The device finds what `scheduler.sampling.sampler` needs (a row's top, the sum of its exponentials, a token's logit and rank, the
likeliest tokens), the host puts it together with the CPU's arithmetic. A row is one program's, so its numbers do not
depend on the rows beside it; sums are of float64.
The likeliest are found by whole numbers that order as (logit, lower id first) does and are all different, so that
`torch.topk` has no ties to break.

Legend: K rows of logits, L rows that are asked about, V vocabulary, N tokens told of beside a row's own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from scheduler.policy.request import Logprobs
from scheduler.sampling.gpu.sending import send
from scheduler.sampling.sampler import told

BLOCK = 4096
KEYED_ROWS = 32  # at a time; their keys and what they are made of take some 28 bytes x vocabulary per row
_TOP, _SUM, _MINE, _RANK, _OTHERS = range(5)  # columns of a row's answer; ids and logits of others follow
_LOWER = 0xFFFFFFFF


class Asked(NamedTuple):
    """What is asked about one row."""

    place: int  # of the logits
    token: int  # which of the tokens is the row's own
    num_top: int  # likeliest tokens to tell of beside it
    ids: Sequence[int] = ()  # instead of the likeliest


@triton.jit
def measure_rows(logits, places, tokens, found, V, BLOCK: tl.constexpr):
    """Program (asked row): its top, the sum of exponentials under it, the token's logit and rank."""
    asked = tl.program_id(0)
    own = logits + tl.load(places + asked) * V
    mine = tl.load(own + tl.load(tokens + asked))
    top_B, above_B = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    begin = V * 0
    while begin < V:
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(own + at, mask=at < V, other=float("-inf"))
        top_B = tl.maximum(top_B, x)
        above_B += (x > mine).to(tl.int32)
        begin += BLOCK
    top, sum_B = tl.max(top_B, axis=0), tl.zeros([BLOCK], tl.float64)
    begin = V * 0
    while begin < V:
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(own + at, mask=at < V, other=float("-inf"))
        sum_B += tl.where(at < V, tl.exp(x - top), 0.0).to(tl.float64)
        begin += BLOCK
    tl.store(found + asked * 4, top.to(tl.float64))
    tl.store(found + asked * 4 + 1, tl.sum(sum_B, axis=0))
    tl.store(found + asked * 4 + 2, mine.to(tl.float64))
    tl.store(found + asked * 4 + 3, 1.0 + tl.sum(above_B, axis=0).to(tl.float64))


def measure(logits_KV: Tensor, asked: Sequence[Asked], token_T: Tensor) -> Tensor:
    """Find out what is asked; nothing waits.

    Args:
        logits_KV: float32 contiguous.
        asked: L, at least one.
        token_T: int64 tokens, of which each asked row has one.

    Returns:
        int64 [L, 4 + 2 N], for `answers` once it is on the host.
    """
    V, L, N = logits_KV.shape[1], len(asked), _width(asked, logits_KV.shape[1])
    arrays = {
        "place": np.array([each.place for each in asked]),
        "token": np.array([each.token for each in asked]),
    }
    arrays["given"] = np.zeros((L, N), np.int64)
    arrays["is_given"] = np.array([[bool(each.ids)] for each in asked], np.int8)
    for row, each in zip(arrays["given"], asked, strict=True):
        row[: len(each.ids)] = each.ids
    sent = send(arrays, logits_KV.device)
    place_L = sent["place"]
    found_L4 = torch.empty(L, _OTHERS, dtype=torch.float64, device=logits_KV.device)
    measure_rows[(L,)](
        logits_KV, place_L, token_T.index_select(0, sent["token"]), found_L4, V, BLOCK=BLOCK, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
    id_LN, num_top = sent["given"], _num_top(asked, V)
    if num_top:
        likeliest = [_likeliest(logits_KV[part_L], num_top) for part_L in place_L.split(KEYED_ROWS)]
        id_LN[:, :num_top] = torch.where(sent["is_given"] > 0, id_LN[:, :num_top], torch.cat(likeliest))
    other_LN = logits_KV[place_L[:, None], id_LN].double()
    return torch.cat((found_L4.view(torch.int64), id_LN, other_LN.view(torch.int64)), dim=1)


def answers(
    found: np.ndarray,
    asked: Sequence[Asked],
    token_ids: Sequence[int],
    vocabulary: int,
    *,
    with_rank: bool = False,
) -> list[Logprobs]:
    """Put together what `measure` found.

    Args:
        found: what it returned, as a flat array; consumed.
        token_ids: what `token_T` was.
    """
    found_LC = found.reshape(len(asked), -1)
    width = (found_LC.shape[1] - _OTHERS) // 2
    numbers_LC = found_LC.view(np.float64)
    made = []
    for each, own, numbers in zip(asked, found_LC, numbers_LC, strict=True):
        count = len(each.ids) or min(each.num_top, vocabulary)
        base = float(numbers[_TOP]) + float(np.log(numbers[_SUM]))
        logits = numbers[_OTHERS + width :][:count].astype(np.float32)
        rank = int(numbers[_RANK]) if with_rank else 0
        token = token_ids[each.token]
        made.append(told(token, float(numbers[_MINE]), base, own[_OTHERS:][:count], logits, rank))
    return made


def size_of(asked: Sequence[Asked], vocabulary: int) -> int:
    """How many numbers `measure` returns."""
    return len(asked) * (_OTHERS + 2 * _width(asked, vocabulary))


def _num_top(asked: Sequence[Asked], vocabulary: int) -> int:
    return min(max((each.num_top for each in asked if not each.ids), default=0), vocabulary)


def _width(asked: Sequence[Asked], vocabulary: int) -> int:
    return max(_num_top(asked, vocabulary), *(len(each.ids) for each in asked), 0)


def _likeliest(logits_LV: Tensor, count: int) -> Tensor:
    """Ids by falling logit; of equal ones the lower first. int64 [L, count]."""
    V = logits_LV.shape[1]
    bits = (logits_LV + 0.0).view(torch.int32)  # the sum makes 0 of -0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    key_LV = (order << 32) + torch.arange(V - 1, -1, -1, device=logits_LV.device)
    return V - 1 - (key_LV.topk(count, dim=1).values & _LOWER)
