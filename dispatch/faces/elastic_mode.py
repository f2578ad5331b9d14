"""Dispatch and combine of `ElasticBuffer` over `RowExchange`. No checks here; see `elastic_layout` and `elastic_sums`.

A token travels once to every rank that holds one of its experts, with its choices, scales and weights; where each row
goes in a result is found at the receiver. Answers come back one row per token and rank (or K, where expanded rows may
not be summed before they travel: then most of what travels is zero), and all groups are summed at the source. In
DeepEP's hybrid mode a node's sums are made inside the node; the bits are the same.

Legend: T tokens of this rank, K choices, H hidden, L experts of a rank, N rows received, R ranks.
"""

import torch
from torch import Tensor

from dispatch.choices import NOT_HERE, localise, ranks_of, token_mask
from dispatch.faces import elastic_layout as layout
from dispatch.faces import elastic_sums as sums
from dispatch.faces.elastic_arguments import CombineCall, DispatchCall
from dispatch.faces.ep_handle import EPHandle, Routes
from dispatch.faces.rows import Rows, join_rows, pad_rows
from dispatch.rows import RowExchange


class ElasticMode:
    """One rank's end. Calls are collective, in the same order on all ranks.

    Args:
        exchange: over the buffer's wire.
        scaleup_ranks: ranks of a logical domain.
        allow_multiple_reduction: sum by rank, and by domain where there are several, before the final sum.
    """

    def __init__(self, exchange: RowExchange, *, scaleup_ranks: int, allow_multiple_reduction: bool) -> None:
        self.exchange = exchange
        self.rank, self.num_ranks = exchange.wire.rank, exchange.wire.world_size
        self._scaleup_ranks = scaleup_ranks
        self._reduces_early = allow_multiple_reduction
        self._reduces_domains = allow_multiple_reduction and scaleup_ranks < self.num_ranks

    def dispatch(self, call: DispatchCall) -> tuple[EPHandle, Rows, Tensor | None]:
        """Send by the choices; return the handle, rows (and scales), and weights. Raises as `RowExchange.send`."""
        L = _experts_per_rank(call.num_experts, self.num_ranks)
        rank_TK = ranks_of(call.topk_idx, L)
        mask_TR = token_mask(rank_TK, self.num_ranks)
        name = f"elastic dispatch of up to {call.max_tokens} tokens over {call.num_experts} experts"
        received = self.exchange.send([call.topk_idx, *_planes(call)], mask_TR, call=name)
        local_NK = localise(received.planes[0], self.rank, L)
        experts = layout.place_experts(local_NK, L, call.alignment)
        source_N = torch.arange(self.num_ranks).repeat_interleave(torch.tensor(received.counts_R))
        metadata = layout.source_metadata(
            source_N.to(local_NK.device),
            received.source_token_N,
            experts,
            max_tokens=call.max_tokens,
            scaleup_ranks=self._scaleup_ranks,
            do_expand=call.do_expand,
        )
        if call.stats is not None:
            call.stats.add_(experts.counts_L.to(call.stats.dtype))
        slot_TK = layout.destination_rows(mask_TR, received.route.counts_RR, self.rank, rank_TK)
        routes = Routes(received.route, local_NK, local_NK.shape[0])
        handle = self._describe(call, experts, metadata, slot_TK, routes)
        return handle, *_arrange(received.planes[1:], call, handle)

    def dispatch_cached(self, call: DispatchCall, handle: EPHandle) -> tuple[Rows, Tensor | None]:
        """Send the way of an earlier dispatch; return rows (and scales), and weights. Raises as `resend`."""
        route = _routes(handle).route
        planes = self.exchange.resend(_planes(call), route, call="elastic cached dispatch")
        return _arrange(planes, call, handle)

    def combine(self, call: CombineCall, handle: EPHandle) -> tuple[Tensor, Tensor | None]:
        """Bring rows home; return their sums, and the weights. Raises as `RowExchange.give_back`."""
        planes = self._outgoing(call, handle)
        back = self.exchange.give_back(planes, _routes(handle).route, call="elastic combine")
        rank_TK = ranks_of(handle.topk_idx, _experts_per_rank(handle.num_experts, self.num_ranks))
        answer_TK = sums.answers_at(back, rank_TK, self.num_ranks)
        combined = sums.sum_choices(self._terms(back.planes[0], answer_TK, rank_TK), call.biases)
        return combined, None if call.topk_weights is None else sums.pick_weights(back.planes[1], answer_TK)

    def _describe(
        self, call: DispatchCall, experts: layout.Experts, metadata: Tensor, slot_TK: Tensor, routes: Routes
    ) -> EPHandle:
        alignment, counts_L = call.alignment, experts.counts_L
        num_rows, num_expanded = metadata.shape[0], experts.num_expanded
        if not call.do_cpu_sync:
            num_rows = call.max_tokens * self.num_ranks
            num_expanded = layout.most_expanded(num_rows, call.topk_idx.shape[1], counts_L.numel(), alignment)
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
            num_recv_tokens_per_expert_list=layout.padded(counts_L, alignment).tolist()
            if call.do_cpu_sync
            else [],
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor(per_scaleup)
            .cumsum(0)
            .int()
            .to(metadata.device),
            psum_num_recv_tokens_per_expert=layout.expert_ends(experts, alignment, call.do_expand),
            num_unaligned_recv_tokens_per_expert=counts_L.int(),
            recv_src_metadata=pad_rows(metadata, num_rows, NOT_HERE),
            dst_buffer_slot_idx=slot_TK,
            routes=routes,
        )

    def _outgoing(self, call: CombineCall, handle: EPHandle) -> list[Tensor]:
        """One row per received row, or K where nothing may be summed here; and weights."""
        N, weights = _routes(handle).num_rows, call.topk_weights
        if not handle.do_expand:
            return [call.x[:N]] if weights is None else [call.x[:N], weights[:N]]
        slot_NK = handle.slot_NK
        if self._reduces_early:
            here_NK = torch.where(slot_NK == NOT_HERE, sums.NONE, 0)
            rows = sums.sum_groups(sums.Terms(call.x, slot_NK), here_NK).values_QH
        else:
            rows = layout.take(call.x, slot_NK)
        return [rows] if weights is None else [rows, layout.take(weights, slot_NK)]

    def _terms(self, rows: Tensor, answer_TK: Tensor, rank_TK: Tensor) -> sums.Terms:
        """What the final sum adds: rows by choice, by rank, or summed by domain."""
        if rows.dim() == 3:
            return sums.terms_by_choice(rows, answer_TK)
        terms = sums.terms_by_rank(rows, answer_TK, rank_TK)
        if not self._reduces_domains:
            return terms
        return sums.sum_groups(terms, torch.div(rank_TK, self._scaleup_ranks, rounding_mode="floor"))


def local_choices(handle: EPHandle) -> Tensor:
    """Return [num_recv_tokens, K], new: received choices as local experts, -1 elsewhere."""
    local_NK = _routes(handle).local_idx_NK.clone()  # the handle keeps its own
    return pad_rows(local_NK, handle.num_recv_tokens, NOT_HERE)


def _routes(handle: EPHandle) -> Routes:
    assert handle.routes is not None, "checked before: a dispatch made this handle"
    return handle.routes


def _experts_per_rank(num_experts: int | None, num_ranks: int) -> int:
    assert num_experts, "checked before"
    return num_experts // num_ranks


def _planes(call: DispatchCall) -> list[Tensor]:
    """What travels of a token, beside its choices."""
    return [plane for plane in (call.x, call.scales, call.topk_weights) if plane is not None]


def _arrange(planes: list[Tensor], call: DispatchCall, handle: EPHandle) -> tuple[Rows, Tensor | None]:
    """Put received rows, scales and weights where the caller wants them."""
    weights = planes[-1] if call.topk_weights is not None else None
    values = planes if weights is None else planes[:-1]
    if call.do_expand:
        slot_NK, num_rows = handle.slot_NK, handle.num_expanded_tokens
        rows = [layout.expand_rows(plane, slot_NK, num_rows) for plane in values]
        weights = None if weights is None else layout.expand_weights(weights, slot_NK, num_rows)
    else:
        rows = [pad_rows(plane, handle.num_recv_tokens) for plane in values]
        weights = None if weights is None else pad_rows(weights, handle.num_recv_tokens)
    scales = None if call.scales is None else rows[1]
    if scales is not None and call.column_major_scales:
        scales = layout.column_major(scales)
    return join_rows(rows[0], scales), weights
