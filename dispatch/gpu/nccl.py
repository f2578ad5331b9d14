"""Rows of device tensors between ranks by NCCL, with one look of the host per layer.

A dispatch begins with an exchange of headers, into which the device writes its own counts; the host reads those that it
sent and those that came together. After that both sides know every size of the layer, so rows and, in combine, answers
go at once. A combine's headers go beside its answers, and are read with those of the next dispatch, or by `check`: a rank
that refuses a combine sends zeros for answers, and says so there.

Legend: R ranks, H hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dispatch.gpu.normal import Counts
from dispatch.wires.nccl import HEADER_WORDS, SECOND, SIZE, Collectives
from dispatch.wires.wire import REFUSED, encode_refusal


class NcclRows(Collectives):
    """See `RowMover`, and `Collectives` for what it is opened with."""

    _unread: tuple[Tensor, Any, int] | None = (
        None  # headers of the last combine, what brings them, its number
    )

    def meet(self, counts_2R: Tensor, call: int) -> Counts:
        """See `RowMover`."""
        headers, work = self.start_headers(counts_2R.t(), call=call)
        number, unread, self._unread = self._number, self._unread, None
        self.wait(work)
        parts = [counts_2R.reshape(-1), headers.view(-1)] + ([] if unread is None else [unread[0].view(-1)])
        R, words = self.world_size, torch.cat(parts).tolist()  # the host's only look
        theirs, before = words[2 * R : 2 * R + R * HEADER_WORDS], words[2 * R + R * HEADER_WORDS :]
        if unread is not None:
            self.check_headers(_rows(before), unread[2], 0)
        found = _rows(theirs)
        self.check_headers(found, number, call)
        self._received = Counts([header[SIZE] for header in found], [header[SECOND] for header in found])
        return Counts(words[:R], words[R : 2 * R])

    def send(self, planes: Sequence[Tensor], sent: Counts) -> tuple[list[Tensor], Counts]:
        """See `RowMover`. The host does not wait."""
        received = [self._move(plane, sent.rows, self._received.rows) for plane in planes]
        return received, self._received

    def give_back(self, answers: Tensor, owed: list[int], expected: list[int]) -> Tensor:
        """See `RowMover`. The host does not wait."""
        self._tell(torch.zeros(self.world_size, 2, dtype=torch.int64, device=self.device), b"")
        return self._move(answers, owed, expected)

    def refuse(self, text: str, like: Tensor | None, owed: list[int], expected: list[int]) -> None:
        """See `RowMover`."""
        refusal = torch.full((self.world_size, 2), REFUSED, device=self.device)
        if like is None:
            self.wait(self.start_headers(refusal, encode_refusal(text))[1])
            return
        self._tell(refusal, encode_refusal(text))
        self._move(like.new_zeros(sum(owed), *like.shape[1:]), owed, expected)

    def check(self) -> None:
        """See `RowMover`."""
        unread, self._unread = self._unread, None
        if unread is not None:
            headers, work, number = unread
            self.wait(work)
            self.check_headers(headers.tolist(), number, 0)

    def _tell(self, counts_R2: Tensor, text: bytes) -> None:
        """Send headers that are read later."""
        self._unread = (*self.start_headers(counts_R2, text), self._number)

    def _move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        incoming = rows.new_empty(sum(received), *rows.shape[1:])
        self.follow(self.start(incoming, rows.contiguous(), received, sent))
        return incoming


def _rows(words: list[int]) -> list[list[int]]:
    return [words[at : at + HEADER_WORDS] for at in range(0, len(words), HEADER_WORDS)]
