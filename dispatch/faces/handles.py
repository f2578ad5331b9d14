"""DeepEP's communication handles: plain tuples of tensors that callers store, index and pass back.

A handle carries all data for a cached dispatch or a combine. So it remains valid after any number of other calls, and
an autograd function may store it. The positions that callers read hold what DeepEP documents. Other positions are for
DeepEP's kernels (channels and queues, which do not exist here). They hold the closest values, as if there were one
channel; in the internode handle also the matrix of all ranks' counts and each row's source.

Intranode (6): rank_prefix_matrix int32 [R, R] (rows that rank j has received from ranks 0..i, at [i][j]),
channel_prefix_matrix [R, 1], recv_channel_prefix_matrix [R, 1], recv_src_idx int32 [rows of recv_x],
is_token_in_rank bool [T, R], send_head int32 [T, R].
Internode (10): is_token_in_rank, rdma_channel_prefix_matrix [nodes, 1], gbl_channel_prefix_matrix (the [R, R] matrix
above), recv_rdma_channel_prefix_matrix [nodes, 1], recv_rdma_rank_prefix_sum [nodes], recv_gbl_channel_prefix_matrix
[R, 1], recv_gbl_rank_prefix_sum int32 [R] (at -4: inclusive over source ranks), recv_src_meta uint8 [rows of recv_x, 8]
(source rank and token, int32 each; -1 for padding), send_rdma_head int32 [T, nodes], send_nvl_head [0, node size].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dispatch.rows import Received, Route

Handle = tuple[Tensor, ...]
INTRANODE, INTERNODE = 6, 10  # lengths


class Contents(NamedTuple):
    """Contents of a handle of either form."""

    route: Route
    num_rows: int  # of recv_x: received rows, and padding up to num_worst_tokens


def pack(received: Received, num_rows: int, *, rank: int, num_nodes: int, node_size: int) -> Handle:
    """Make the handle of a dispatch. recv_x has `num_rows` rows."""
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


def unpack(handle: Handle) -> Contents:
    """Read a handle that has been checked."""
    matrix, rows, mask = read(handle)
    return Contents(Route(mask, counts_of(matrix)), rows.shape[0])


def num_tokens(handle: Handle) -> int:
    """Return the number of tokens of the dispatch of a checked handle."""
    return int(read(handle)[2].shape[0])


def num_rows(handle: Handle) -> int:
    """Return the number of rows of recv_x of that dispatch, padding included."""
    return int(read(handle)[1].shape[0])


def to_nodes(mask_TR: Tensor, node_size: int) -> Tensor:
    """Return bool [T, nodes]: whether a token goes to any rank of the node; the last node may be smaller."""
    return torch.stack([part.any(dim=1) for part in torch.split(mask_TR, node_size, dim=1)], dim=1)


def read(handle: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return the prefix matrix, the tensor with a row per row of recv_x, and the mask."""
    if len(handle) == INTRANODE:
        return handle[0], handle[3], handle[4]
    return handle[2], handle[7], handle[0]


def counts_of(matrix_RR: Tensor) -> Tensor:
    """Return int64 [R, R] on the CPU: the rows that rank i sent to rank j."""
    wide = matrix_RR.cpu().long()
    return torch.diff(wide, dim=0, prepend=torch.zeros_like(wide[:1])).contiguous()


def _positions(mask_TR: Tensor) -> Tensor:
    """Return int32: the number of earlier tokens that go to the same rank (or node), -1 if the token does not."""
    return torch.where(mask_TR, mask_TR.int().cumsum(0).int() - 1, -1).int()


def _pad_with(rows: Tensor, num_rows: int, value: int) -> Tensor:
    short = rows.new_full((num_rows - rows.shape[0], *rows.shape[1:]), value)
    return torch.cat([rows, short])


Rows = Tensor | tuple[Tensor, Tensor]


def split_rows(x: Rows) -> tuple[Tensor, Tensor | None]:
    """Return values and scales. Other arguments than a tuple of two are returned as values, for the checks."""
    return x if isinstance(x, tuple) and len(x) == 2 else (x, None)


def join_rows(x: Tensor, scales: Tensor | None) -> Rows:
    """Return rows in the caller's form: a tensor, or a tuple with scales."""
    return x if scales is None else (x, scales)


def as_biases(bias: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """Return the biases as a tuple, empty if there are none."""
    return () if bias is None else bias if isinstance(bias, tuple) else (bias,)


def pad_rows(rows: Tensor, num_rows: int, fill: int = 0) -> Tensor:
    """Return [num_rows, ...] with `fill` below `rows`. Returns `rows` itself if it has this size."""
    if rows.shape[0] == num_rows:
        return rows
    padded = torch.empty(num_rows, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    padded[: rows.shape[0]].copy_(rows)
    plain(padded)[rows.shape[0] :] = fill
    return padded


def plain(tensor: Tensor) -> Tensor:
    """View types of one byte, which torch cannot index, as uint8."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


class Routes(NamedTuple):
    """WideEP's part of a handle: the rows' route, and results that a cached dispatch returns again."""

    route: Route
    local_idx_NK: Tensor  # received choices as local experts, -1 elsewhere; received rows only
    num_rows: int  # received rows; tensors may have more


@dataclass(eq=False)
class EPHandle:
    """A dispatch's handle. Fields and their order are DeepEP's; all tensors are int32 unless stated otherwise.

    Attributes:
        do_expand: Whether there is one received row per local choice, grouped by expert.
        num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: Arguments of the dispatch.
        topk_idx: This rank's choices [T, K] in their dtype; a copy, unless the dispatch got do_handle_copy=False.
        num_recv_tokens: Rows of unexpanded results: the received rows, or without CPU sync the possible maximum.
        num_expanded_tokens: Rows of expanded results in the same way, padding included.
        num_recv_tokens_per_expert_list: Choices per local expert, each rounded up to the alignment. Empty without CPU
            sync.
        psum_num_recv_tokens_per_scaleup_rank: [ranks of the scale-up domain], rows received from ranks of each local
            index and of all smaller ones.
        psum_num_recv_tokens_per_expert: [L], the end of each expert's rows: with its padding if not expanded, without
            it if expanded (then entry i, rounded up, is the start of expert i + 1).
        num_unaligned_recv_tokens_per_expert: [L], choices per local expert.
        recv_src_metadata: [num_recv_tokens, 2 + K]: source rank * num_max_tokens_per_rank + source token; local index
            of the source times K plus the first choice of this rank; and if expanded each choice's row (-1: none).
            Rows after the received ones are -1.
        dst_buffer_slot_idx: [T, K], the index of each choice's token in its destination's received rows; -1
            for no choice. (DeepEP: a place in its communication buffer.)
        token_metadata_at_forward, channel_linked_list: None; DeepEP's bookkeeping of forwarding ranks.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    dst_buffer_slot_idx: Tensor
    token_metadata_at_forward: Tensor | None = None
    channel_linked_list: Tensor | None = None
    routes: Routes | None = field(default=None, repr=False)

    @property
    def slot_NK(self) -> Tensor:
        """int64: positions of each received row's choices in expanded results; -1 for choices of other ranks."""
        assert self.routes is not None, "a dispatch made this handle"
        return self.recv_src_metadata[: self.routes.num_rows, 2:].long()
