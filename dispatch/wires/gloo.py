"""torch.distributed with gloo: works if ranks can connect to each other.

One all-to-all per exchange. `gloo_parts` describes the layout of messages in it; neither side needs to know the other's
sizes. If a message is longer than a part, the rest follows between the two ranks, after all know that no rank refused.
With `mask_lost` there is one send and receive per peer, because an all-to-all fails on all ranks when one dies; see
`gloo_sends`.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.buffers import AlignedBytes
from dispatch.compiled.native import compile_all
from dispatch.errors import DispatchError, PeerRefused, RanksDisagree
from dispatch.wires import gloo_parts as parts
from dispatch.wires.gloo_sends import PeerByPeer, Together
from dispatch.wires.wire import ALIGNMENT, HostWire, RankTable, decode_refusal, encode_refusal, fitting_share

MAX_PART_BYTES = 16 << 20
MIN_PART_BYTES = 1 << 20
MIN_REGION_BYTES = 1024  # a refusal must fit
INCOMING_BYTES = 256 << 20  # bound of the address space of all parts, unless MIN_PART_BYTES each is more
_NO_REFUSAL = -1


class GlooWire(HostWire):
    """`Wire` over gloo. `group` is a gloo group that runs no other collective at the same time."""

    name = "gloo"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float,
        epoch: int,
        reason: str,
        region_bytes: int | None = None,
        mask_lost: bool = False,
    ) -> None:
        super().__init__(group, epoch=epoch, reason=reason)
        self._part_bytes = region_bytes or fitting_part_bytes(self.world_size)
        self._lengths = RankTable(self.world_size)
        incoming_bytes = (self.world_size - 1) * self._part_bytes
        self._incoming.reserve(incoming_bytes)
        self._large = {peer: AlignedBytes() for peer in range(self.world_size)}  # longer than a part
        compile_all(*parts.KERNELS)
        self._place = (self.world_size, self.rank, self._part_bytes, self.mask.address)
        sends: type[PeerByPeer] | type[Together] = PeerByPeer if mask_lost else Together
        incoming = self._incoming.memory[:incoming_bytes]
        self._sends: PeerByPeer | Together | None = sends(
            group, incoming, self._part_bytes, self.mask, timeout_s=timeout_s
        )

    def open_windows(self, send_bytes: RankTable) -> None:
        self._open_windows(send_bytes, _NO_REFUSAL)

    def send_window(self, rank: int) -> Tensor:
        if rank == self.rank:
            return self._outgoing.memory[:0]
        first = int(self.send_addresses.values[rank]) - self._outgoing.address
        return self._outgoing.memory[first : first + int(self._sent.values[rank])]

    def begin_exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        self._expected = recv_bytes
        self._begin()

    def finish_exchange(self) -> None:
        expected = 0 if self._expected is None else self._expected.address
        longest = self._finish(expected)
        if longest < 0:
            self._raise_for(longest)
        if longest > self._part_bytes or max(self._split) > self._part_bytes:
            self._exchange_rests()

    def received(self, rank: int) -> Tensor:
        address = int(self.recv_addresses.values[rank])
        if address == 0:
            return self._incoming.memory[:0]
        place = self._incoming if address == self._part_at(rank) else self._large[rank]
        first = address - place.address
        return place.memory[first : first + int(self._found.values[rank])]

    def refuse(self, text: str) -> None:
        content = torch.tensor(list(encode_refusal(text)), dtype=torch.uint8)
        sizes = RankTable(self.world_size)
        sizes.values[:] = content.numel()
        self._open_windows(sizes, content.numel())
        for peer in range(self.world_size):
            if peer != self.rank:
                self.send_window(peer).copy_(content)
        self._begin()
        longest = self._finish(0)
        if longest < 0 and (-1 - longest) // self.world_size == parts.OUT_OF_STEP:
            self._raise_for(longest)

    def interrupt(self, error: DispatchError) -> None:
        if self._sends is not None:
            self._sends.interruption = error

    def close(self) -> None:
        """Release the group. Its owner destroys it; it can end then because this wire keeps no reference to it."""
        sends, self._sends = self._sends, None
        if sends is not None:
            sends.close()

    def _open_windows(self, send_bytes: RankTable, text_bytes: int) -> None:
        if self._sends is None:
            raise DispatchError("the wire is closed")
        total = self._place_messages(send_bytes, text_bytes)
        if total > self._outgoing.capacity:
            self._outgoing.reserve(total)
            self._place_messages(send_bytes, text_bytes)
        self._sent = send_bytes

    def _place_messages(self, send_bytes: RankTable, text_bytes: int) -> int:
        return parts.place_messages(
            *self._place, send_bytes.address, self._outgoing.address, self._outgoing.capacity,
            self._number + 1, self.epoch, text_bytes, self.send_addresses.address, self._lengths.address,
        )  # fmt: skip

    def _begin(self) -> None:
        assert self._sends is not None, "open_windows comes first"
        self._number += 1
        self._split: list[int] = self._lengths.values.tolist()
        self._sends.start(self._outgoing.memory, self._split)

    def _finish(self, expected: int) -> int:
        """Wait for the parts and find the messages in them. Returns the result of `find_messages`."""
        assert self._sends is not None, "begin_exchange comes first"
        self._sends.finish()
        return parts.find_messages(
            *self._place, self._incoming.address, self._number, self.epoch, expected,
            self._found.address, self.recv_addresses.address,
        )  # fmt: skip

    def _part_at(self, peer: int) -> int:
        """Return the address of the message from `peer`, if it is not longer than a part."""
        index = peer - (peer > self.rank)
        return self._incoming.address + index * self._part_bytes + parts.PREFIX_BYTES

    def _exchange_rests(self) -> None:
        """Exchange the rests of messages that are longer than a part."""
        assert self._sends is not None, "begin_exchange comes first"
        part, at, sends, receives = self._part_bytes, 0, [], []
        for peer, length in enumerate(self._split):
            if length > part:
                sends.append((peer, self._outgoing.memory[at + part : at + length]))
            at += length
            size = int(self._found.values[peer])
            if size > part - parts.PREFIX_BYTES:
                receives.append((peer, self._make_room(peer, size)))
        self._sends.exchange_rests(sends, receives)
        self.recv_addresses.values[self.mask.values != 0] = 0

    def _make_room(self, peer: int, size: int) -> Tensor:
        """Move the first part of a long message to separate memory. Return the memory for its rest."""
        large, first = self._large[peer], self.received(peer)[: self._part_bytes - parts.PREFIX_BYTES]
        large.reserve(size + ALIGNMENT)
        large.memory[: first.numel()] = first
        self.recv_addresses.values[peer] = large.address
        # The rest includes the message's padding.
        rest_bytes = -(-size // ALIGNMENT) * ALIGNMENT - first.numel()
        return large.memory[first.numel() : first.numel() + rest_bytes]

    def _raise_for(self, problem: int) -> None:
        """Raise the error for a negative result of `find_messages`."""
        kind, peer = divmod(-1 - problem, self.world_size)
        if kind == parts.REFUSAL:
            raise PeerRefused(peer, decode_refusal(self.received(peer).numpy().tobytes()))
        if kind == parts.OUT_OF_STEP:
            found, epoch = int(self._found.values[peer]), int(self.recv_addresses.values[peer])
            here = f"rank {self.rank} at {self._number} of {self.epoch}"
            raise RanksDisagree(f"rank {peer} is at exchange {found} of epoch {epoch}, {here}")
        self._refuse_size(peer)


def fitting_part_bytes(world_size: int) -> int:
    """Return the largest part size, within the limits, with which a rank's parts fit into INCOMING_BYTES."""
    return fitting_share(INCOMING_BYTES, world_size - 1, MIN_PART_BYTES, MAX_PART_BYTES)
