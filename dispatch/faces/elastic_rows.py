"""Dispatch and combine of `ElasticBuffer` over `RowExchange`. Arguments are not checked here.

A token travels once to every rank that holds one of its experts, with its choices, scales and weights. The receiver
computes each row's place in a result. Answers come back as one row per token and rank, and all groups are summed at the
source. (If expanded rows must not be summed before they travel, K rows come back and most of the data is zero.) In
DeepEP's hybrid mode a node's sums are made inside the node; the bits are the same.

Legend: T tokens of this rank, K choices, H hidden, L experts of a rank, N rows received, R ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dispatch.faces.checks import CombineCall, DispatchCall
from dispatch.faces.handles import EPHandle, Routes, Rows, join_rows, pad_rows, plain
from dispatch.rows import NOT_HERE, GivenBack, RowExchange, localise, ranks_of, sum_dtype, token_mask

# Each column of 4-byte scales starts at a multiple of 16 bytes, for DeepGEMM's loads (DeepEP, compiled.cuh).
SCALE_ALIGNMENT = 4


class Experts(NamedTuple):
    """Number of choices of each local expert, and their positions in expanded results."""

    counts_L: Tensor  # int64
    starts_L: Tensor  # int64: multiples of the alignment
    num_expanded: int  # all experts, padding included
    slot_NK: Tensor  # int64: -1 for choices of other ranks


def padded(counts_L: Tensor, alignment: int) -> Tensor:
    """Round up to multiples of the alignment."""
    return (counts_L + alignment - 1) // alignment * alignment


def most_expanded(num_rows: int, num_choices: int, num_local_experts: int, alignment: int) -> int:
    """Return the largest number of expanded rows that `num_rows` can become, padding included."""
    most = num_rows * min(num_choices, num_local_experts) + (alignment - 1) * num_local_experts
    return -(-most // alignment) * alignment


def take(values: Tensor, slot_NK: Tensor) -> Tensor:
    """Return [N, K, ...]: the value at each choice's slot, zero for no choice."""
    is_here = slot_NK != NOT_HERE
    taken = torch.zeros(*slot_NK.shape, *values.shape[1:], dtype=values.dtype, device=values.device)
    taken[is_here] = values[slot_NK[is_here]]
    return taken


def place_experts(local_NK: Tensor, num_local_experts: int, alignment: int) -> Experts:
    """Count the choices of each local expert and assign their slots, by expert, then row, then choice."""
    is_here = local_NK != NOT_HERE
    expert_P = local_NK[is_here].long()
    counts_L = torch.bincount(expert_P, minlength=num_local_experts)
    padded_L = padded(counts_L, alignment)
    starts_L = padded_L.cumsum(0) - padded_L
    order_P = torch.argsort(expert_P, stable=True)
    first_L = counts_L.cumsum(0) - counts_L
    slot_P = torch.empty_like(expert_P)
    sorted_P = expert_P[order_P]
    slot_P[order_P] = (
        torch.arange(expert_P.numel(), device=expert_P.device) - first_L[sorted_P] + starts_L[sorted_P]
    )
    slot_NK = torch.full(local_NK.shape, NOT_HERE, dtype=torch.int64, device=local_NK.device)
    slot_NK[is_here] = slot_P
    return Experts(counts_L, starts_L, int(padded_L.sum()), slot_NK)


def expert_ends(experts: Experts, alignment: int, do_expand: bool) -> Tensor:
    """Return int32 [L]: the end of each expert's rows, without padding if expanded, otherwise with it."""
    counts_L = experts.counts_L
    padded_L = padded(counts_L, alignment)
    return (experts.starts_L + (counts_L if do_expand else padded_L)).int()


def source_metadata(
    source_N: Tensor,
    token_N: Tensor,
    experts: Experts,
    *,
    max_tokens: int,
    scaleup_ranks: int,
    do_expand: bool,
) -> Tensor:
    """Return int32 [N, 2 + K], see `EPHandle.recv_src_metadata`. `source_N`: the source rank of each row."""
    N, K = experts.slot_NK.shape
    metadata = torch.full((N, 2 + K), NOT_HERE, dtype=torch.int32, device=token_N.device)
    first_N = (experts.slot_NK != NOT_HERE).int().argmax(1) if K else torch.zeros_like(token_N)
    metadata[:, 0] = (source_N * max_tokens + token_N).int()
    metadata[:, 1] = (source_N % scaleup_ranks * K + first_N).int()
    if do_expand:
        metadata[:, 2:] = experts.slot_NK.int()
    return metadata


def destination_rows(mask_TR: Tensor, counts_RR: Tensor, rank: int, rank_TK: Tensor) -> Tensor:
    """Return int32 [T, K], see `EPHandle.dst_buffer_slot_idx`. `counts_RR`: rows that rank i sent to rank j."""
    before_R = counts_RR[:rank].sum(0).to(mask_TR.device)
    row_TR = mask_TR.long().cumsum(0) - 1 + before_R
    row_TK = row_TR.gather(1, rank_TK.clamp(min=0))
    return torch.where(rank_TK == NOT_HERE, NOT_HERE, row_TK).int()


def expand_rows(rows: Tensor, slot_NK: Tensor, num_expanded: int) -> Tensor:
    """Return [num_expanded, ...]: each row at all of its slots, zero elsewhere."""
    expanded = torch.zeros(num_expanded, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    for slot_N in slot_NK.unbind(1):
        is_here = slot_N != NOT_HERE
        plain(expanded)[slot_N[is_here]] = plain(rows)[is_here]
    return expanded


def expand_weights(weights_NK: Tensor, slot_NK: Tensor, num_expanded: int) -> Tensor:
    """Return [num_expanded]: each choice's weight at its slot, zero elsewhere."""
    expanded = torch.zeros(num_expanded, dtype=weights_NK.dtype, device=weights_NK.device)
    is_here = slot_NK != NOT_HERE
    expanded[slot_NK[is_here]] = weights_NK[is_here]
    return expanded


def column_major(scales: Tensor) -> Tensor:
    """Return the same [N, B] with strides (1, N rounded up to SCALE_ALIGNMENT)."""
    N, B = scales.shape
    column = (N + SCALE_ALIGNMENT - 1) // SCALE_ALIGNMENT * SCALE_ALIGNMENT
    strided = torch.empty_strided((N, B), (1, column), dtype=scales.dtype, device=scales.device)
    return strided.copy_(scales)


class Terms(NamedTuple):
    """Terms of sums: row `at_TK[t, k]` of `values_QH` belongs to choice k of token t."""

    values_QH: Tensor
    at_TK: Tensor  # int64, -1 for no term


def last_of_group(group_TK: Tensor) -> Tensor:
    """Return int64 [T, K]: for each choice, the token's last choice in the same group."""
    K = group_TK.shape[1]
    is_same_TKK = group_TK.unsqueeze(2) == group_TK.unsqueeze(1)
    places = torch.arange(K, device=group_TK.device)
    return torch.where(is_same_TKK, places, NOT_HERE).amax(2)


def sum_groups(terms: Terms, group_TK: Tensor) -> Terms:
    """Sum each token's terms of a group. The sum takes the place of the group's last choice.

    `group_TK`: int64, -1 for no choice; a group without terms sums to zero. New rows are numbered by
    token, then choice.
    """
    values, at_TK = terms
    last_TK = last_of_group(group_TK)
    places = torch.arange(at_TK.shape[1], device=at_TK.device)
    stands_TK = (last_TK == places) & (group_TK != NOT_HERE)
    number_TK = torch.where(stands_TK, (stands_TK.flatten().cumsum(0) - 1).view(at_TK.shape), NOT_HERE)
    row_TK = number_TK.gather(1, last_TK.clamp(min=0))
    sums = torch.zeros(int(stands_TK.sum()), *values.shape[1:], dtype=sum_dtype(values), device=values.device)
    for at_T, row_T in zip(at_TK.unbind(1), row_TK.unbind(1), strict=True):
        is_term = at_T != NOT_HERE
        sums[row_T[is_term]] += values[at_T[is_term]]  # a token has one row per choice: indices are unique
    return Terms(sums.to(values.dtype), number_TK)


def sum_choices(terms: Terms, biases: Sequence[Tensor]) -> Tensor:
    """Return [T, H]: the sum of the biases, then of the terms in the order of the choices."""
    values, at_TK = terms
    total = torch.zeros(at_TK.shape[0], *values.shape[1:], dtype=sum_dtype(values), device=values.device)
    for bias in biases:
        total += bias
    for at_T in at_TK.unbind(1):
        is_term = at_T != NOT_HERE
        total[is_term] += values[at_T[is_term]]
    return total.to(values.dtype)


def answers_at(back: GivenBack, rank_TK: Tensor, num_ranks: int) -> Tensor:
    """Return int64 [T, K]: the received row that comes from each choice's rank, -1 for no choice."""
    row_TR = torch.full((rank_TK.shape[0], num_ranks), NOT_HERE, dtype=torch.int64, device=rank_TK.device)
    row_TR[back.token_Q, back.rank_Q] = torch.arange(back.token_Q.numel(), device=rank_TK.device)
    return torch.where(rank_TK == NOT_HERE, NOT_HERE, row_TR.gather(1, rank_TK.clamp(min=0)))


def terms_by_rank(rows_QH: Tensor, answer_TK: Tensor, rank_TK: Tensor) -> Terms:
    """Return one row per token and rank, as the term of the rank's last choice."""
    places = torch.arange(rank_TK.shape[1], device=rank_TK.device)
    return Terms(rows_QH, torch.where(last_of_group(rank_TK) == places, answer_TK, NOT_HERE))


def terms_by_choice(rows_QKH: Tensor, answer_TK: Tensor) -> Terms:
    """Return one row per choice: row k of a rank's K rows is the term of choice k."""
    K = answer_TK.shape[1]
    at_TK = answer_TK * K + torch.arange(K, device=answer_TK.device)
    return Terms(rows_QKH.flatten(0, 1), torch.where(answer_TK == NOT_HERE, NOT_HERE, at_TK))


def pick_weights(weights_QK: Tensor, answer_TK: Tensor) -> Tensor:
    """Return [T, K]: each choice's weight from the rank that has it, zero for no choice."""
    K = answer_TK.shape[1]
    at_TK = (answer_TK * K + torch.arange(K, device=answer_TK.device)).clamp(min=0)
    # The extra zero keeps indices valid if nothing was received.
    flat = torch.cat([weights_QK.flatten(), weights_QK.new_zeros(1)])
    return torch.where(answer_TK == NOT_HERE, 0.0, flat[at_TK.clamp(max=flat.numel() - 1)])


class ElasticMode:
    """One rank's end. Calls are collective, in the same order on all ranks.

    Args:
        exchange: Rows over the buffer's wire.
        scaleup_ranks: Ranks per logical domain.
        allow_multiple_reduction: Sum by rank, and by domain if there are several, before the final sum.
    """

    def __init__(self, exchange: RowExchange, *, scaleup_ranks: int, allow_multiple_reduction: bool) -> None:
        self.exchange = exchange
        self.rank, self.num_ranks = exchange.rank, exchange.world_size
        self._scaleup_ranks = scaleup_ranks
        self._reduces_early = allow_multiple_reduction
        self._reduces_domains = allow_multiple_reduction and scaleup_ranks < self.num_ranks

    def dispatch(self, call: DispatchCall) -> tuple[EPHandle, Rows, Tensor | None]:
        """Send rows by their choices. Return the handle, rows (and scales), and weights. Raises as `RowExchange.send`."""
        L = _experts_per_rank(call.num_experts, self.num_ranks)
        rank_TK = ranks_of(call.topk_idx, L)
        mask_TR = token_mask(rank_TK, self.num_ranks)
        name = f"elastic dispatch of up to {call.max_tokens} tokens over {call.num_experts} experts"
        received = self.exchange.send([call.topk_idx, *_planes(call)], mask_TR, call=name)
        local_NK = localise(received.planes[0], self.rank, L)
        experts = place_experts(local_NK, L, call.alignment)
        source_N = torch.arange(self.num_ranks).repeat_interleave(torch.tensor(received.counts_R))
        metadata = source_metadata(
            source_N.to(local_NK.device),
            received.source_token_N,
            experts,
            max_tokens=call.max_tokens,
            scaleup_ranks=self._scaleup_ranks,
            do_expand=call.do_expand,
        )
        if call.stats is not None:
            call.stats.add_(experts.counts_L.to(call.stats.dtype))
        slot_TK = destination_rows(mask_TR, received.route.counts_RR, self.rank, rank_TK)
        routes = Routes(received.route, local_NK, local_NK.shape[0])
        handle = self._describe(call, experts, metadata, slot_TK, routes)
        return handle, *_arrange(received.planes[1:], call, handle)

    def dispatch_cached(self, call: DispatchCall, handle: EPHandle) -> tuple[Rows, Tensor | None]:
        """Send by the choices of an earlier dispatch. Return rows (and scales), and weights. Raises as `resend`."""
        route = _routes(handle).route
        planes = self.exchange.resend(_planes(call), route, call="elastic cached dispatch")
        return _arrange(planes, call, handle)

    def combine(self, call: CombineCall, handle: EPHandle) -> tuple[Tensor, Tensor | None]:
        """Bring rows back. Return their sums, and the weights. Raises as `RowExchange.give_back`."""
        planes = self._outgoing(call, handle)
        back = self.exchange.give_back(planes, _routes(handle).route, call="elastic combine")
        rank_TK = ranks_of(handle.topk_idx, _experts_per_rank(handle.num_experts, self.num_ranks))
        answer_TK = answers_at(back, rank_TK, self.num_ranks)
        combined = sum_choices(self._terms(back.planes[0], answer_TK, rank_TK), call.biases)
        return combined, None if call.topk_weights is None else pick_weights(back.planes[1], answer_TK)

    def _describe(
        self, call: DispatchCall, experts: Experts, metadata: Tensor, slot_TK: Tensor, routes: Routes
    ) -> EPHandle:
        alignment, counts_L = call.alignment, experts.counts_L
        num_rows, num_expanded = metadata.shape[0], experts.num_expanded
        if not call.do_cpu_sync:
            num_rows = call.max_tokens * self.num_ranks
            num_expanded = most_expanded(num_rows, call.topk_idx.shape[1], counts_L.numel(), alignment)
        counts_R = routes.route.counts_RR[:, self.rank].tolist()
        per_scaleup = [sum(counts_R[local :: self._scaleup_ranks]) for local in range(self._scaleup_ranks)]
        return EPHandle(
            do_expand=call.do_expand,
            num_experts=call.num_experts or 0,
            expert_alignment=alignment,
            num_max_tokens_per_rank=call.max_tokens,
            num_sms=call.num_sms,
            topk_idx=call.topk_idx.clone() if call.do_handle_copy else call.topk_idx,
            num_recv_tokens=num_rows,
            num_expanded_tokens=num_expanded,
            num_recv_tokens_per_expert_list=padded(counts_L, alignment).tolist() if call.do_cpu_sync else [],
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor(per_scaleup)
            .cumsum(0)
            .int()
            .to(metadata.device),
            psum_num_recv_tokens_per_expert=expert_ends(experts, alignment, call.do_expand),
            num_unaligned_recv_tokens_per_expert=counts_L.int(),
            recv_src_metadata=pad_rows(metadata, num_rows, NOT_HERE),
            dst_buffer_slot_idx=slot_TK,
            routes=routes,
        )

    def _outgoing(self, call: CombineCall, handle: EPHandle) -> list[Tensor]:
        """Return one row per received row, or K if rows must not be summed here, and the weights."""
        N, weights = _routes(handle).num_rows, call.topk_weights
        if not handle.do_expand:
            return [call.x[:N]] if weights is None else [call.x[:N], weights[:N]]
        slot_NK = handle.slot_NK
        if self._reduces_early:
            here_NK = torch.where(slot_NK == NOT_HERE, NOT_HERE, 0)
            rows = sum_groups(Terms(call.x, slot_NK), here_NK).values_QH
        else:
            rows = take(call.x, slot_NK)
        return [rows] if weights is None else [rows, take(weights, slot_NK)]

    def _terms(self, rows: Tensor, answer_TK: Tensor, rank_TK: Tensor) -> Terms:
        """Return the terms of the final sum: rows by choice, by rank, or summed by domain."""
        if rows.dim() == 3:
            return terms_by_choice(rows, answer_TK)
        terms = terms_by_rank(rows, answer_TK, rank_TK)
        if not self._reduces_domains:
            return terms
        return sum_groups(terms, torch.div(rank_TK, self._scaleup_ranks, rounding_mode="floor"))


def local_choices(handle: EPHandle) -> Tensor:
    """Return [num_recv_tokens, K] in new memory: received choices as local experts, -1 elsewhere."""
    local_NK = _routes(handle).local_idx_NK.clone()  # the handle's tensor must not change
    return pad_rows(local_NK, handle.num_recv_tokens, NOT_HERE)


def _routes(handle: EPHandle) -> Routes:
    assert handle.routes is not None, "checked before: a dispatch made this handle"
    return handle.routes


def _experts_per_rank(num_experts: int | None, num_ranks: int) -> int:
    assert num_experts, "checked before"
    return num_experts // num_ranks


def _planes(call: DispatchCall) -> list[Tensor]:
    """Return the tensors that travel with each token, apart from its choices."""
    return [plane for plane in (call.x, call.scales, call.topk_weights) if plane is not None]


def _arrange(planes: list[Tensor], call: DispatchCall, handle: EPHandle) -> tuple[Rows, Tensor | None]:
    """Arrange received rows, scales and weights in the form that the caller requested."""
    weights = planes[-1] if call.topk_weights is not None else None
    values = planes if weights is None else planes[:-1]
    if call.do_expand:
        slot_NK, num_rows = handle.slot_NK, handle.num_expanded_tokens
        rows = [expand_rows(plane, slot_NK, num_rows) for plane in values]
        weights = None if weights is None else expand_weights(weights, slot_NK, num_rows)
    else:
        rows = [pad_rows(plane, handle.num_recv_tokens) for plane in values]
        weights = None if weights is None else pad_rows(weights, handle.num_recv_tokens)
    scales = None if call.scales is None else rows[1]
    if scales is not None and call.column_major_scales:
        scales = column_major(scales)
    return join_rows(rows[0], scales), weights
