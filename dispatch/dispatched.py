"""What a dispatch returns and what the MoE layer asks of a dispatcher, whichever way tokens go.

Legend: N rows received, H hidden, P pairs, S slots per rank.
"""

from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from dispatch.errors import DispatchError
from dispatch.mode import NORMAL, Mode


class DispatchHandle(NamedTuple):
    """What combine needs of its dispatch. Valid until the next dispatch of the same Dispatcher."""

    call: int
    num_tokens: int
    num_choices: int
    hidden: int
    dtype: torch.dtype
    num_pairs: int


class Dispatched(NamedTuple):
    """What a rank received. Every tensor is overwritten by the next dispatch; none may be written to.

    On a GPU whose host does not count, P is room for pairs (`handle.num_pairs`): there are `slot_offsets[S]`, and rows
    that no pair names are undefined.
    """

    x_NH: Tensor  # received rows, contiguous, one per (token, this rank), ordered by source rank, then source token
    row_P: Tensor  # int64: the row of each pair, pairs ordered by local slot, then source rank, token, choice
    slot_offsets: Tensor  # int64 [S+1]: the pairs of local slot s are [offsets[s], offsets[s+1])
    handle: DispatchHandle


class Waits(NamedTuple):
    """Nanoseconds that a rank spent in exchanges so far: waiting for peers, and for wires. Counters."""

    dispatch_ns: int
    combine_ns: int
    wire_ns: int = 0  # of both, at least so much for wires; 0 where that is not known


class Exchanges(NamedTuple):
    """Counts of a rank's exchanges, of dispatches and combines alike: equal where it does not wait for others."""

    begun: int  # raised before peers are waited for
    ended: int


class Traffic(NamedTuple):
    """Bytes that a rank gave its wire for other ranks, headers and unused room included."""

    dispatch_bytes: int
    combine_bytes: int


class TokenDispatcher(Protocol):
    """What the service needs: `Dispatcher`, or one that goes another way with the same bits.

    Attributes:
        world_size: number of ranks.
        name: the wire, or both; reason: why it was taken.
        row_format: how rows travel, in words.
        is_replayable: whether low-latency calls may be captured in a CUDA graph.
    """

    @property
    def world_size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def row_format(self) -> str: ...
    @property
    def is_replayable(self) -> bool: ...
    @property
    def waits(self) -> Waits:
        """Time in exchanges so far."""
        ...

    @property
    def exchanges(self) -> Exchanges:
        """Exchanges so far; (0, 0) where the host does not know. May be read from any thread."""
        ...

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """Return the bytes sent to each rank so far, by dispatches and by combines."""
        ...

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL) -> Dispatched:
        """See `Dispatcher`."""
        ...

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, dispatched: Dispatched, *, out: Tensor | None = None
    ) -> Tensor:
        """See `Dispatcher`."""
        ...

    def check(self) -> None:
        """Raise what went wrong in calls that did not wait to say so, before their results are used. Local.

        On the CPU every call says so itself; on a GPU this waits for the device.

        Raises:
            PeerRefused, RanksDisagree, DispatchTimeout.
        """
        ...

    def interrupt(self, error: DispatchError) -> None:
        """End with `error` what this rank waits for, now or next. Local; from any thread.

        gloo's waits end when the peer's connections do; all others within a tenth of a second.
        """
        ...

    def close(self) -> None:
        """See `Dispatcher`."""
        ...


class UnconnectedDispatcher:
    """Stands where a dispatcher will be while a rank is built that meets the others later. It moves nothing."""

    name, reason, row_format = "nothing", "this rank is to meet the others later", "not at all"
    is_replayable = False
    waits, exchanges = Waits(0, 0), Exchanges(0, 0)

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """See `TokenDispatcher`."""
        return [0] * self.world_size, [0] * self.world_size

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL) -> Dispatched:
        """Refuse."""
        self._refuse()

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, dispatched: Dispatched, *, out: Tensor | None = None
    ) -> Tensor:
        """Refuse."""
        self._refuse()

    def check(self) -> None:
        """See `TokenDispatcher`. Nothing went wrong."""

    def interrupt(self, error: DispatchError) -> None:
        """See `TokenDispatcher`. Nobody is waited for."""

    def close(self) -> None:
        """See `TokenDispatcher`. Nobody waits."""

    def _refuse(self) -> NoReturn:
        raise DispatchError("this rank has not met the others yet")
