"""DeepEP's communication handles: plain tuples of tensors that callers keep, index and give back.

A handle carries all that a cached dispatch or a combine needs, so that it outlives any number of other calls and may
be stored by an autograd function. The positions that callers read hold what DeepEP documents; those that only its
kernels read (its channels and queues, which we do not have) hold the nearest thing that is true here, as if there
were one channel, and in the internode handle the matrix of all ranks' counts and each row's source.

Intranode (6): rank_prefix_matrix int32 [R, R] (rows that rank j has received from ranks 0..i, at [i][j]),
channel_prefix_matrix [R, 1], recv_channel_prefix_matrix [R, 1], recv_src_idx int32 [rows of recv_x],
is_token_in_rank bool [T, R], send_head int32 [T, R].
Internode (10): is_token_in_rank, rdma_channel_prefix_matrix [nodes, 1], gbl_channel_prefix_matrix (the [R, R] matrix
above), recv_rdma_channel_prefix_matrix [nodes, 1], recv_rdma_rank_prefix_sum [nodes], recv_gbl_channel_prefix_matrix
[R, 1], recv_gbl_rank_prefix_sum int32 [R] (at -4: inclusive over source ranks), recv_src_meta uint8 [rows of recv_x, 8]
(source rank and token, int32 each; -1 for padding), send_rdma_head int32 [T, nodes], send_nvl_head [0, node size].
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dispatch.arguments import describe
from dispatch.rows import Received, Route

Handle = tuple[Tensor, ...]
INTRANODE, INTERNODE = 6, 10  # lengths


class Contents(NamedTuple):
    """What a handle says, however it is laid out."""

    route: Route
    num_rows: int  # of recv_x: those received, and padding where there was a worst number


def pack(received: Received, num_rows: int, *, rank: int, num_nodes: int, node_size: int) -> Handle:
    """Make the handle of a dispatch whose recv_x has `num_rows` rows."""
    route, counts_RR = received.route, received.route.counts_RR
    mask_TR = route.is_token_in_rank_TR
    matrix_RR = counts_RR.cumsum(0).int()
    sent_R1 = counts_RR[rank].int().unsqueeze(1)
    first_R1 = torch.zeros_like(sent_R1)
    token_N = received.source_token_N
    if num_nodes == 1:
        heads_TR = _positions(mask_TR)
        return (matrix_RR, sent_R1, first_R1, _pad_with(token_N, num_rows, -1), mask_TR, heads_TR)
    source_N = torch.arange(len(received.counts_R)).repeat_interleave(torch.tensor(received.counts_R)).int()
    meta_N2 = _pad_with(torch.stack([source_N, token_N.cpu()], dim=1), num_rows, -1)
    prefix_R = matrix_RR[:, rank].contiguous()
    mask_TM = to_nodes(mask_TR, node_size)
    ends = torch.arange(num_nodes).add(1).mul(node_size).clamp(max=prefix_R.numel()).sub(1)
    return (
        mask_TR, mask_TM.sum(0).int().unsqueeze(1), matrix_RR, torch.zeros(num_nodes, 1, dtype=torch.int32),
        prefix_R[ends], first_R1, prefix_R, meta_N2.contiguous().view(torch.uint8), _positions(mask_TM),
        torch.empty(0, node_size, dtype=torch.int32),
    )  # fmt: skip


def problems(handle: Any, *, rank: int, num_ranks: int, num_nodes: int) -> Iterator[str]:
    """Say what is wrong with a handle that a caller gave; only the first sentence counts."""
    length = INTRANODE if num_nodes == 1 else INTERNODE
    if not isinstance(handle, Sequence) or len(handle) != length:
        got = f"{type(handle).__name__} of {len(handle)}" if isinstance(handle, Sequence) else repr(handle)
        yield f"handle is {got}; it must be the tuple of {length} that dispatch returned"
    matrix, rows, mask = _read(handle)
    if (
        not isinstance(matrix, Tensor)
        or matrix.dtype != torch.int32
        or matrix.shape != (num_ranks, num_ranks)
    ):
        yield f"handle's prefix matrix is {_name(matrix)}; it must be int32 {[num_ranks, num_ranks]}"
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape[1:] != (num_ranks,):
        yield f"handle's is_token_in_rank is {_name(mask)}; it must be bool [tokens, {num_ranks}]"
    wanted = (torch.int32, 1) if len(handle) == INTRANODE else (torch.uint8, 2)
    if not isinstance(rows, Tensor) or (rows.dtype, rows.dim()) != wanted:
        yield f"handle's source rows are {_name(rows)}; they must be {wanted[0]} of {wanted[1]} dimensions"
    counts_RR = _counts(matrix)
    sources = rows if len(handle) == INTRANODE else rows.view(torch.int32)[:, 0]
    num_received, num_sources = int(counts_RR[:, rank].sum()), int((sources >= 0).sum())
    if num_received != num_sources or counts_RR[rank].tolist() != mask.sum(0).tolist():
        yield "handle's prefix matrix does not fit its other tensors; it was written to, or is another rank's"


def unpack(handle: Handle) -> Contents:
    """Read a handle that has no problem."""
    matrix, rows, mask = _read(handle)
    return Contents(Route(mask, _counts(matrix)), rows.shape[0])


def num_tokens(handle: Handle) -> int:
    """Tokens of the dispatch that a handle without problems came from."""
    return int(_read(handle)[2].shape[0])


def num_rows(handle: Handle) -> int:
    """Rows of recv_x of that dispatch, padding included."""
    return int(_read(handle)[1].shape[0])


def to_nodes(mask_TR: Tensor, node_size: int) -> Tensor:
    """Return bool [T, nodes]: whether a token goes to any rank of the node; the last node may be smaller."""
    return torch.stack([part.any(dim=1) for part in torch.split(mask_TR, node_size, dim=1)], dim=1)


def _read(handle: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Find the prefix matrix, the tensor with a row per row of recv_x, and the mask."""
    if len(handle) == INTRANODE:
        return handle[0], handle[3], handle[4]
    return handle[2], handle[7], handle[0]


def _counts(matrix_RR: Tensor) -> Tensor:
    wide = matrix_RR.cpu().long()
    return torch.diff(wide, dim=0, prepend=torch.zeros_like(wide[:1])).contiguous()


def _positions(mask_TR: Tensor) -> Tensor:
    """Return int32: the how-manieth row to the rank (or node) a token is, -1 where it does not go."""
    return torch.where(mask_TR, mask_TR.int().cumsum(0).int() - 1, -1).int()


def _pad_with(rows: Tensor, num_rows: int, value: int) -> Tensor:
    short = rows.new_full((num_rows - rows.shape[0], *rows.shape[1:]), value)
    return torch.cat([rows, short])


def _name(value: Any) -> str:
    return describe(value) if isinstance(value, Tensor) else repr(value)
