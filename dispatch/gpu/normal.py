"""Normal mode between device tensors: any number of rows travels, and the host knows the sizes.

For steps with prompts: their sizes vary too much for a graph. The device computes everything that depends on a count. The
host reads all counts of a layer once, when a dispatch exchanges headers, and waits for nothing else. The kernels that sort
and sum are those of a single rank, so pairs and sums have the order and the bits of `Dispatcher`.

A `RowMover` moves the rows: `nccl.NcclRows` between devices, or `rows.HostRows` through the hosts' memory over any other
wire. The latter serves ranks that share a GPU; every call waits for its copies.

Legend: T tokens, K choices, H hidden, N rows received, P pairs, Q answers received, R ranks, S slots per rank.
"""

import zlib
from time import perf_counter_ns

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.dispatched import Check, Launches, nothing
from dispatch.errors import DispatchError
from dispatch.gpu.kernels.pairs import PairOrders, combine_pairs
from dispatch.rows import NOT_HERE, RowMover, localise, ranks_of, select, token_mask


class NormalPairs:
    """Normal mode as a `PairExchange`.

    Args:
        mover: Owned; `close` closes it.
        device: Device of the tokens.
        slots_per_rank: S.
        is_fp8: Whether rows travel in FP8.
    """

    is_replayable = False

    def __init__(self, mover: RowMover, *, device: torch.device, slots_per_rank: int, is_fp8: bool) -> None:
        self._mover, self._slots_per_rank, self._is_fp8 = mover, slots_per_rank, is_fp8
        self._pairs, self._answers = PairOrders(slots_per_rank, device), PairOrders(mover.world_size, device)
        self._bytes = ([0] * mover.world_size, [0] * mover.world_size)
        self._ns = [0, 0]

    @property
    def waited_ns(self) -> tuple[int, int]:
        """The times include packing and reading: the host cannot distinguish them from a device's work."""
        return self._ns[0], self._ns[1]

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """The bytes do not include headers."""
        return self._bytes

    def dispatch(
        self,
        x_TH: Tensor,
        slots_TK: Tensor,
        capacity: int,
        meanwhile: Launches = nothing,
        label_T: Tensor | None = None,
    ) -> "NormalPairs":
        """This call waits for the device once. Other work is launched behind that: the device has nothing else to do
        until the host has packed the rows. Labels travel as a further column of the slots."""
        begun_ns = perf_counter_ns()
        R, S, K = self._mover.world_size, self._slots_per_rank, slots_TK.shape[1]
        slots_TK = torch.where((slots_TK >= 0) & (slots_TK < R * S), slots_TK, NOT_HERE)
        self._rank_TK = ranks_of(slots_TK, S)
        mask_TR = token_mask(self._rank_TK, R)
        values = fp8.quantise_fp8(x_TH) if self._is_fp8 else (x_TH,)
        labelled_TC = slots_TK if label_T is None else torch.cat((slots_TK, label_T[:, None]), 1)
        planes = [_movable(plane) for plane in (*values, labelled_TC.int())]
        self._like, call = x_TH[:0], f"S={S}, {[(plane.dtype, plane.shape[1:]) for plane in planes]}"
        self._sent = self._mover.meet(_count(mask_TR, self._rank_TK), zlib.crc32(call.encode()))
        meanwhile()
        token_N = select(mask_TR.t(), sum(self._sent.rows)) % max(x_TH.shape[0], 1)
        *rows, labelled_NC = self._receive([plane.index_select(0, token_N) for plane in planes])
        self.label_N = None if label_T is None else labelled_NC[:, K].long()
        slots_NK = localise(labelled_NC[:, :K].long(), self._mover.rank, S)
        order = self._order = self._pairs.order(slots_NK.contiguous())
        self.num_pairs = sum(self._got.answers)
        self.row_P, self.slot_offsets = order.row_P[: self.num_pairs], order.slot_offsets
        x_NH = (
            fp8.dequantise_fp8(rows[0].view(torch.float8_e4m3fn), rows[1], x_TH.dtype)
            if self._is_fp8
            else rows[0]
        )
        self.x_NH = x_NH
        self._ns[0] += perf_counter_ns() - begun_ns
        return self

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor, added_TH: Tensor | None = None
    ) -> None:
        """This call does not wait, unless rows move through the hosts' memory."""
        begun_ns = perf_counter_ns()
        pair_NK = self._order.pair_of_choice_NK
        choice_Q = select(pair_NK != NOT_HERE, self.num_pairs)  # in order of (row, choice): by source
        answers = y_PH.index_select(0, pair_NK.view(-1).index_select(0, choice_Q).long())
        received = self._mover.give_back(answers, self._got.answers, self._sent.answers)
        self._add(self._bytes[1], self._got.answers, [answers])
        answer_TK = self._answers.order(self._rank_TK).pair_of_choice_NK  # received by rank, token, choice
        combine_pairs(received, answer_TK, weights_TK, out_TH, added_TH)
        self._ns[1] += perf_counter_ns() - begun_ns

    def refuse(self, problem: str, *, is_combine: bool = False) -> None:
        if is_combine:
            self._mover.refuse(problem, self._like, self._got.answers, self._sent.answers)
        else:
            self._mover.refuse(problem)

    def interrupt(self, error: DispatchError) -> None:
        self._mover.interrupt(error)

    def begin_check(self) -> Check:
        return self._mover.begin_check()

    def close(self) -> None:
        self._mover.close()

    def _receive(self, planes: list[Tensor]) -> list[Tensor]:
        received, self._got, _ = self._mover.send(planes, self._sent)
        self._add(self._bytes[0], self._sent.rows, planes)
        return received

    def _add(self, sent: list[int], counts: list[int], planes: list[Tensor]) -> None:
        """Add the bytes sent to other ranks."""
        row_bytes = sum(plane.shape[1:].numel() * plane.element_size() for plane in planes)
        for rank, count in enumerate(counts):
            sent[rank] += 0 if rank == self._mover.rank else count * row_bytes


def _count(mask_TR: Tensor, rank_TK: Tensor) -> Tensor:
    """Return int64 [2, R]: rows for each rank, and answers that each rank will send back."""
    R = mask_TR.shape[1]
    rank_P = torch.where(rank_TK == NOT_HERE, R, rank_TK).view(-1)
    answers = torch.zeros(R + 1, dtype=torch.int64, device=rank_P.device).scatter_add_(
        0, rank_P, torch.ones_like(rank_P)
    )
    return torch.stack([mask_TR.sum(0), answers[:R]])


def _movable(plane: Tensor) -> Tensor:
    """View float8, which torch cannot index, as bytes."""
    return plane.view(torch.uint8) if plane.element_size() == 1 else plane
