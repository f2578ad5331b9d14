"""The seam between layout and wires: a wire exchanges one message of bytes per pair of ranks, and knows no
arithmetic, tokens or experts.

Messages live in windows. The sender asks for a window per destination and writes straight into it; after the
exchange the receiver reads each source's message where it lies. Shared memory so copies each byte once on each side,
as peer-mapped device memory would, and a message's counts travel in front of its rows in the same exchange.
Rejected: counts and then rows as two calls over tensors, which costs a second round trip and two more copies.

A window is an address, because kernels fill it, and a tensor of bytes for code in plain torch. Tables are int64
arrays with one entry per rank; this rank's own entry is not used (its rows never travel).

A rank whose caller's arguments are bad still meets the others: it sends a refusal in place of its messages, in the
same exchange, so that every rank gets a named error without a round trip more, and nobody waits.
"""

from typing import Any, NoReturn, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.buffers import AlignedBytes
from dispatch.errors import DispatchError, RanksDisagree

ALIGNMENT = 64
"""Of messages, in bytes."""
REFUSED = -1
"""Stands where a message's size is expected."""
MAX_REFUSAL_BYTES = 896
"""Longer texts are cut: a refusal must fit where any message fits."""


class RankTable:
    """An int64 per rank, with its address: numpy takes a microsecond to say it, which is asked for in every call."""

    __slots__ = ("address", "values")

    def __init__(self, world_size: int) -> None:
        self.values: Any = np.zeros(world_size, dtype=np.int64)
        self.address: int = self.values.ctypes.data


class Wire(Protocol):
    """One exchange at a time, in the same order on all ranks. Holds the only reference to a process group.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        epoch: membership epoch it belongs to; messages of another epoch cannot arrive.
        name: "local", "gloo", "shm" or "nccl".
        reason: one sentence on why this wire was chosen.
        device: where windows lie.
        send_addresses: int64 [R], where to write the message for each rank; set by `open_windows`.
        recv_addresses: int64 [R], where each rank's message lies; set by `exchange`.
        mask: int64 [R], 1 for a rank that this rank does without (DeepEP's polarity): nothing is sent to it (its
            window leads nowhere) and it is not waited for; its address is 0 and `received` is empty. The caller may
            write it between exchanges. Every rank has its own; between two ranks that are alive it should be set on
            both, or the other waits for its time-out. With `mask_lost` an exchange sets it where it would raise
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
        """Local. Make room for messages of `send_bytes` [R] and set `send_addresses` (64-byte aligned).

        Ends the life of the windows that the last exchange received.
        """
        ...

    def send_window(self, rank: int) -> Tensor:
        """Local. Return the open window for `rank` as uint8 [send_bytes]; empty for this rank itself."""
        ...

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """Collective. Send every window, wait for every peer's message, set `recv_addresses`.

        The same as `begin_exchange` and `finish_exchange` at once.

        Args:
            send_bytes: as given to `open_windows`.
            recv_bytes: int64 [R], the sizes to expect where the receiver knows them; None: they are found out.

        Raises:
            PeerRefused: a peer's arguments were bad; nothing was delivered to anybody, the next exchange works.
            PeerLost, DispatchTimeout: a peer did not send; this wire is then of no more use.
            RanksDisagree: a peer sent another number of bytes, or is at another exchange.
        """
        ...

    def begin_exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """Local. Start to send every window, without waiting for a peer.

        Neither windows nor tables may change, nor other windows be opened, until `finish_exchange`.
        """
        ...

    def finish_exchange(self) -> None:
        """Collective. Wait for what `begin_exchange` started. Raises as `exchange` does."""
        ...

    def received(self, rank: int) -> Tensor:
        """Local. Return the message from `rank` as uint8; empty for this rank itself and for a masked one.

        It lies where `recv_addresses` says and lives until the next `open_windows`.
        """
        ...

    def refuse(self, text: str) -> None:
        """Collective, in place of `open_windows` and one `exchange`: this rank's arguments are bad.

        Every other rank's exchange raises PeerRefused (of the lowest rank that refused) with this text. Returns when
        all have met; the caller then raises its own error. A call that takes several exchanges refuses in the first.

        Args:
            text: what was wrong; cut after MAX_REFUSAL_BYTES.

        Raises:
            PeerLost, DispatchTimeout, RanksDisagree: as `exchange`.
        """
        ...

    def interrupt(self, error: DispatchError) -> None:
        """Local; from any thread. End with `error` what this rank waits for, now or next; the wire is then of no more use.

        Shared memory ends within a tenth of a second. gloo ends when a peer's connection does, and then with this error.
        """
        ...

    def close(self) -> None:
        """Local. Release what it holds and let waiting peers know. May be called twice.

        A tensor that was handed out keeps its memory alive, but is not to be read any more.
        """
        ...


class HostWire(Wire):
    """What wires between processes have alike on a CPU."""

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, *, epoch: int, reason: str) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.epoch, self.reason = epoch, reason
        self._number = 0  # of the last exchange begun
        self.send_addresses, self.recv_addresses = RankTable(self.world_size), RankTable(self.world_size)
        self.mask = RankTable(self.world_size)
        self._sent, self._found = RankTable(self.world_size), RankTable(self.world_size)
        self._expected: RankTable | None = None
        self._outgoing, self._incoming = AlignedBytes(), AlignedBytes()

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """See `Wire`."""
        self.begin_exchange(send_bytes, recv_bytes)
        self.finish_exchange()

    def _refuse_size(self, peer: int) -> NoReturn:
        assert self._expected is not None, "sizes were checked against none"
        found, expected = int(self._found.values[peer]), int(self._expected.values[peer])
        raise RanksDisagree(f"rank {peer} sent {found} bytes where rank {self.rank} expects {expected}")


def fitting_share(total_bytes: int, num_parts: int, smallest: int, largest: int) -> int:
    """Return the largest size with which so many parts stay within a total, within the limits."""
    share = total_bytes // max(1, num_parts) // ALIGNMENT * ALIGNMENT
    return max(smallest, min(largest, share))


def encode_refusal(text: str, max_bytes: int = MAX_REFUSAL_BYTES) -> bytes:
    """Write a refusal as bytes, cut to what fits."""
    return text.encode()[: min(max_bytes, MAX_REFUSAL_BYTES)]


def decode_refusal(content: bytes) -> str:
    """Read what `encode_refusal` wrote; half a character at the cut is dropped."""
    return content.decode(errors="ignore")
