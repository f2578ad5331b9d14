"""Normal mode between device tensors: rows of any number travel, and the host knows their sizes.

For steps with prompts, whose sizes no graph could fix. Everything that depends on a count is computed on the device; the
host learns all counts of a layer at once, when a dispatch meets the other ranks, and waits for nothing else of it. Sorting
and summing are the kernels that one rank uses too; so pairs and sums have the order and the bits of `Dispatcher`.

How rows move is a `RowMover`'s: `nccl.NcclRows` between devices, or `HostRows` through the hosts' memory over any other
wire, which serves ranks that share a GPU, and where every call waits for its copies.

Legend: T tokens, K choices, H hidden, N rows received, P pairs, Q answers received, R ranks, S slots per rank.
"""

import zlib
from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.choices import NOT_HERE, localise, ranks_of, token_mask
from dispatch.errors import DispatchError, RanksDisagree
from dispatch.gpu.pairs import PairOrders, combine_pairs
from dispatch.wires.wire import RankTable, Wire

_HEAD_WORDS = 4  # of a message through hosts: a call's number and words, rows, answers that they ask for


class Counts(NamedTuple):
    """What travels between this rank and each other, known to the host."""

    rows: list[int]  # of a dispatch
    answers: list[int]  # of the combine that follows, the other way


class RowMover(Protocol):
    """Moves rows of device tensors, ordered by rank. Calls are collective, in the same order on all ranks.

    Attributes:
        rank, world_size: of the group.
    """

    rank: int
    world_size: int

    def meet(self, counts_2R: Tensor, call: int) -> Counts:
        """Tell every rank what it will get; waits for the device. The only look of the host in a layer.

        Args:
            counts_2R: int64 on the device: rows for each rank, and answers that will come back from it.
            call: a number that must be equal on all ranks.

        Returns:
            This rank's counts.

        Raises:
            PeerRefused, RanksDisagree: of this call, and of the combine before. PeerLost, DispatchTimeout.
        """
        ...

    def send(self, planes: Sequence[Tensor], sent: Counts) -> tuple[list[Tensor], Counts]:
        """Send every plane's rows, ordered by destination; return those received, by source, and their counts."""
        ...

    def give_back(self, answers: Tensor, owed: list[int], expected: list[int]) -> Tensor:
        """Send answers, ordered by the rank that is owed them; return those that came, by rank."""
        ...

    def refuse(self, text: str, like: Tensor | None, owed: list[int], expected: list[int]) -> None:
        """Stand in for `meet` (and `send`); or where `like` is an answer for `give_back`."""
        ...

    def interrupt(self, error: DispatchError) -> None:
        """End what waits for peers with this error. Local, from any thread."""
        ...

    def check(self) -> None:
        """Raise what peers said of combines. Local; waits for the device."""
        ...

    def close(self) -> None:
        """Release what it holds. Local."""
        ...


class NormalPairs:
    """Normal mode as a `PairExchange`.

    Args:
        mover: taken over; `close` closes it.
        device: of tokens.
        slots_per_rank: S.
        is_fp8: whether rows travel in FP8.
    """

    is_replayable = False

    def __init__(self, mover: RowMover, *, device: torch.device, slots_per_rank: int, is_fp8: bool) -> None:
        self._mover, self._slots_per_rank, self._is_fp8 = mover, slots_per_rank, is_fp8
        self._pairs, self._answers = PairOrders(slots_per_rank, device), PairOrders(mover.world_size, device)
        self._bytes = ([0] * mover.world_size, [0] * mover.world_size)
        self._ns = [0, 0]

    @property
    def waited_ns(self) -> tuple[int, int]:
        """See `PairExchange`. Packing and reading are in it: the host cannot tell them from a device's work."""
        return self._ns[0], self._ns[1]

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """See `PairExchange`. Without headers."""
        return self._bytes

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, capacity: int) -> "NormalPairs":
        """See `PairExchange`. Waits for the device once."""
        begun_ns = perf_counter_ns()
        R, S = self._mover.world_size, self._slots_per_rank
        slots_TK = torch.where((slots_TK >= 0) & (slots_TK < R * S), slots_TK, NOT_HERE)
        self._rank_TK = ranks_of(slots_TK, S)
        mask_TR = token_mask(self._rank_TK, R)
        values = fp8.quantise_fp8(x_TH) if self._is_fp8 else (x_TH,)
        planes = [_movable(plane) for plane in (*values, slots_TK.int())]
        self._like, call = x_TH[:0], f"S={S}, {[(plane.dtype, plane.shape[1:]) for plane in planes]}"
        self._sent = self._mover.meet(_count(mask_TR, self._rank_TK), zlib.crc32(call.encode()))
        token_N = select(mask_TR.t(), sum(self._sent.rows)) % max(x_TH.shape[0], 1)
        *rows, slots_NK = self._receive([plane.index_select(0, token_N) for plane in planes])
        order = self._order = self._pairs.order(localise(slots_NK.long(), self._mover.rank, S))
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

    def combine(self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor) -> None:
        """See `PairExchange`. Does not wait, unless rows move through the hosts' memory."""
        begun_ns = perf_counter_ns()
        pair_NK = self._order.pair_of_choice_NK
        choice_Q = select(pair_NK != NOT_HERE, self.num_pairs)  # in order of (row, choice): by source
        answers = y_PH.index_select(0, pair_NK.view(-1).index_select(0, choice_Q).long())
        received = self._mover.give_back(answers, self._got.answers, self._sent.answers)
        self._add(self._bytes[1], self._got.answers, [answers])
        answer_TK = self._answers.order(self._rank_TK).pair_of_choice_NK  # they come by rank, token, choice
        combine_pairs(received, answer_TK, weights_TK, out_TH)
        self._ns[1] += perf_counter_ns() - begun_ns

    def refuse(self, problem: str, *, is_combine: bool = False) -> None:
        """See `PairExchange`."""
        if is_combine:
            self._mover.refuse(problem, self._like, self._got.answers, self._sent.answers)
        else:
            self._mover.refuse(problem, None, [], [])

    def interrupt(self, error: DispatchError) -> None:
        """See `PairExchange`."""
        self._mover.interrupt(error)

    def check(self) -> None:
        """See `PairExchange`."""
        self._mover.check()

    def close(self) -> None:
        """See `PairExchange`."""
        self._mover.close()

    def _receive(self, planes: list[Tensor]) -> list[Tensor]:
        received, self._got = self._mover.send(planes, self._sent)
        self._add(self._bytes[0], self._sent.rows, planes)
        return received

    def _add(self, sent: list[int], counts: list[int], planes: list[Tensor]) -> None:
        """Add the bytes that went to other ranks."""
        row_bytes = sum(plane.shape[1:].numel() * plane.element_size() for plane in planes)
        for rank, count in enumerate(counts):
            sent[rank] += 0 if rank == self._mover.rank else count * row_bytes


def select(is_chosen: Tensor, count: int) -> Tensor:
    """Return int64 [count]: the flat indices of what is chosen, in order; the host knows how many there are."""
    flat = is_chosen.reshape(-1)
    place = torch.where(flat, flat.cumsum(0) - 1, count)
    chosen = torch.zeros(
        count + 1, dtype=torch.int64, device=flat.device
    )  # the last takes what is not chosen
    return chosen.scatter_(0, place, torch.arange(flat.numel(), device=flat.device))[:count]


def _count(mask_TR: Tensor, rank_TK: Tensor) -> Tensor:
    """Return int64 [2, R]: rows for each rank, and answers that come back."""
    R = mask_TR.shape[1]
    rank_P = torch.where(rank_TK == NOT_HERE, R, rank_TK).view(-1)
    answers = torch.zeros(R + 1, dtype=torch.int64, device=rank_P.device).scatter_add_(
        0, rank_P, torch.ones_like(rank_P)
    )
    return torch.stack([mask_TR.sum(0), answers[:R]])


def _movable(plane: Tensor) -> Tensor:
    """See float8, which torch cannot index, as bytes."""
    return plane.view(torch.uint8) if plane.element_size() == 1 else plane


class HostRows:
    """`RowMover` through the hosts' memory, over any wire of CPUs.

    A message holds a head, then each plane's rows; sizes are found out in the exchange itself.

    Args:
        wire: taken over.
        device: of the rows.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire, self._device = wire, device
        self.rank, self.world_size = wire.rank, wire.world_size
        self._sizes, self._expected = RankTable(wire.world_size), RankTable(wire.world_size)
        self._number = self._call = 0

    def meet(self, counts_2R: Tensor, call: int) -> Counts:
        """See `RowMover`. Peers are told by `send`."""
        self._call = call
        return Counts(*counts_2R.tolist())

    def send(self, planes: Sequence[Tensor], sent: Counts) -> tuple[list[Tensor], Counts]:
        """See `RowMover`."""
        self._number += 1
        shares = list(zip(*(torch.split(_as_bytes(plane), sent.rows) for plane in planes), strict=True))
        heads = [torch.tensor([self._number, self._call, *pair]) for pair in zip(*sent, strict=True)]
        messages = [
            [head.view(torch.uint8), *(part.reshape(-1) for part in share)]
            for head, share in zip(heads, shares, strict=True)
        ]
        self._exchange(messages, None)
        parts, rows, answers = [], [], []
        for peer in range(self.world_size):
            head, share = heads[peer], shares[peer]
            if peer != self.rank:
                head, share = self._read(peer, planes)
            parts.append(share)
            rows.append(int(head[2]))
            answers.append(int(head[3]))
        joined = [
            torch.cat([part.to(self._device) for part in column]) for column in zip(*parts, strict=True)
        ]
        return [_as_plane(rows_, plane) for rows_, plane in zip(joined, planes, strict=True)], Counts(
            rows, answers
        )

    def give_back(self, answers: Tensor, owed: list[int], expected: list[int]) -> Tensor:
        """See `RowMover`."""
        shares = torch.split(_as_bytes(answers), owed)
        row_bytes = shares[0].shape[1]
        self._exchange([[share.reshape(-1)] for share in shares], [count * row_bytes for count in expected])
        parts = [
            shares[peer] if peer == self.rank else self._wire.received(peer).view(expected[peer], row_bytes)
            for peer in range(self.world_size)
        ]
        return _as_plane(torch.cat([part.to(self._device) for part in parts]), answers)

    def refuse(self, text: str, like: Tensor | None, owed: list[int], expected: list[int]) -> None:
        """See `RowMover`."""
        self._number += like is None
        self._wire.refuse(text)

    def interrupt(self, error: DispatchError) -> None:
        """See `RowMover`. A host's wire notices a peer's end by itself."""

    def check(self) -> None:
        """See `RowMover`. Every call says itself what went wrong."""

    def close(self) -> None:
        """See `RowMover`."""
        self._wire.close()

    def _exchange(self, messages: list[list[Tensor]], expected: list[int] | None) -> None:
        for peer, message in enumerate(messages):
            self._sizes.values[peer] = 0 if peer == self.rank else sum(part.numel() for part in message)
        if expected is not None:
            self._expected.values[:] = expected
            self._expected.values[self.rank] = 0
        self._wire.open_windows(self._sizes)
        for peer, message in enumerate(messages):
            if peer != self.rank:
                window = self._wire.send_window(peer)
                ends = accumulate(part.numel() for part in message)
                for end, part in zip(ends, message, strict=True):
                    window[end - part.numel() : end].copy_(part)
        self._wire.exchange(self._sizes, None if expected is None else self._expected)

    def _read(self, peer: int, planes: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Take a peer's message apart; the rows stay where they lie."""
        message, at = self._wire.received(peer), 8 * _HEAD_WORDS
        head = message[:at].clone().view(torch.int64)
        if head[:2].tolist() != [self._number, self._call]:
            raise RanksDisagree(
                f"rank {peer} made another call than rank {self.rank}'s dispatch: other shapes or types, or another number"
            )
        share = []
        for plane in planes:
            row_bytes = _as_bytes(plane).shape[1]
            end = at + int(head[2]) * row_bytes
            share.append(message[at:end].view(int(head[2]), row_bytes))
            at = end
        return head, tuple(share)


def _as_bytes(plane: Tensor) -> Tensor:
    """See [N, ...] as uint8 [N, bytes of a row]."""
    row_bytes = plane.element_size() * plane.shape[1:].numel()
    return plane.contiguous().view(-1).view(torch.uint8).view(plane.shape[0], row_bytes)


def _as_plane(rows: Tensor, plane: Tensor) -> Tensor:
    """See bytes as rows of a plane."""
    return rows.view(-1).view(plane.dtype).view(rows.shape[0], *plane.shape[1:])
