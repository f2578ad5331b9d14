"""The result of a dispatch, and the interface that the MoE layer needs of every dispatcher.

Legend: N rows received, H hidden, P pairs, S slots per rank.
"""

from collections.abc import Callable
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from dispatch.errors import DispatchError
from dispatch.mode import NORMAL, Mode

# Raises errors of calls that returned before they were known: PeerRefused, RanksDisagree, DispatchTimeout.
Check = Callable[[], None]
Launches = Callable[[], None]  # launches work on a device


def no_errors() -> None:
    """A `Check` of calls that raise their own errors."""


def nothing() -> None:
    """Launch nothing."""


class DispatchHandle(NamedTuple):
    """What combine needs to know about its dispatch. Valid until the next dispatch of the same Dispatcher."""

    call: int
    num_tokens: int
    num_choices: int
    hidden: int
    dtype: torch.dtype
    num_pairs: int


class Dispatched(NamedTuple):
    """What a rank received. The next dispatch overwrites every tensor; callers must not write to them.

    On a GPU, if the host does not count pairs, P is the room for pairs (`handle.num_pairs`). There are
    `slot_offsets[S]` pairs, and rows without a pair are undefined.
    """

    x_NH: Tensor  # received rows, contiguous, one per (token, this rank), ordered by source rank, then source token
    row_P: Tensor  # int64: the row of each pair, pairs ordered by local slot, then source rank, token, choice
    slot_offsets: Tensor  # int64 [S+1]: the pairs of local slot s are [offsets[s], offsets[s+1])
    handle: DispatchHandle
    # int64: the labels of the rows, if they were sent; undefined for rows without a pair
    label_N: Tensor | None = None


class Waits(NamedTuple):
    """Time that a rank has spent in exchanges, for peers and for wires, in nanoseconds. Counters."""

    dispatch_ns: int
    combine_ns: int
    wire_ns: int = 0  # lower bound of the wires' share of both; 0 if unknown


class Exchanges(NamedTuple):
    """Number of a rank's exchanges, dispatches and combines together. `begun` is ahead while it waits for peers."""

    begun: int  # incremented before the rank waits for peers
    ended: int


class Traffic(NamedTuple):
    """Bytes that a rank has sent to other ranks, including headers and unused room."""

    dispatch_bytes: int
    combine_bytes: int


class TokenDispatcher(Protocol):
    """Interface of `Dispatcher` and of dispatchers that use other transports and return the same bits.

    Attributes:
        world_size: Number of ranks.
        name, reason: The wire or wires, and why they were chosen.
        row_format: Description of the format of rows on the wire.
        is_replayable: Whether low-latency calls may be captured in a CUDA graph.
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
        """Time spent in exchanges so far."""

    @property
    def exchanges(self) -> Exchanges:
        """Exchanges so far; (0, 0) if the host does not count them. May be read from any thread."""

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """Return the bytes sent to each rank so far, by dispatches and by combines."""

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL) -> Dispatched: ...

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, dispatched: Dispatched, *, out: Tensor | None = None
    ) -> Tensor: ...

    def begin_check(self) -> Check:
        """Begin to check the calls so far. Local; does not wait.

        Returns:
            Call it before results are used. On a GPU it waits for these calls, not for later ones.
        """

    def interrupt(self, error: DispatchError) -> None:
        """Make this rank's current or next wait raise `error`. Local; may be called from any thread.

        Waits of gloo end when the peer's connections close. All others end within 0.1 s.
        """

    def close(self) -> None: ...


class UnconnectedDispatcher:
    """Placeholder for the dispatcher of a rank that is built before it joins the others. It moves nothing."""

    name, reason, row_format = "nothing", "this rank joins the others later", "not at all"
    is_replayable = False
    waits, exchanges = Waits(0, 0), Exchanges(0, 0)

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        return [0] * self.world_size, [0] * self.world_size

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL) -> Dispatched:
        self._refuse()

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, dispatched: Dispatched, *, out: Tensor | None = None
    ) -> Tensor:
        self._refuse()

    def begin_check(self) -> Check:
        """There were no calls."""
        return no_errors

    def interrupt(self, error: DispatchError) -> None:
        """Do nothing: this rank waits for no peer."""

    def close(self) -> None:
        """Do nothing: there is no wire."""

    def _refuse(self) -> NoReturn:
        raise DispatchError("this rank has not joined the others yet")
