"""Normal mode between device tensors: rows of any number travel by a wire, and the host knows their sizes.

For steps with prompts, whose sizes no graph could fix. Over NCCL windows lie on the devices; over gloo and shared memory
they lie in the host's, which serves ranks that share a GPU. Exchanging is `RowExchange`'s, sorting and summing are the
kernels that one rank uses too; so pairs and sums have the order and the bits of `Dispatcher`.

Legend: T tokens, K choices, H hidden, N rows received, P pairs, Q answers received, R ranks, S slots per rank.
"""

from time import perf_counter_ns

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.choices import NOT_HERE, localise, ranks_of, token_mask
from dispatch.gpu.combine import combine_pairs
from dispatch.gpu.packed import Packed
from dispatch.gpu.permute import PairOrders
from dispatch.meanwhile import Meanwhile, nothing
from dispatch.rows import Route, RowExchange
from dispatch.wires.wire import Wire


class NormalWay:
    """See `Way`.

    Args:
        wire: taken over; `close` closes it.
        device: of tokens.
        slots_per_rank: S.
        is_fp8: whether rows travel in FP8.
    """

    is_replayable = False

    def __init__(self, wire: Wire, *, device: torch.device, slots_per_rank: int, is_fp8: bool) -> None:
        self._wire, self._rows = wire, RowExchange(wire)
        self._slots_per_rank, self._is_fp8 = slots_per_rank, is_fp8
        self._pairs = PairOrders(slots_per_rank, device)
        self._answers = PairOrders(wire.world_size, device)
        self._sent, self._answered = [0] * wire.world_size, [0] * wire.world_size
        self._dispatch_ns = self._combine_ns = 0

    @property
    def waited_ns(self) -> tuple[int, int]:
        """See `Way`. Packing, reading and what runs meanwhile are in it: the host cannot tell them from a device's work."""
        return self._dispatch_ns, self._combine_ns

    @property
    def sent_bytes(self) -> tuple[list[int], list[int]]:
        """See `Way`. Without headers."""
        return self._sent, self._answered

    def dispatch(
        self, x_TH: Tensor, slots_TK: Tensor, capacity: int, meanwhile: Meanwhile = nothing
    ) -> Packed:
        """See `Way`. Waits for the device."""
        begun_ns = perf_counter_ns()
        R, S = self._wire.world_size, self._slots_per_rank
        slots_TK = torch.where((slots_TK >= 0) & (slots_TK < R * S), slots_TK, NOT_HERE)
        rank_TK = ranks_of(slots_TK, S)
        planes = [*self._travelling(x_TH), slots_TK.to(torch.int32)]
        received = self._rows.send(planes, token_mask(rank_TK, R), call="dispatch", meanwhile=meanwhile)
        *values, slots_NK = received.planes
        self._order = self._pairs.order(localise(slots_NK.long(), self._wire.rank, S))
        self._rank_TK, self._counts_R = rank_TK, received.counts_R
        self._count(self._sent, received.route, planes)
        x_NH = fp8.dequantise_fp8(values[0], values[1], x_TH.dtype) if self._is_fp8 else values[0]
        num_pairs = int(self._order.slot_offsets[-1])
        self._dispatch_ns += perf_counter_ns() - begun_ns
        return Packed(x_NH, self._order.row_P[:num_pairs], self._order.slot_offsets, num_pairs)

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor, meanwhile: Meanwhile = nothing
    ) -> None:
        """See `Way`. Waits for the device."""
        begun_ns = perf_counter_ns()
        pair_NK = self._order.pair_of_choice_TK
        is_pair_NK = pair_NK != NOT_HERE
        rank_R = torch.arange(self._wire.world_size, device=y_PH.device)
        source_N = rank_R.repeat_interleave(torch.tensor(self._counts_R, device=y_PH.device))
        source_Q = source_N.unsqueeze(1).expand_as(pair_NK)[is_pair_NK]  # in order of (row, choice)
        answer_QH = y_PH[pair_NK[is_pair_NK].long()]
        received = self._rows.send(
            [answer_QH], source_Q.unsqueeze(1) == rank_R, call="combine", meanwhile=meanwhile
        )
        self._count(self._answered, received.route, [answer_QH])
        answer_TK = self._answers.order(self._rank_TK).pair_of_choice_TK  # they come by rank, token, choice
        combine_pairs(received.planes[0], answer_TK, weights_TK, out_TH)
        self._combine_ns += perf_counter_ns() - begun_ns

    def refuse(self, problem: str) -> None:
        """See `Way`."""
        self._wire.refuse(problem)

    def check(self) -> None:
        """See `Way`. Everything is said at once."""

    def close(self) -> None:
        """See `Way`."""
        self._wire.close()

    def _count(self, sent: list[int], route: Route, planes: list[Tensor]) -> None:
        """Add the bytes that went to other ranks."""
        row_bytes = sum(plane.shape[1:].numel() * plane.element_size() for plane in planes)
        for rank, count in enumerate(route.counts_RR[self._wire.rank].tolist()):
            sent[rank] += 0 if rank == self._wire.rank else count * row_bytes

    def _travelling(self, x_TH: Tensor) -> list[Tensor]:
        return list(fp8.quantise_fp8(x_TH)) if self._is_fp8 else [x_TH]
