"""The seam between layout and wires: a transport exchanges one message of bytes per pair of ranks, and knows no
arithmetic, tokens or experts.

Messages live in windows. The sender asks for a window per destination and writes straight into it; after the
exchange the receiver reads each source's message where it lies. Shared memory so copies each byte once on each side,
as peer-mapped device memory would, and a message's counts travel in front of its rows in the same exchange.
Rejected: counts and then rows as two calls over tensors, which costs a second round trip and two more copies.

A window is an address, because kernels fill it. Tables are int64 arrays with one entry per rank; this rank's own
entry is not used (its rows never travel).
"""

from typing import Any, Protocol

import numpy as np


class RankTable:
    """An int64 per rank, with its address: numpy takes a microsecond to say it, which is asked for in every call."""

    __slots__ = ("address", "values")

    def __init__(self, world_size: int) -> None:
        self.values: Any = np.zeros(world_size, dtype=np.int64)
        self.address: int = self.values.ctypes.data


class Transport(Protocol):
    """One exchange at a time, in the same order on all ranks. Holds the only reference to a process group.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        epoch: membership epoch it belongs to; messages of another epoch cannot arrive.
        name: "local", "gloo" or "shm".
        reason: one sentence on why this transport was chosen.
        send_addresses: int64 [R], where to write the message for each rank; set by `open_windows`.
        recv_addresses: int64 [R], where each rank's message lies; set by `exchange`.
    """

    rank: int
    world_size: int
    epoch: int
    name: str
    reason: str
    send_addresses: RankTable
    recv_addresses: RankTable

    def open_windows(self, send_bytes: RankTable) -> None:
        """Local. Make room for messages of `send_bytes` [R] and set `send_addresses` (64-byte aligned).

        Ends the life of the windows that the last exchange received.
        """
        ...

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """Collective. Send every window, wait for every peer's message, set `recv_addresses`.

        Args:
            send_bytes: as given to `open_windows`.
            recv_bytes: int64 [R], the sizes to expect where the receiver knows them; None: they are found out.

        Raises:
            PeerLost, DispatchTimeout: a peer did not send; this transport is then of no more use.
            RanksDisagree: a peer sent another number of bytes, or is at another exchange.
        """
        ...

    def close(self) -> None:
        """Local. Release what it holds and let waiting peers know. May be called twice."""
        ...
