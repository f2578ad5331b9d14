"""torch.distributed's all_to_all between device tensors: the wire of a group whose device has a backend, NCCL's.

Sizes of an all-to-all must be known on both sides, and a rank that refuses knows nobody's; so each exchange begins
with one of small headers: size, exchange, epoch, and a refusal's text. That costs a second collective and a wait of
the host, also where the receiver knows the sizes (`gpu.nccl` has an exchange without that).

NCCL's `wait` does not keep the host; looking at a result then would, for as long as a peer is gone. So the host asks
whether a collective is done, between looks at the clock and at what it was told (`interrupt`), and gives the group up
when it is over. The group's own time-out must be longer than ours: NCCL's watchdog ends the process at its own.
Written without a word about CUDA, and tested on CPU tensors over gloo, bit for bit. On CUDA it was never run.
"""

import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.errors import DispatchError, DispatchTimeout, PeerLost, PeerRefused, RanksDisagree
from dispatch.wires.wire import MAX_REFUSAL_BYTES, REFUSED, RankTable, decode_refusal, encode_refusal

_ALIGNMENT = 64
SIZE, SECOND, NUMBER, EPOCH, CALL, TEXT_BYTES, TEXT = range(7)  # words of a header
HEADER_WORDS = TEXT + MAX_REFUSAL_BYTES // 8
_SPINS = 2_000  # looks at a collective before the host sleeps in between
_PAUSE_S = 50e-6
GROUP_MARGIN_S = 60.0  # by which a group's time-out is longer than ours


class Collectives:
    """What a rank does with the collectives of one group: headers, waits that end, and errors by name.

    Args:
        group: runs nothing else meanwhile.
        device: where tensors lie; the group has a backend for it.
        timeout_s: how long a collective may take.
        epoch: of membership.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, device: torch.device, timeout_s: float, epoch: int
    ) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.device, self.epoch = device, epoch
        self._group: dist.ProcessGroup | None = group
        self._timeout_s = timeout_s
        self._number = 0  # of the last exchange begun
        self._interruption: DispatchError | None = None

    def interrupt(self, error: DispatchError) -> None:
        """End what waits for peers, now and later, with this error. Local, from any thread."""
        self._interruption = self._interruption or error

    def close(self) -> None:
        """See `Wire`. The group stays its owner's to destroy."""
        self._group = None

    def start_headers(self, counts_R2: Tensor, text: bytes = b"", call: int = 0) -> tuple[Tensor, Any]:
        """Send every rank its row of two numbers, int64 on the device; return the headers to come, and the work."""
        self._check_open()
        self._number += 1
        padded = text.ljust(MAX_REFUSAL_BYTES, b"\0")
        common = torch.empty(HEADER_WORDS, dtype=torch.int64)
        common[NUMBER], common[EPOCH], common[CALL], common[TEXT_BYTES] = (
            self._number,
            self.epoch,
            call,
            len(text),
        )
        common[TEXT:] = torch.frombuffer(bytearray(padded), dtype=torch.int64)
        if self.device.type == "cuda":
            common = common.pin_memory()  # else the copy would wait for the device
        outgoing = common.to(self.device, non_blocking=True).repeat(self.world_size, 1)
        outgoing[:, SIZE : SECOND + 1] = counts_R2
        headers = torch.empty_like(outgoing)
        return headers, self.start(headers, outgoing)

    def check_headers(self, headers: list[list[int]], number: int, call: int) -> None:
        """Raise PeerRefused or RanksDisagree for what peers say of an exchange."""
        for peer, header in enumerate(headers):
            if (header[NUMBER], header[EPOCH]) != (number, self.epoch):
                here = f"rank {self.rank} at {number} of {self.epoch}"
                raise RanksDisagree(
                    f"rank {peer} is at exchange {header[NUMBER]} of epoch {header[EPOCH]}, {here}"
                )
        for peer, header in enumerate(headers):
            if header[SIZE] == REFUSED and peer != self.rank:
                content = torch.tensor(header[TEXT:]).numpy().tobytes()
                raise PeerRefused(peer, decode_refusal(content[: header[TEXT_BYTES]]))
        for peer, header in enumerate(headers):
            if header[CALL] != call and header[SIZE] != REFUSED:
                raise RanksDisagree(
                    f"rank {peer} made another call than rank {self.rank}: other shapes or types"
                )

    def start(
        self,
        incoming: Tensor,
        outgoing: Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
    ) -> Any:
        """Begin an all-to-all of rows; return what is to be waited for."""
        try:
            return dist.all_to_all_single(
                incoming, outgoing, received, sent, group=self._group, async_op=True
            )
        except RuntimeError as error:
            self._fail(error)

    def wait(self, work: Any) -> None:
        """Keep the host until a collective is done, and let what follows on the device come after it."""
        late_s, looks = time.monotonic() + self._timeout_s, 0
        try:
            while not work.is_completed():
                if self._interruption is not None:
                    self._give_up()
                    raise self._interruption
                if time.monotonic() > late_s:
                    self._give_up()
                    rank = 1 - self.rank if self.world_size == 2 else None
                    raise DispatchTimeout(rank, self._timeout_s, "an exchange of device tensors")
                looks += 1
                time.sleep(_PAUSE_S if looks > _SPINS else 0)
        except RuntimeError as error:
            self._fail(error)
        self.follow(work)

    def follow(self, work: Any) -> None:
        """Let what follows on the device come after a collective; NCCL's does not keep the host, gloo's does."""
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(error)

    def _give_up(self) -> None:
        """Let the device go on: a collective of NCCL that a peer never joins would keep it for ever."""
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group._get_backend(self.device).abort()

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


class NcclWire(Collectives):
    """See `Wire`, and `Collectives` for what it is opened with."""

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
        super().__init__(group, device=device, timeout_s=timeout_s, epoch=epoch)
        self.reason = reason
        self.send_addresses, self.recv_addresses = RankTable(self.world_size), RankTable(self.world_size)
        self.mask = RankTable(self.world_size)
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

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """See `Wire`."""
        self.begin_exchange(send_bytes, recv_bytes)
        self.finish_exchange()

    def begin_exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """See `Wire`. Sizes go now, windows when all sizes are known."""
        self._expected = None if recv_bytes is None else [int(size) for size in recv_bytes.values]
        self._begin(self._sent, b"")

    def finish_exchange(self) -> None:
        """See `Wire`."""
        headers = self._finish_headers()
        self._found = [0 if peer == self.rank else header[SIZE] for peer, header in enumerate(headers)]
        self._check_sizes()
        self._incoming.place(self._found)
        into, out = self._incoming, self._outgoing
        self.wait(
            self.start(
                into.memory[: sum(into.lengths)], out.memory[: sum(out.lengths)], into.lengths, out.lengths
            )
        )
        into.write_addresses(self.recv_addresses)

    def received(self, rank: int) -> Tensor:
        """See `Wire`."""
        return self._incoming.message(rank)

    def refuse(self, text: str) -> None:
        """See `Wire`."""
        self._begin([REFUSED] * self.world_size, encode_refusal(text))
        self.wait(self._work)

    def _begin(self, sizes: list[int], text: bytes) -> None:
        if self.mask.values.any():
            raise DispatchError("a rank is masked; a collective needs every rank, so this wire cannot mask")
        counts_R2 = torch.tensor([sizes, [0] * self.world_size], device=self.device).t()
        self._headers, self._work = self.start_headers(counts_R2, text)

    def _finish_headers(self) -> list[list[int]]:
        """Return every rank's header."""
        self.wait(self._work)
        headers: list[list[int]] = self._headers.tolist()
        self.check_headers(headers, self._number, 0)
        return headers

    def _check_sizes(self) -> None:
        for peer, found in enumerate(self._found):
            if self._expected is not None and peer != self.rank and found != self._expected[peer]:
                wanted = f"rank {self.rank} expects {self._expected[peer]}"
                raise RanksDisagree(f"rank {peer} sent {found} bytes where {wanted}")


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
