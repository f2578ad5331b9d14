"""The service's dispatcher between device tensors: each step goes the way that the lock-step header's mode says.

Decode steps go by low-latency kernels, which the host neither waits for nor counts; steps with prompts go by an exchange
whose sizes the host knows. Both give the pairs and the bits of `Dispatcher`. One rank, and ranks without memory that
kernels can write to, have one exchange for all steps.

Legend: T tokens, K choices, H hidden, N rows received, P pairs, S slots per rank.
"""

from typing import NoReturn, Protocol

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.arguments import answers_problem, dispatch_problem, dtype_problem
from dispatch.dispatched import Dispatched, DispatchHandle, Exchanges, Waits
from dispatch.errors import DispatchError
from dispatch.gpu.casts import STORED
from dispatch.gpu.pairs import PairOrders, combine_pairs
from dispatch.mode import NORMAL, Mode


class ReceivedPairs(Protocol):
    """What a rank received; overwritten by the next dispatch.

    Attributes:
        x_NH: rows, contiguous; those that no pair names are undefined.
        row_P: int64 [num_pairs], the row of each pair. slot_offsets: int64 [S+1].
        num_pairs: rows of `row_P` and of the answers: pairs, or room for them where the host does not count.
    """

    @property
    def x_NH(self) -> Tensor: ...
    @property
    def row_P(self) -> Tensor: ...
    @property
    def slot_offsets(self) -> Tensor: ...
    @property
    def num_pairs(self) -> int: ...


class PairExchange(Protocol):
    """Moves tokens to the slots that they chose, and answers back. Calls are collective, in the same order on all ranks;
    arguments are checked by the caller.

    Attributes:
        waited_ns: by dispatches and by combines so far; reading it may wait for the device.
        is_replayable: whether calls may be captured in a CUDA graph.
    """

    is_replayable: bool

    @property
    def waited_ns(self) -> tuple[int, int]: ...

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """Return the bytes that went to each rank so far, by dispatches and by combines; may wait for the device."""
        ...

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, capacity: int) -> ReceivedPairs:
        """Send each token once to every rank that holds one of its choices.

        Args:
            x_TH: [T, H], contiguous. slots_TK: int64, contiguous; what is no slot is no choice.
            capacity: the most tokens of any rank; 0 for no limit.
        """
        ...

    def combine(self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor) -> None:
        """Bring the answers of the last dispatch home and sum them in the order of the choices.

        Args:
            y_PH: [num_pairs, H], contiguous. weights_TK: float32, contiguous. out_TH: contiguous.
        """
        ...

    def refuse(self, problem: str, *, is_combine: bool = False) -> None:
        """Stand in for one call whose arguments are bad; the caller raises."""
        ...

    def interrupt(self, error: DispatchError) -> None:
        """End what waits for peers, now and later, with this error. Local, from any thread."""
        ...

    def check(self) -> None:
        """Raise what went wrong in calls that did not wait to say so. Local; may wait for the device."""
        ...

    def close(self) -> None:
        """Release what it holds. Local."""
        ...


class DeviceDispatcher:
    """See `TokenDispatcher`. Calls are collective, in the same order on all ranks.

    Args:
        normal: taken over, as is the next; `close` closes them.
        low_latency: for steps in that mode; None: they go by `normal` too.
        world_size: ranks.
        device: of all tensors.
        row_format: how rows travel, in words.
        name, reason: of the backend.
    """

    def __init__(
        self,
        normal: PairExchange,
        low_latency: PairExchange | None,
        *,
        world_size: int,
        device: torch.device,
        row_format: str,
        name: str,
        reason: str,
    ) -> None:
        self._normal, self._low_latency = normal, low_latency or normal
        self._exchanges = [normal] if low_latency is None else [normal, low_latency]
        self.world_size, self.device, self.row_format = world_size, device, row_format
        self.name, self.reason = name, reason
        self.is_replayable = self._low_latency.is_replayable
        self._call = 0
        self._last = normal

    @property
    def waits(self) -> Waits:
        """See `TokenDispatcher`. Waits for the device."""
        return Waits(
            *(sum(parts) for parts in zip(*(each.waited_ns for each in self._exchanges), strict=True))
        )

    @property
    def exchanges(self) -> Exchanges:
        """See `TokenDispatcher`. The host does not know."""
        return Exchanges(0, 0)

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """See `TokenDispatcher`. Waits for the device."""
        dispatched, combined = zip(*(each.sent_to_ranks() for each in self._exchanges), strict=True)
        return [sum(parts) for parts in zip(*dispatched, strict=True)], [
            sum(parts) for parts in zip(*combined, strict=True)
        ]

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL) -> Dispatched:
        """See `Dispatcher`. Nobody looks at slots: one out of range is no choice; P may be room.

        Raises:
            ValueError: a bad argument; all other ranks get PeerRefused.
            RanksDisagree, PeerLost, DispatchTimeout: in normal mode; in low-latency mode `check` raises them, and
                PeerRefused too, where the host does not wait.
        """
        self._call += 1
        self._last = self._low_latency if mode.capacity else self._normal
        problem = dispatch_problem(x_TH, slots_TK, mode, self.device) or dtype_problem("x_TH", x_TH, STORED)
        if problem:
            self._refuse(problem)
        received = self._last.dispatch(x_TH.contiguous(), slots_TK.contiguous(), mode.capacity)
        (T, H), K = x_TH.shape, slots_TK.shape[1]
        handle = DispatchHandle(self._call, T, K, H, x_TH.dtype, received.num_pairs)
        return Dispatched(received.x_NH, received.row_P, received.slot_offsets, handle)

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, dispatched: Dispatched, *, out: Tensor | None = None
    ) -> Tensor:
        """See `Dispatcher`. Answers behind the last pair are not read."""
        handle = dispatched.handle
        problem = answers_problem(y_PH, weights_TK, out, handle, last_call=self._call, device=self.device)
        if problem:
            self._refuse(problem, is_combine=True)
        if out is None:
            out = y_PH.new_empty(handle.num_tokens, handle.hidden)
        self._last.combine(y_PH.contiguous(), weights_TK.float().contiguous(), out)
        return out

    def interrupt(self, error: DispatchError) -> None:
        """See `TokenDispatcher`."""
        for each in self._exchanges:
            each.interrupt(error)

    def check(self) -> None:
        """See `TokenDispatcher`."""
        for each in self._exchanges:
            each.check()

    def close(self) -> None:
        """See `TokenDispatcher`."""
        for each in self._exchanges:
            each.close()

    def _refuse(self, problem: str, *, is_combine: bool = False) -> NoReturn:
        """Tell all ranks, by what this call would have gone; collective."""
        self._last.refuse(problem, is_combine=is_combine)
        raise ValueError(problem)


class LocalPairs:
    """One rank's `PairExchange`: pairs are sorted and answers summed where they lie, and the host looks at nothing.

    After the first call of a size nothing is allocated, so that a CUDA graph can replay a step of any mode. Rows stay where
    they are: x_NH is x (rounded in new memory if rows travel in FP8), also where some tokens have no choice.

    Args:
        slots: S.
        device: of all tensors.
        is_fp8: round rows as if they travelled so, so that answers do not depend on the number of ranks.
    """

    is_replayable = True
    waited_ns = (0, 0)

    def __init__(self, slots: int, device: torch.device, *, is_fp8: bool) -> None:
        self._orders, self._is_fp8 = PairOrders(slots, device), is_fp8

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """See `PairExchange`."""
        return [0], [0]

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, capacity: int) -> "LocalPairs":
        """See `PairExchange`. Pairs are in room for T*K."""
        order = self._order = self._orders.order(slots_TK)
        self.row_P, self.slot_offsets, self.num_pairs = order.row_P, order.slot_offsets, slots_TK.numel()
        self.x_NH = fp8.dequantise_fp8(*fp8.quantise_fp8(x_TH), x_TH.dtype) if self._is_fp8 else x_TH
        return self

    def combine(self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor) -> None:
        """See `PairExchange`."""
        combine_pairs(y_PH, self._order.pair_of_choice_NK, weights_TK, out_TH)

    def refuse(self, problem: str, *, is_combine: bool = False) -> None:
        """See `PairExchange`. Nobody else is to be told."""

    def interrupt(self, error: DispatchError) -> None:
        """See `PairExchange`. Nothing waits."""

    def check(self) -> None:
        """See `PairExchange`. Nothing can go wrong."""

    def close(self) -> None:
        """See `PairExchange`. There is nothing to close."""
