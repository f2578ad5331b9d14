"""Low-latency dispatch and combine of a whole group in one process, in plain torch: the reference of every exchange.

Rows of an expert are ordered by source rank, then source token. (DeepEP orders ranks by arrival and tokens by send; the
contents are the same, but its order changes from run to run.) A token that names an expert twice is delivered once,
and its answer counts twice. Data that a rank does not receive is masked: a masked rank brings no rows and no answers.

Legend: R ranks, L experts per rank, M maximum tokens of a rank, T tokens, K choices, H hidden, B blocks of scales.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.low_latency.calls import LowLatencyShape

COUNT_BITS = 32  # layout_range holds (begin << 32) | count


class Delivered(NamedTuple):
    """Rows received by one rank's experts. Rows from an expert's count on are undefined; here they are zero."""

    x_LNH: Tensor  # [L, R*M, H], the dtype of the tokens or float8_e4m3fn
    scales: Tensor | None  # FP8 only: float32 [L, R*M, B], or ue8m0 int32 [L, R*M, ceil(B / 4)]
    count_L: Tensor  # int32
    source_token_LN: Tensor  # int32 [L, R*M], DeepEP's src_info
    layout_range_LR: Tensor  # int64


def dispatch(
    shape: LowLatencyShape,
    x_TH_of: Sequence[Tensor],
    topk_TK_of: Sequence[Tensor],
    *,
    rank: int,
    round_scale: bool = False,
    masked: Sequence[int] = (),
) -> Delivered:
    """Return what `rank` receives if source s sends x_TH_of[s] with int64 choices topk_TK_of[s] (-1: no choice)."""
    L, N = shape.experts_per_rank, shape.rows_per_expert
    sources = [_travelling(x_TH, shape, round_scale) for x_TH in x_TH_of]
    values, scales = sources[0]
    x_LNH = torch.zeros(L, N, shape.hidden, dtype=values.dtype)
    scales_out = None if scales is None else torch.zeros(L, N, scales.shape[1], dtype=scales.dtype)
    source_token_LN = torch.zeros(L, N, dtype=torch.int32)
    layout_range_LR = torch.zeros(L, shape.world_size, dtype=torch.int64)
    count_L = torch.zeros(L, dtype=torch.int32)
    for expert in range(L):
        begin = 0
        for source, topk_TK in enumerate(topk_TK_of):
            chosen_T = (topk_TK == rank * L + expert).any(dim=1)
            if source in masked:
                chosen_T = torch.zeros_like(chosen_T)
            tokens = chosen_T.nonzero().squeeze(1)
            rows = slice(begin, begin + tokens.numel())
            _as_bytes(x_LNH[expert])[rows] = _as_bytes(sources[source][0])[tokens]
            if scales_out is not None:
                scales_out[expert, rows] = sources[source][1][tokens]  # type: ignore[index]
            source_token_LN[expert, rows] = tokens.int()
            layout_range_LR[expert, source] = begin << COUNT_BITS | tokens.numel()
            begin += tokens.numel()
        count_L[expert] = begin
    return Delivered(x_LNH, scales_out, count_L, source_token_LN, layout_range_LR)


def combine(
    shape: LowLatencyShape,
    y_LNH_of: Sequence[Tensor],
    delivered_of: Sequence[Delivered],
    topk_TK: Tensor,
    weights_TK: Tensor,
    *,
    rank: int,
    masked: Sequence[int] = (),
) -> Tensor:
    """Return the rank's [T, H] in the dtype of the answers: the sum over k of weight times answer, starting at +0. Products and
    sums are separate operations in float32 (float64 for float64), in the order of k, rounded once at the end.

    Args:
        y_LNH_of: Each rank's answers, in the layout of its x_LNH.
    """
    dtype = y_LNH_of[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out_TH = torch.zeros(topk_TK.shape[0], shape.hidden, dtype=wide)
    for token, experts in enumerate(topk_TK.tolist()):
        for k, expert in enumerate(experts):
            owner, local = divmod(expert, shape.experts_per_rank)
            if expert < 0 or owner in masked:
                continue
            row = _find_row(delivered_of[owner], local, rank, token)
            out_TH[token] += weights_TK[token, k].to(wide) * y_LNH_of[owner][local, row].to(wide)
    return out_TH.to(dtype)


def _travelling(x_TH: Tensor, shape: LowLatencyShape, round_scale: bool) -> tuple[Tensor, Tensor | None]:
    if not shape.is_fp8:
        return x_TH, None
    return fp8.quantise_fp8(x_TH, round_scale=round_scale, ue8m0=shape.is_ue8m0)


def _find_row(delivered: Delivered, local: int, source: int, token: int) -> int:
    begin, count = divmod(int(delivered.layout_range_LR[local, source]), 1 << COUNT_BITS)
    tokens = delivered.source_token_LN[local, begin : begin + count].tolist()
    return begin + tokens.index(token)


def _as_bytes(x: Tensor) -> Tensor:
    """View rows as bytes: float8 cannot be indexed everywhere."""
    return x.view(torch.uint8)
