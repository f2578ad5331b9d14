"""The service's dispatcher between device tensors. The mode in the lock-step header selects each step's transport.

Decode steps use low-latency kernels: the host neither waits for them nor counts. Steps with prompts use an exchange with
sizes that the host knows. Both give the pairs and the bits of `Dispatcher`. One rank, and ranks without memory that
kernels can write to, use one exchange for all steps.

Legend: T tokens, K choices, H hidden, N rows received, P pairs, S slots per rank.
"""

from typing import NoReturn, Protocol

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.arguments import answers_problem, dispatch_problem, dtype_problem
from dispatch.dispatched import (
    Check,
    Dispatched,
    DispatchHandle,
    Exchanges,
    Launches,
    Waits,
    no_errors,
    nothing,
)
from dispatch.errors import DispatchError
from dispatch.gpu.kernels.casts import STORED
from dispatch.gpu.kernels.ordering import ExpertChoices
from dispatch.gpu.kernels.pairs import PairOrders, PairsOnDevice, combine_pairs
from dispatch.mode import NORMAL, Mode


class ReceivedPairs(Protocol):
    """What a rank received. The next dispatch overwrites it.

    Attributes:
        x_NH: Rows, contiguous; rows without a pair are undefined.
        row_P: int64 [num_pairs], the row of each pair. slot_offsets: int64 [S+1].
        num_pairs: Length of `row_P` and of the answers: the pairs, or their maximum if the host does not count them.
        label_N: int64, the labels of the rows; undefined for rows without a pair. None if none were sent.
    """

    @property
    def x_NH(self) -> Tensor: ...
    @property
    def row_P(self) -> Tensor: ...
    @property
    def slot_offsets(self) -> Tensor: ...
    @property
    def num_pairs(self) -> int: ...
    @property
    def label_N(self) -> Tensor | None: ...


class PairExchange(Protocol):
    """Moves tokens to their chosen slots, and answers back. Calls are collective, in the same order on all ranks.
    The caller checks the arguments.

    Attributes:
        waited_ns: Waits of dispatches and of combines until the last check. Reading it does not wait for the device.
        is_replayable: Whether calls may be captured in a CUDA graph.
    """

    is_replayable: bool

    @property
    def waited_ns(self) -> tuple[int, int]: ...

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """Return the bytes sent to each rank so far, by dispatches and by combines. May wait for the device."""

    def dispatch(
        self,
        x_TH: Tensor,
        slots_TK: Tensor,
        capacity: int,
        meanwhile: Launches = nothing,
        label_T: Tensor | None = None,
    ) -> ReceivedPairs:
        """Send each token once to every rank that holds one of its choices.

        Args:
            x_TH: [T, H], contiguous. slots_TK: int64, contiguous; a value that is not a slot is no choice.
            capacity: Most tokens of any rank; 0 for no limit.
            meanwhile: Launches other work of this rank, which runs while rows travel. Called once.
            label_T: int64, a number from -1 to `pairs.MOST_LABEL` that travels with each token. Given on all ranks or none.
        """

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor, added_TH: Tensor | None = None
    ) -> None:
        """Bring the answers of the last dispatch back and sum them in the order of the choices.

        Args:
            y_PH: [num_pairs, H], contiguous. weights_TK: bfloat16, float16 or float32, contiguous. out_TH: contiguous.
            added_TH: Added to the rounded sums, with one more rounding; contiguous, in the type of y_PH.
        """

    def refuse(self, problem: str, *, is_combine: bool = False) -> None:
        """Refuse one call because its arguments are bad; the caller raises the error."""

    def interrupt(self, error: DispatchError) -> None:
        """Make current and later waits for peers raise this error. Local; may be called from any thread."""

    def begin_check(self) -> Check:
        """Begin to check the calls so far, as `TokenDispatcher.begin_check`."""

    def close(self) -> None:
        """Release all resources. Local."""


class DeviceDispatcher:
    """`TokenDispatcher` between device tensors. Calls are collective, in the same order on all ranks.

    Args:
        normal: Exchange of normal mode. This object owns both exchanges, and `close` closes them.
        low_latency: Exchange of low-latency steps (default: `normal`).
        world_size: Number of ranks.
        device: Device of all tensors.
        row_format: Description of the format of rows on the wire.
        name, reason: The backend, and why it was chosen.
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
        """Waits until the last check."""
        return Waits(
            *(sum(parts) for parts in zip(*(each.waited_ns for each in self._exchanges), strict=True))
        )

    @property
    def exchanges(self) -> Exchanges:
        """Zero: the host does not count exchanges."""
        return Exchanges(0, 0)

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """This call waits for the device."""
        dispatched, combined = zip(*(each.sent_to_ranks() for each in self._exchanges), strict=True)
        return [sum(parts) for parts in zip(*dispatched, strict=True)], [
            sum(parts) for parts in zip(*combined, strict=True)
        ]

    def dispatch(
        self,
        x_TH: Tensor,
        slots_TK: Tensor,
        mode: Mode = NORMAL,
        meanwhile: Launches = nothing,
        label_T: Tensor | None = None,
    ) -> Dispatched:
        """Dispatch as `Dispatcher.dispatch`. Slots are not checked: a slot out of range is no choice. P may be room.

        Args:
            meanwhile, label_T: See `PairExchange.dispatch`.

        Raises:
            ValueError: An argument is bad; all other ranks get PeerRefused.
            RanksDisagree, PeerLost, DispatchTimeout: In normal mode. In low-latency mode, if the host does not wait,
                `begin_check` raises them and PeerRefused.
        """
        self._call += 1
        self._last = self._low_latency if mode.capacity else self._normal
        problem = dispatch_problem(x_TH, slots_TK, mode, self.device) or dtype_problem("x_TH", x_TH, STORED)
        if problem:
            self._refuse(problem)
        received = self._last.dispatch(
            x_TH.contiguous(), slots_TK.contiguous(), mode.capacity, meanwhile, label_T
        )
        return self._dispatched(x_TH, slots_TK, received)

    @property
    def takes_experts(self) -> bool:
        """Whether `dispatch_experts` may be called: there is one rank."""
        return isinstance(self._normal, LocalPairs)

    def dispatch_experts(
        self, x_TH: Tensor, choices: ExpertChoices, label_T: Tensor | None = None
    ) -> Dispatched:
        """Dispatch to the slots of chosen experts, and count the choices; on one rank. P is room.

        Args:
            x_TH: [T, H]. choices: See `ExpertChoices`; ids int64 [T, K].
            label_T: See `PairExchange.dispatch`.

        Raises:
            ValueError: An argument is bad.
        """
        assert isinstance(self._normal, LocalPairs), "experts of several ranks have no order on one of them"
        self._call += 1
        self._last = self._normal
        problem = dispatch_problem(x_TH, choices.ids_TK, NORMAL, self.device)
        if problem := problem or dtype_problem("x_TH", x_TH, STORED):
            self._refuse(problem)
        received = self._normal.dispatch_experts(x_TH.contiguous(), choices, label_T)
        return self._dispatched(x_TH, choices.ids_TK, received)

    def _dispatched(self, x_TH: Tensor, choices_TK: Tensor, received: ReceivedPairs) -> Dispatched:
        (T, H), K = x_TH.shape, choices_TK.shape[1]
        handle = DispatchHandle(self._call, T, K, H, x_TH.dtype, received.num_pairs)
        return Dispatched(received.x_NH, received.row_P, received.slot_offsets, handle, received.label_N)

    def combine(
        self,
        y_PH: Tensor,
        weights_TK: Tensor,
        dispatched: Dispatched,
        *,
        out: Tensor | None = None,
        added_TH: Tensor | None = None,
    ) -> Tensor:
        """Combine as `Dispatcher.combine`. Answers after the last pair are not read.

        Args:
            added_TH: Added to the result; contiguous, of its shape and type.
        """
        handle = dispatched.handle
        problem = answers_problem(y_PH, weights_TK, out, handle, last_call=self._call, device=self.device)
        if problem:
            self._refuse(problem, is_combine=True)
        if out is None:
            out = y_PH.new_empty(handle.num_tokens, handle.hidden)
        # The kernels of sums widen weights, so a router's weights need no cast.
        weights_TK = weights_TK if weights_TK.dtype in STORED else weights_TK.float()
        self._last.combine(y_PH.contiguous(), weights_TK.contiguous(), out, added_TH)
        return out

    def interrupt(self, error: DispatchError) -> None:
        for each in self._exchanges:
            each.interrupt(error)

    def begin_check(self) -> Check:
        checks = [each.begin_check() for each in self._exchanges]

        def check() -> None:
            for each in checks:
                each()

        return check

    def close(self) -> None:
        for each in self._exchanges:
            each.close()

    def _refuse(self, problem: str, *, is_combine: bool = False) -> NoReturn:
        """Refuse the call on all ranks, through the call's exchange. Collective."""
        self._last.refuse(problem, is_combine=is_combine)
        raise ValueError(problem)


class LocalPairs:
    """`PairExchange` of one rank: pairs are sorted and answers summed in place, and the host reads nothing.

    After the first call of a size nothing is allocated, so a CUDA graph can replay a step of any mode. Rows are not
    copied: x_NH is x (rounded in new memory if rows travel in FP8), even if some tokens have no choice.

    Args:
        slots: S.
        device: Device of all tensors.
        is_fp8: Whether to round rows as FP8 on the wire would. Then answers do not depend on the number of ranks.
    """

    is_replayable = True
    waited_ns = (0, 0)

    def __init__(self, slots: int, device: torch.device, *, is_fp8: bool) -> None:
        self._orders, self._is_fp8 = PairOrders(slots, device), is_fp8

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        return [0], [0]

    def dispatch(
        self,
        x_TH: Tensor,
        slots_TK: Tensor,
        capacity: int,
        meanwhile: Launches = nothing,
        label_T: Tensor | None = None,
    ) -> "LocalPairs":
        """Return room for T*K pairs."""
        meanwhile()
        return self._received(x_TH, self._orders.order(slots_TK), label_T)

    def dispatch_experts(
        self, x_TH: Tensor, choices: ExpertChoices, label_T: Tensor | None = None
    ) -> "LocalPairs":
        """Return room for T*K pairs."""
        return self._received(x_TH, self._orders.order_experts(choices), label_T)

    def _received(self, x_TH: Tensor, order: PairsOnDevice, label_T: Tensor | None) -> "LocalPairs":
        self._order, self.label_N = order, label_T
        self.row_P, self.slot_offsets, self.num_pairs = order.row_P, order.slot_offsets, len(order.row_P)
        self.x_NH = fp8.dequantise_fp8(*fp8.quantise_fp8(x_TH), x_TH.dtype) if self._is_fp8 else x_TH
        return self

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor, added_TH: Tensor | None = None
    ) -> None:
        combine_pairs(y_PH, self._order.pair_of_choice_NK, weights_TK, out_TH, added_TH)

    def refuse(self, problem: str, *, is_combine: bool = False) -> None:
        """Do nothing: there is no other rank."""

    def interrupt(self, error: DispatchError) -> None:
        """Do nothing: there are no waits."""

    def begin_check(self) -> Check:
        return no_errors

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
