"""DeepEP's normal mode over `RowExchange`: layout, dispatch, and combine with its sum. Arguments are not checked here.

A token travels once to every rank that holds one of its experts, with its choices and weights. There, choices become
local experts, and those of other ranks -1. A rank's answer per row comes back and is summed over ranks in
ascending order, biases first, in float32 with one rounding. (DeepEP sums in this order within a node, and with several
nodes per node first; here the order is the same for any number of nodes. It still groups by rank, so the bits change with
the placement: the service's own combine sums (token, choice) rows instead.)

Legend: T tokens of this rank, K choices, H hidden, E experts, L experts of a rank, N rows received, R ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dispatch.faces import handles
from dispatch.faces.checks import CombineCall, DispatchArguments
from dispatch.faces.handles import pad_rows
from dispatch.rows import (
    NOT_HERE,
    GivenBack,
    Received,
    RowExchange,
    localise,
    ranks_of,
    sum_dtype,
    token_mask,
)


class Layout(NamedTuple):
    """Result of `get_dispatch_layout`, in the order in which DeepEP returns it."""

    num_tokens_per_rank: Tensor  # int32 [R]
    num_tokens_per_rdma_rank: Tensor | None  # int32 [nodes]; None within one node
    num_tokens_per_expert: Tensor  # int32 [E]
    is_token_in_rank: Tensor  # bool [T, R]


class Arrived(NamedTuple):
    """Received rows, in the form that `Buffer.dispatch` returns."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_tokens_per_expert: list[int]
    handle: handles.Handle


def find_layout(topk_idx: Tensor, num_experts: int, num_ranks: int, node_size: int) -> Layout:
    """Count the tokens' destinations. A token counts once per rank and node, and for an expert once per choice. Local."""
    mask_TR = token_mask(ranks_of(topk_idx, num_experts // num_ranks), num_ranks)
    per_expert = torch.bincount(topk_idx[topk_idx != NOT_HERE], minlength=num_experts).int()
    per_node = handles.to_nodes(mask_TR, node_size).sum(0).int() if num_ranks > node_size else None
    return Layout(mask_TR.sum(0).int(), per_node, per_expert, mask_TR)


class NormalMode:
    """Dispatch and combine of one rank. Collective, in the same order on all ranks.

    Args:
        exchange: Rows over the buffer's wire.
        node_size: Ranks per node, for handles and counts that distinguish nodes; the rows do not depend on it.
    """

    def __init__(self, exchange: RowExchange, *, node_size: int) -> None:
        self.exchange = exchange
        self.node_size = node_size
        self.rank, self.num_ranks = exchange.rank, exchange.world_size
        self.num_nodes = -(-self.num_ranks // node_size)

    def dispatch(self, call: DispatchArguments) -> Arrived:
        """Send tokens by a layout.

        Raises:
            ValueError: A rank receives more than its num_worst_tokens; on all ranks, because all have the counts.
            Others: As `RowExchange.send`.
        """
        assert call.is_token_in_rank is not None and call.num_tokens_per_expert is not None, "checked before"
        planes = [t for t in (call.x, call.scales, call.topk_idx, call.topk_weights) if t is not None]
        note = [call.num_worst_tokens, *call.num_tokens_per_expert.tolist()]
        name = f"dispatch over {len(note) - 1} experts"
        received = self.exchange.send(planes, call.is_token_in_rank, call=name, note=note)
        self._check_room(received)
        num_rows = call.num_worst_tokens or received.source_token_N.shape[0]
        rows = iter([pad_rows(plane, num_rows) for plane in received.planes])
        x, scales = next(rows), None if call.scales is None else next(rows)
        topk_idx = topk_weights = None
        if call.topk_idx is not None:
            num_received = received.source_token_N.shape[0]
            topk_idx, topk_weights = self._localise(next(rows), next(rows), num_received, len(note) - 1)
        counts = [] if call.num_worst_tokens else self._count_experts(received, call.expert_alignment)
        return Arrived(x, scales, topk_idx, topk_weights, counts, self._pack(received, num_rows))

    def dispatch_cached(
        self, x: Tensor, scales: Tensor | None, contents: handles.Contents
    ) -> tuple[Tensor, Tensor | None]:
        """Send other rows by the route of an earlier dispatch. Raises as `RowExchange.resend`."""
        planes = [x] if scales is None else [x, scales]
        received = self.exchange.resend(planes, contents.route, call="cached dispatch")
        padded = [pad_rows(plane, contents.num_rows) for plane in received]
        return padded[0], padded[1] if scales is not None else None

    def combine(self, call: CombineCall, contents: handles.Contents) -> tuple[Tensor, Tensor | None]:
        """Bring the rows back and add them up. Raises as `RowExchange.give_back`."""
        num_rows = int(contents.route.counts_RR[:, self.rank].sum())
        planes = [plane[:num_rows] for plane in (call.x, call.topk_weights) if plane is not None]
        back = self.exchange.give_back(planes, contents.route, call="combine")
        num_tokens = contents.route.is_token_in_rank_TR.shape[0]
        combined = sum_over_ranks(back, 0, num_tokens, call.biases)
        return combined, None if call.topk_weights is None else sum_over_ranks(back, 1, num_tokens)

    def _localise(
        self, topk_idx: Tensor, topk_weights: Tensor, num_received: int, num_experts: int
    ) -> tuple[Tensor, Tensor]:
        """Convert experts to local ones. Choices of other ranks and of padding rows become -1, with weight 0."""
        local = localise(topk_idx, self.rank, num_experts // self.num_ranks)
        local[num_received:] = NOT_HERE
        return local, torch.where(local == NOT_HERE, 0.0, topk_weights)

    def _count_experts(self, received: Received, alignment: int) -> list[int]:
        """Add up all ranks' counts for this rank's experts, each rounded up."""
        totals = torch.tensor(received.notes)[:, 1:].sum(0).view(self.num_ranks, -1)[self.rank].tolist()
        return [-(-total // alignment) * alignment for total in totals]

    def _check_room(self, received: Received) -> None:
        for rank, total in enumerate(received.route.counts_RR.sum(0).tolist()):
            worst = received.notes[rank][0]
            if 0 < worst < total:
                raise ValueError(
                    f"num_worst_tokens is {worst} on rank {rank}, which receives {total} tokens; "
                    "it must be at least that number (the sum of all ranks' tokens is always enough)"
                )

    def _pack(self, received: Received, num_rows: int) -> handles.Handle:
        return handles.pack(
            received, num_rows, rank=self.rank, num_nodes=self.num_nodes, node_size=self.node_size
        )


def sum_over_ranks(back: GivenBack, plane: int, num_tokens: int, biases: Sequence[Tensor] = ()) -> Tensor:
    """Return [T, ...] in the plane's dtype: biases in their order, then answers by ascending rank.

    Added in float32 (float64 for float64) and rounded once. A token without a destination is the sum of its biases.
    """
    rows = back.planes[plane]
    wide = sum_dtype(rows)
    total = torch.zeros(num_tokens, *rows.shape[1:], dtype=wide, device=rows.device)
    for bias in biases:
        total += bias.detach().to(wide)
    counts = torch.unique_consecutive(back.rank_Q, return_counts=True)[1].tolist()
    for token, part in zip(torch.split(back.token_Q, counts), torch.split(rows, counts), strict=True):
        total[token] += part.to(wide)  # a rank answers a token once: indices are unique
    return total.to(rows.dtype)
