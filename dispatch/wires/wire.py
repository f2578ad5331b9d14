"""Interface of wires: a wire exchanges one message of bytes per pair of ranks. It does not know tokens or experts.

Messages are in windows. The sender opens a window per destination and writes directly into it; after the
exchange the receiver reads each source's message in place. So shared memory copies each byte once on each side,
as peer-mapped device memory would, and a message's counts travel before its rows in the same exchange.
Rejected: counts and then rows as two calls over tensors, which costs a second round trip and two more copies.

A window is an address, for the kernels that fill it, and a tensor of bytes, for code in plain torch. Tables are int64
arrays with one entry per rank; this rank's own entry is not used (its rows do not travel).

A rank with bad arguments still takes part: it sends a refusal in place of its messages, in the same exchange. So every
rank gets a named error without an extra round trip, and no rank waits for its messages.
"""

from typing import Any, NoReturn, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.buffers import AlignedBytes
from dispatch.errors import DispatchError, RanksDisagree

ALIGNMENT = 64
"""Alignment of messages, in bytes."""
REFUSED = -1
"""Sent in place of a message's size."""
MAX_REFUSAL_BYTES = 896
"""Longer texts are cut: a refusal must fit in every window."""


class RankTable:
    """An int64 per rank, with its address, which every call needs: numpy takes a microsecond to return it."""

    __slots__ = ("address", "values")

    def __init__(self, world_size: int) -> None:
        self.values: Any = np.zeros(world_size, dtype=np.int64)
        self.address: int = self.values.ctypes.data


class Wire(Protocol):
    """Runs one exchange at a time, in the same order on all ranks. Holds the only reference to a process group.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        epoch: Membership epoch of the wire; messages of another epoch cannot arrive.
        name: "local", "gloo", "shm" or "nccl".
        reason: Why this wire was chosen, in one sentence.
        device: Device of the windows.
        send_addresses: int64 [R], address to write each rank's message to; set by `open_windows`.
        recv_addresses: int64 [R], address of each rank's message; set by `exchange`.
        mask: int64 [R], 1 for a rank that this rank ignores (as in DeepEP): nothing is sent to it (its
            window is discarded) and it is not waited for; its address is 0 and `received` is empty. The caller may
            write it between exchanges. Every rank has its own. Between two live ranks, set it on both: otherwise the
            other one waits until its timeout. With `mask_lost`, an exchange sets it instead of raising
            PeerLost or DispatchTimeout.
    """

    rank: int
    world_size: int
    epoch: int
    name: str
    reason: str
    device: torch.device
    send_addresses: RankTable
    recv_addresses: RankTable
    mask: RankTable

    def open_windows(self, send_bytes: RankTable) -> None:
        """Make room for messages of `send_bytes` [R] and set `send_addresses` (64-byte aligned). Local.

        The windows that the last exchange received become invalid.
        """

    def send_window(self, rank: int) -> Tensor:
        """Return the open window for `rank` as uint8 [send_bytes]; empty for this rank itself. Local."""

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """Send every window, wait for every peer's message, set `recv_addresses`. Collective.

        Runs `begin_exchange` and `finish_exchange`.

        Args:
            send_bytes: As passed to `open_windows`.
            recv_bytes: int64 [R], the expected sizes. None accepts any size.

        Raises:
            PeerRefused: A peer's arguments were bad; nothing was delivered to any rank, and the next exchange works.
            PeerLost, DispatchTimeout: A peer did not send; this wire can no longer be used.
            RanksDisagree: A peer sent another number of bytes, or is at another exchange.
        """

    def begin_exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """Start to send every window, without waiting for a peer. Local.

        Until `finish_exchange`, windows and tables must not change and no other windows may be opened.
        """

    def finish_exchange(self) -> None:
        """Wait for the exchange that `begin_exchange` started. Collective. Raises as `exchange`."""

    def received(self, rank: int) -> Tensor:
        """Return the message from `rank` as uint8; empty for this rank itself and for a masked one. Local.

        It is at the address in `recv_addresses` and lives until the next `open_windows`.
        """

    def refuse(self, text: str) -> None:
        """Refuse a call because this rank's arguments are bad, in place of `open_windows` and one `exchange`. Collective.

        Every other rank's exchange raises PeerRefused (for the lowest rank that refused) with this text. Returns when
        all ranks have it; the caller then raises its own error. A call of several exchanges refuses in the first.

        Args:
            text: What was wrong; cut after MAX_REFUSAL_BYTES.

        Raises:
            PeerLost, DispatchTimeout, RanksDisagree: As `exchange`.
        """

    def interrupt(self, error: DispatchError) -> None:
        """Make this rank's current or next wait raise `error`; the wire cannot be used afterwards. Local; any thread.

        Shared memory stops waiting within 0.1 s. gloo stops when a peer's connection closes, and then raises this error.
        """

    def close(self) -> None:
        """Release all resources and wake waiting peers. Local; may be called twice.

        A returned tensor keeps its memory alive, but must not be read any more.
        """


class HostWire(Wire):
    """Common part of wires between processes on CPUs."""

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, *, epoch: int, reason: str) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.epoch, self.reason = epoch, reason
        self._number = 0  # number of the last exchange begun
        self.send_addresses, self.recv_addresses = RankTable(self.world_size), RankTable(self.world_size)
        self.mask = RankTable(self.world_size)
        self._sent, self._found = RankTable(self.world_size), RankTable(self.world_size)
        self._expected: RankTable | None = None
        self._outgoing, self._incoming = AlignedBytes(), AlignedBytes()

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        self.begin_exchange(send_bytes, recv_bytes)
        self.finish_exchange()

    def _refuse_size(self, peer: int) -> NoReturn:
        assert self._expected is not None, "there were expected sizes to compare with"
        found, expected = int(self._found.values[peer]), int(self._expected.values[peer])
        raise RanksDisagree(f"rank {peer} sent {found} bytes but rank {self.rank} expects {expected}")


def fitting_share(total_bytes: int, num_parts: int, smallest: int, largest: int) -> int:
    """Return the largest size, within the limits, with which `num_parts` parts fit into a total."""
    share = total_bytes // max(1, num_parts) // ALIGNMENT * ALIGNMENT
    return max(smallest, min(largest, share))


def encode_refusal(text: str, max_bytes: int = MAX_REFUSAL_BYTES) -> bytes:
    """Encode a refusal as bytes, cut to the maximum size."""
    return text.encode()[: min(max_bytes, MAX_REFUSAL_BYTES)]


def decode_refusal(content: bytes) -> str:
    """Decode the result of `encode_refusal`. A character that was cut in half is dropped."""
    return content.decode(errors="ignore")
