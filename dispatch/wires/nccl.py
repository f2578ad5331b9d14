"""torch.distributed's all_to_all between device tensors: the wire of a group whose device has a backend, NCCL's.

Sizes of an all-to-all must be known on both sides, and a rank that refuses knows nobody's; so each exchange begins
with one of small headers: size, exchange, epoch, and a refusal's text. That costs a second collective and a wait of
the host, also where the receiver knows the sizes.
Written without a word about CUDA, and tested on CPU tensors over gloo, bit for bit. On CUDA it was never run.
"""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.errors import DispatchError, DispatchTimeout, PeerLost, PeerRefused, RanksDisagree
from dispatch.meanwhile import Meanwhile, nothing
from dispatch.wires.wire import MAX_REFUSAL_BYTES, REFUSED, RankTable, decode_refusal, encode_refusal

_ALIGNMENT = 64
_SIZE, _NUMBER, _EPOCH, _TEXT_BYTES, _TEXT = 0, 1, 2, 3, 4  # words of a header
_HEADER_WORDS = _TEXT + MAX_REFUSAL_BYTES // 8


class NcclWire:
    """See `Wire`. `group` runs nothing else meanwhile; its own time-out bounds every wait.

    Args:
        device: where windows lie; the group has a backend for it.
        timeout_s: the group's time-out, for messages.
    """

    name = "nccl"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        timeout_s: float,
        epoch: int,
        reason: str,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.device, self.epoch, self.reason = device, epoch, reason
        self.send_addresses, self.recv_addresses = RankTable(self.world_size), RankTable(self.world_size)
        self.mask = RankTable(self.world_size)
        self._group: dist.ProcessGroup | None = group
        self._timeout_s = timeout_s
        self._number = 0  # of the last exchange begun
        self._outgoing, self._incoming = _DeviceBytes(device), _DeviceBytes(device)
        self._sent, self._found = [0] * self.world_size, [0] * self.world_size

    def open_windows(self, send_bytes: RankTable) -> None:
        """See `Wire`."""
        self._check_open()
        self._sent = [int(size) for size in send_bytes.values]
        self._sent[self.rank] = 0
        self._outgoing.place(self._sent)
        self._outgoing.write_addresses(self.send_addresses)

    def send_window(self, rank: int) -> Tensor:
        """See `Wire`."""
        return self._outgoing.message(rank)

    def exchange(
        self, send_bytes: RankTable, recv_bytes: RankTable | None, meanwhile: Meanwhile = nothing
    ) -> None:
        """See `Wire`. Sizes are waited for first; `meanwhile` runs beside the windows."""
        self.begin_exchange(send_bytes, recv_bytes)
        self._finish(meanwhile)

    def begin_exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """See `Wire`. Sizes go now, windows when all sizes are known."""
        expected = None if recv_bytes is None else [int(size) for size in recv_bytes.values]
        self._expected = expected
        self._start_headers(self._sent, b"")

    def finish_exchange(self) -> None:
        """See `Wire`."""
        self._finish(nothing)

    def received(self, rank: int) -> Tensor:
        """See `Wire`."""
        return self._incoming.message(rank)

    def refuse(self, text: str) -> None:
        """See `Wire`."""
        self._check_open()
        self._start_headers([REFUSED] * self.world_size, encode_refusal(text))
        self._finish_headers()

    def close(self) -> None:
        """See `Wire`. The group stays its owner's to destroy."""
        self._group = None

    def _finish(self, meanwhile: Meanwhile) -> None:
        """Wait for all sizes, then exchange the windows."""
        headers = self._finish_headers()
        for peer, header in enumerate(headers):
            if header[_SIZE] == REFUSED:
                raise PeerRefused(peer, _read_text(header))
        self._found = [0 if peer == self.rank else header[_SIZE] for peer, header in enumerate(headers)]
        self._check_sizes()
        self._incoming.place(self._found)
        work = self._all_to_all(self._incoming, self._outgoing)
        meanwhile()
        self._wait(work)
        self._incoming.write_addresses(self.recv_addresses)

    def _start_headers(self, sizes: list[int], text: bytes) -> None:
        if self.mask.values.any():
            raise DispatchError("a rank is masked; a collective needs every rank, so this wire cannot mask")
        self._number += 1
        padded = text.ljust(MAX_REFUSAL_BYTES, b"\0")
        words = torch.frombuffer(bytearray(padded), dtype=torch.int64)
        outgoing = torch.empty(self.world_size, _HEADER_WORDS, dtype=torch.int64)
        outgoing[:, _SIZE] = torch.tensor(sizes)
        outgoing[:, _NUMBER], outgoing[:, _EPOCH] = self._number, self.epoch
        outgoing[:, _TEXT_BYTES], outgoing[:, _TEXT:] = len(text), words
        self._headers = torch.empty(outgoing.shape, dtype=torch.int64, device=self.device)
        try:
            self._work = dist.all_to_all_single(
                self._headers, outgoing.to(self.device), group=self._group, async_op=True
            )
        except RuntimeError as error:
            self._fail(error)

    def _finish_headers(self) -> list[list[int]]:
        """Return every rank's header."""
        self._wait(self._work)
        headers: list[list[int]] = self._headers.tolist()
        for peer, (_, number, epoch, *_) in enumerate(headers):
            if (number, epoch) != (self._number, self.epoch):
                here = f"rank {self.rank} at {self._number} of {self.epoch}"
                raise RanksDisagree(f"rank {peer} is at exchange {number} of epoch {epoch}, {here}")
        return headers

    def _check_sizes(self) -> None:
        for peer, found in enumerate(self._found):
            if self._expected is not None and peer != self.rank and found != self._expected[peer]:
                wanted = f"rank {self.rank} expects {self._expected[peer]}"
                raise RanksDisagree(f"rank {peer} sent {found} bytes where {wanted}")

    def _all_to_all(self, incoming: "_DeviceBytes", outgoing: "_DeviceBytes") -> Any:
        try:
            return dist.all_to_all_single(
                incoming.memory[: sum(incoming.lengths)],
                outgoing.memory[: sum(outgoing.lengths)],
                incoming.lengths,
                outgoing.lengths,
                group=self._group,
                async_op=True,
            )
        except RuntimeError as error:
            self._fail(error)

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(error)

    def _fail(self, error: RuntimeError) -> NoReturn:
        """A collective does not say who failed; between two ranks it can only be the other."""
        text, other = str(error).split("\n")[0], 1 - self.rank
        if "imed out" in text or "imeout" in text:
            rank = other if self.world_size == 2 else None
            raise DispatchTimeout(rank, self._timeout_s, "an exchange of device tensors") from error
        if self.world_size == 2:
            raise PeerLost(other, text) from error
        raise DispatchError(f"a peer is lost: {text}") from error

    def _check_open(self) -> None:
        if self._group is None:
            raise DispatchError("the wire is closed")


class _DeviceBytes:
    """Messages one behind the other, 64-byte aligned, in memory that only grows."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.sizes: list[int] = []
        self.lengths: list[int] = []  # with what aligns the next

    def place(self, sizes: list[int]) -> None:
        """Lay out messages of `sizes` bytes."""
        self.sizes = sizes
        self.lengths = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        total = sum(self.lengths)
        if total > self.memory.numel():
            store = torch.empty(total * 5 // 4 + _ALIGNMENT, dtype=torch.uint8, device=self.memory.device)
            self.memory = store[-store.data_ptr() % _ALIGNMENT :]

    def message(self, rank: int) -> Tensor:
        """View one message."""
        at = sum(self.lengths[:rank])
        return self.memory[at : at + self.sizes[rank]]

    def write_addresses(self, table: RankTable) -> None:
        """Say where each message lies; 0 where there is none."""
        at = self.memory.data_ptr()
        for rank, length in enumerate(self.lengths):
            table.values[rank] = at
            at += length


def _read_text(header: list[int]) -> str:
    content = torch.tensor(header[_TEXT:]).numpy().tobytes()
    return decode_refusal(content[: header[_TEXT_BYTES]])
