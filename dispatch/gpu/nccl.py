"""Move rows of device tensors between ranks with torch.distributed's all_to_all (NCCL). The host waits once per layer.

A dispatch begins with an exchange of headers, into which the device writes its own counts. The host reads the sent and
received counts together. After that both sides know every size of the layer, so rows and, in combine, answers are sent
at once. A combine's headers are sent with its answers, and are read with those of the next dispatch or by `begin_check`. A rank
that refuses a combine sends zeros as answers and the refusal in the headers.

NCCL's `wait` does not block the host, but reading a result would, for as long as a peer is gone. So the host polls
whether a collective is done, and checks the clock and the interruption (`interrupt`) in between. If the time is over, it
aborts the group. The group's own timeout must be longer: NCCL's watchdog ends the process at that timeout.
The code does not depend on CUDA. It is tested on CPU tensors over gloo, bit for bit; it was never run on CUDA.

Legend: R ranks, H hidden.
"""

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.dispatched import Check, no_errors
from dispatch.errors import DispatchError, DispatchTimeout, PeerLost, PeerRefused, RanksDisagree
from dispatch.gpu.host_copy import HostCopy
from dispatch.rows import Counts, Moved
from dispatch.wires.wire import MAX_REFUSAL_BYTES, REFUSED, decode_refusal, encode_refusal

SIZE, SECOND, NUMBER, EPOCH, CALL, TEXT_BYTES, TEXT = range(7)  # words of a header
HEADER_WORDS = TEXT + MAX_REFUSAL_BYTES // 8
_SPINS = 2_000  # polls of a collective before the host sleeps in between
_PAUSE_S = 50e-6
GROUP_MARGIN_S = 60.0  # a group's timeout is longer than ours by this


class Collectives:
    """Collectives of one group, with headers, waits that end, and named errors.

    Args:
        group: Runs no other collective at the same time.
        device: Device of the tensors; the group has a backend for it.
        timeout_s: How long a collective may take.
        epoch: Membership epoch.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, device: torch.device, timeout_s: float, epoch: int = 0
    ) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.device, self.epoch = device, epoch
        self._group: dist.ProcessGroup | None = group
        self._timeout_s = timeout_s
        self._number = 0  # number of the last exchange begun
        self._interruption: DispatchError | None = None

    def interrupt(self, error: DispatchError) -> None:
        """Make current and later waits for peers raise this error. Local; may be called from any thread."""
        self._interruption = self._interruption or error

    def close(self) -> None:
        """Release the group; its owner destroys it."""
        self._group = None

    def start_headers(self, counts_R2: Tensor, text: bytes = b"", call: int = 0) -> tuple[Tensor, Any]:
        """Send every rank its row of two int64 on the device. Return the headers to be received, and the work."""
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
            common = common.pin_memory()  # otherwise the copy would wait for the device
        outgoing = common.to(self.device, non_blocking=True).repeat(self.world_size, 1)
        outgoing[:, SIZE : SECOND + 1] = counts_R2
        headers = torch.empty_like(outgoing)
        return headers, self.start(headers, outgoing)

    def check_headers(self, headers: list[list[int]], number: int, call: int) -> None:
        """Raise PeerRefused or RanksDisagree if the peers' headers of an exchange require it."""
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
        """Begin an all-to-all of rows and return the work to wait for."""
        try:
            return dist.all_to_all_single(
                incoming, outgoing, received, sent, group=self._group, async_op=True
            )
        except RuntimeError as error:
            self._fail(error)

    def wait(self, work: Any) -> None:
        """Block the host until a collective is done, and order later work on the device after it."""
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
        """Order later work on the device after a collective. NCCL does not block the host here, gloo does."""
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(error)

    def _give_up(self) -> None:
        """Abort the group: an NCCL collective that a peer never joins would block the device forever."""
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()

    def _fail(self, error: RuntimeError) -> NoReturn:
        """Raise a named error. A collective does not name the failed rank; with two ranks it must be the other one."""
        text, other = str(error).split("\n")[0], 1 - self.rank if self.world_size == 2 else None
        if "imed out" in text or "imeout" in text:
            raise DispatchTimeout(other, self._timeout_s, "an exchange of device tensors") from error
        raise PeerLost(other, text) from error

    def _check_open(self) -> None:
        if self._group is None:
            raise DispatchError("these collectives are closed")


class NcclRows(Collectives):
    """`RowMover` over NCCL. See `Collectives` for the arguments."""

    _unread: tuple[Tensor, Any, int] | None = None  # headers of the last combine, the work, its number

    def meet(self, counts_2R: Tensor, call: int) -> Counts:
        headers, work = self.start_headers(counts_2R.t(), call=call)
        number, unread, self._unread = self._number, self._unread, None
        self.wait(work)
        parts = [counts_2R.reshape(-1), headers.view(-1)] + ([] if unread is None else [unread[0].view(-1)])
        R, words = self.world_size, torch.cat(parts).tolist()  # the host waits only here
        theirs, before = words[2 * R : 2 * R + R * HEADER_WORDS], words[2 * R + R * HEADER_WORDS :]
        if unread is not None:
            self.check_headers(_rows(before), unread[2], 0)
        found = _rows(theirs)
        self.check_headers(found, number, call)
        self._received = Counts([header[SIZE] for header in found], [header[SECOND] for header in found])
        return Counts(words[:R], words[R : 2 * R])

    def send(self, planes: Sequence[Tensor], sent: Counts, note: Sequence[int] = ()) -> Moved:
        """The host does not wait, unless there are notes to read."""
        notes: list[list[int]] = [[] for _ in range(self.world_size)]
        if note:
            own = torch.tensor(note, device=self.device).repeat(self.world_size, 1)
            everybody = torch.empty_like(own)
            self.wait(self.start(everybody, own))
            notes = everybody.tolist()
        return Moved(
            [self._move(plane, sent.rows, self._received.rows) for plane in planes], self._received, notes
        )

    def give_back(self, answers: Tensor, owed: list[int], expected: list[int]) -> Tensor:
        """The host does not wait."""
        self._tell(torch.zeros(self.world_size, 2, dtype=torch.int64, device=self.device), b"")
        return self._move(answers, owed, expected)

    def refuse(
        self, text: str, like: Tensor | None = None, owed: Sequence[int] = (), expected: Sequence[int] = ()
    ) -> None:
        refusal = torch.full((self.world_size, 2), REFUSED, device=self.device)
        if like is None:
            self.wait(self.start_headers(refusal, encode_refusal(text))[1])
            return
        self._tell(refusal, encode_refusal(text))
        self._move(like.new_zeros(sum(owed), *like.shape[1:]), owed, expected)

    def begin_check(self) -> Check:
        unread, self._unread = self._unread, None
        if unread is None:
            return no_errors
        headers, work, number = unread
        copy = None
        if self.device.type == "cuda":  # gloo, in tests, would block the host here
            self.follow(work)
            copy = HostCopy([headers.view(-1)])

        def check() -> None:
            self.wait(work)
            words = headers if copy is None else copy.read().reshape(headers.shape)
            self.check_headers(words.tolist(), number, 0)

        return check

    def _tell(self, counts_R2: Tensor, text: bytes) -> None:
        """Send headers that peers read later."""
        self._unread = (*self.start_headers(counts_R2, text), self._number)

    def _move(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        incoming = rows.new_empty(sum(received), *rows.shape[1:])
        self.follow(self.start(incoming, rows.contiguous(), list(received), list(sent)))
        return incoming


def _rows(words: list[int]) -> list[list[int]]:
    return [words[at : at + HEADER_WORDS] for at in range(0, len(words), HEADER_WORDS)]
