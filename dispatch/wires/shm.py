"""Shared memory between the ranks of one host: senders write to the receiver's window, flags signal completion.

Every ordered pair has two regions, used alternately by the parity of a running number. If a message fits its region, the
sender's kernel writes it there and the receiver's reads it there, without a copy. A larger one is staged in
private memory on both sides and sent through the regions in chunks, one per round; see `shm_regions`.

A wire of another epoch uses another anonymous file: writes of a late peer of an old epoch go to memory that no other
rank maps any more.
"""

import numpy as np
import torch.distributed as dist
from torch import Tensor

from dispatch.buffers import AlignedBytes
from dispatch.compiled.native import compile_all
from dispatch.errors import DispatchError, PeerRefused, RanksDisagree
from dispatch.wires import shm_regions as regions
from dispatch.wires.segment import SharedSegment
from dispatch.wires.wire import HostWire, RankTable, decode_refusal, encode_refusal, fitting_share

MAX_REGION_BYTES = 4 << 20
MIN_REGION_BYTES = 64 << 10
SEGMENT_BYTES = 64 << 20  # bound of all regions together, unless MIN_REGION_BYTES each is more


class ShmWire(HostWire):
    """`Wire` through shared memory. Opening is collective over `group`, which must be on one host.

    Attributes:
        place: First arguments of every function of `shm_regions`, for compiled code that posts messages itself.
    """

    name = "shm"

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
        pairs = self.world_size * (self.world_size - 1)
        self._region_bytes = region_bytes or fitting_region_bytes(self.world_size)
        compile_all(*regions.KERNELS)
        self._segment = SharedSegment(group, 2 * pairs * self._region_bytes, timeout_s=timeout_s)
        self._mask_lost = self.mask if mask_lost else None
        self._numbers, self._rounds = RankTable(self.world_size), RankTable(self.world_size)
        self.place = (
            self._segment.base,
            self._segment.start,
            self.world_size,
            self.rank,
            self._region_bytes,
            self._numbers.address,
            self.mask.address,
        )
        self._is_open = True

    def open_windows(self, send_bytes: RankTable) -> None:
        self._check_open()
        sizes, table, exchange = send_bytes.address, self.send_addresses.address, self._number + 1
        staged = regions.place_windows(*self.place, exchange, sizes, self._outgoing.address, table)
        if staged > self._outgoing.capacity:
            self._outgoing.reserve(staged)
            regions.place_windows(*self.place, exchange, sizes, self._outgoing.address, table)
        self._sent = send_bytes

    def send_window(self, rank: int) -> Tensor:
        size = 0 if rank == self.rank else int(self._sent.values[rank])
        return self._bytes_at(int(self.send_addresses.values[rank]), size, self._outgoing)

    def begin_exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        self.note_begun(send_bytes, recv_bytes)
        regions.post_first_round(*self.place, self._number, send_bytes.address, self.send_addresses.address)

    @property
    def next_number(self) -> int:
        """Number of the next exchange."""
        return self._number + 1

    def note_begun(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """Record that compiled code has begun the next exchange with `post_first_round`. Arguments as `begin_exchange`."""
        self._number += 1
        self._sent, self._expected = send_bytes, recv_bytes

    def finish_exchange(self) -> None:
        self._segment.wait(self._numbers, "an exchange", mask=self._mask_lost)
        expected = 0 if self._expected is None else self._expected.address
        rounds = regions.find_windows(
            *self.place, self._number, self._sent.address, expected,
            self._found.address, self._rounds.address, self.recv_addresses.address,
        )  # fmt: skip
        if rounds < 0:
            self._raise_for(rounds)
        if rounds > 1:
            self._exchange_rounds(rounds)

    def received(self, rank: int) -> Tensor:
        address = int(self.recv_addresses.values[rank])
        size = 0 if rank == self.rank or address == 0 else int(self._found.values[rank])
        return self._bytes_at(address, size, self._incoming)

    def refuse(self, text: str) -> None:
        self._check_open()
        content = np.frombuffer(encode_refusal(text, self._region_bytes), dtype=np.uint8)
        self._number += 1
        regions.post_refusal(*self.place, self._number, content.ctypes.data, content.size)
        self._segment.wait(self._numbers, "a refused exchange", mask=self._mask_lost)

    def interrupt(self, error: DispatchError) -> None:
        self._segment.interruption = error

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._segment.close()

    def _exchange_rounds(self, rounds: int) -> None:
        """Copy the chunks of large messages out of their regions, round by round."""
        place, found, table = self.place, self._found.address, self.recv_addresses.address
        self._incoming.reserve(regions.stage_windows(*place, found, 0, table))
        regions.stage_windows(*place, found, self._incoming.address, table)
        regions.take_chunks(*place, 0, found, table)
        sent, send_table, pair_rounds = self._sent.address, self.send_addresses.address, self._rounds.address
        for index in range(1, rounds):
            regions.post_next_round(*place, self._number, index, pair_rounds, sent, send_table)
            doing = f"round {index + 1} of {rounds} of an exchange"
            self._segment.wait(self._numbers, doing, mask=self._mask_lost)
            regions.take_chunks(*place, index, found, table)
        self.recv_addresses.values[self.mask.values != 0] = 0

    def _raise_for(self, problem: int) -> None:
        """Raise the error for a negative result of `find_windows`."""
        kind, peer = divmod(-1 - problem, self.world_size)
        if kind == regions.REFUSAL:
            address, size = int(self.recv_addresses.values[peer]), int(self._found.values[peer])
            content = self._bytes_at(address, size, self._incoming).numpy().tobytes()
            raise PeerRefused(peer, decode_refusal(content))
        if kind == regions.OUT_OF_STEP:
            raise RanksDisagree(f"rank {peer} is past exchange {self._number}, but rank {self.rank} is not")
        self._refuse_size(peer)

    def _bytes_at(self, address: int, size: int, staging: AlignedBytes) -> Tensor:
        """View bytes of a region or of `staging`."""
        memory, base = self._segment.memory, self._segment.base
        if not base <= address < base + memory.numel():
            memory, base = staging.memory, staging.address
        return memory[address - base : address - base + size] if size > 0 else memory[:0]

    def _check_open(self) -> None:
        if not self._is_open:
            raise DispatchError("the wire is closed")


def fitting_region_bytes(world_size: int) -> int:
    """Return the largest region size, within the limits, with which all regions fit into SEGMENT_BYTES."""
    return fitting_share(SEGMENT_BYTES, 2 * world_size * (world_size - 1), MIN_REGION_BYTES, MAX_REGION_BYTES)
