"""Send rows of several tensors to chosen ranks, and rows back: the basis of DeepEP's interfaces.

A row is one token. Its data are in several tensors, here called planes (hidden values, scales, choices, weights). All
planes have one row per token, and any other shape and dtype. Rows arrive ordered by source rank, then source token,
with either mover: `HostRows` (one `Exchange` of CPUs, with ranks as slots) or, between GPUs, `gpu.nccl.NcclRows`.
Answers travel back in the same way.

Each call has a text with a checksum that must be equal on all ranks, so that ranks which disagree get an error
instead of wrong data. Each rank also sends its row counts, so that all ranks know the whole matrix.

Legend: T tokens of this rank, N rows received, Q rows that came back, R ranks.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from dispatch.dispatched import Check, no_errors
from dispatch.errors import DispatchError, PeerLost, RanksDisagree
from dispatch.exchange import Exchange
from dispatch.wires.wire import Wire


class Counts(NamedTuple):
    """Rows between this rank and each other one, known to the host."""

    rows: list[int]  # of a dispatch
    answers: list[int]  # of the combine after it, in the other direction


class Moved(NamedTuple):
    """Rows that a rank received, ordered by source."""

    planes: list[Tensor]  # new memory
    counts: Counts
    notes: list[list[int]]  # every rank's, by rank


class RowMover(Protocol):
    """Transport of rows, ordered by rank. Calls are collective, in the same order on all ranks.

    Attributes:
        rank, world_size: This rank, and the number of ranks of the group.
    """

    rank: int
    world_size: int

    def meet(self, counts_2R: Tensor, call: int) -> Counts:
        """Announce what this rank sends. On a device, this is the only call per layer in which the host waits for it.

        Args:
            counts_2R: int64 on the rows' device: rows for each rank, and answers that each rank will send back.
            call: Number that must be equal on all ranks.

        Returns:
            This rank's counts.

        Raises:
            PeerRefused, RanksDisagree, PeerLost, DispatchTimeout: As `send`, which may raise them instead.
        """

    def send(self, planes: Sequence[Tensor], sent: Counts, note: Sequence[int] = ()) -> Moved:
        """Send every plane's rows, ordered by destination.

        Args:
            sent: Result of `meet`.
            note: Integers for every rank; the same number of them on all ranks.
        """

    def give_back(self, answers: Tensor, owed: list[int], expected: list[int]) -> Tensor:
        """Send answers, ordered by destination. Return the received ones, ordered by source."""

    def refuse(
        self, text: str, like: Tensor | None = None, owed: Sequence[int] = (), expected: Sequence[int] = ()
    ) -> None:
        """Refuse in place of `meet` and `send`, or in place of `give_back` if `like` (an answer) is given."""

    def interrupt(self, error: DispatchError) -> None:
        """Make waits for peers raise this error. Local; may be called from any thread."""

    def begin_check(self) -> Check:
        """Begin to look for errors that peers reported about answers, as `TokenDispatcher.begin_check`."""

    def close(self) -> None:
        """Release all resources. Local."""


class HostRows:
    """`RowMover` through the hosts' memory, over any wire between CPUs.

    Args:
        wire: Owned.
        device: Device of the rows. Rows on a GPU are copied to the host and back; every call waits for the copies.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire, self._device = wire, device
        self.rank, self.world_size = wire.rank, wire.world_size
        self._exchange = Exchange(wire, slots_per_rank=1)
        self._call = 0

    def meet(self, counts_2R: Tensor, call: int) -> Counts:
        self._call = call  # `send` sends the counts to peers
        return Counts(*counts_2R.tolist())

    def send(self, planes: Sequence[Tensor], sent: Counts, note: Sequence[int] = ()) -> Moved:
        received = self._move(join_planes(planes), sent.rows, self._call, (*sent.answers, *note))
        notes = self._exchange.notes()
        lost = self._wire.mask.values.nonzero()[0].tolist()
        if lost:
            raise PeerLost(lost[0], "it is masked, and this exchange needs every rank")
        counts = Counts(self._exchange.counts(), [words[self.rank] for words in notes])
        return Moved(split_planes(received, planes), counts, [words[self.world_size :] for words in notes])

    def give_back(self, answers: Tensor, owed: list[int], expected: list[int]) -> Tensor:
        received = self._move(join_planes([answers]), owed, ~self._call, ())
        return split_planes(received, [answers])[0]

    def refuse(
        self, text: str, like: Tensor | None = None, owed: Sequence[int] = (), expected: Sequence[int] = ()
    ) -> None:
        self._wire.refuse(text)

    def interrupt(self, error: DispatchError) -> None:
        self._wire.interrupt(error)

    def begin_check(self) -> Check:
        return no_errors

    def close(self) -> None:
        self._wire.close()

    def _move(self, rows_NB: Tensor, sent: Sequence[int], call: int, note: Sequence[int]) -> Tensor:
        """Send rows of bytes, `sent[r]` to rank r. Return the received ones, in new memory on the device."""
        to_N1 = torch.arange(self.world_size).repeat_interleave(torch.tensor(sent)).unsqueeze(1)
        self._exchange.send_rows(rows_NB.cpu().contiguous(), to_N1, call=call, note=note)
        return self._exchange.receive_rows()[0].to(self._device, copy=True)


class Route(NamedTuple):
    """Path of rows between ranks. Made by `send`, valid for any later `resend` and `give_back`."""

    is_token_in_rank_TR: Tensor  # bool: whether this rank sent the token to the rank
    counts_RR: Tensor  # int64 on the CPU: rows that rank i sent to rank j; the same on all ranks

    @property
    def fingerprint(self) -> int:
        """Number shared by all ranks of one `send`. It differs for another `send` with other counts."""
        return zlib.crc32(self.counts_RR.numpy().tobytes())


class Received(NamedTuple):
    """Rows that `send` received, ordered by source rank, then source token."""

    planes: list[Tensor]  # [N, ...] each, in the order and dtypes of the planes sent
    source_token_N: Tensor  # int32: index of each row's token at its source
    counts_R: list[int]  # rows from each rank
    route: Route
    notes: list[list[int]]  # every rank's note, by rank


class GivenBack(NamedTuple):
    """Rows that `give_back` received, ordered by answering rank, then token."""

    planes: list[Tensor]  # [Q, ...] each
    token_Q: Tensor  # int64: the token that each row answers
    rank_Q: Tensor  # int64: the rank that sent each row


class RowExchange:
    """One rank's end. Calls are collective, in the same order on all ranks, and keep no state.

    Args:
        mover: Not owned; the caller closes it.
    """

    def __init__(self, mover: RowMover) -> None:
        self.mover, self.rank, self.world_size = mover, mover.rank, mover.world_size

    def send(
        self,
        planes: Sequence[Tensor],
        is_token_in_rank_TR: Tensor,
        *,
        call: str = "send",
        note: Sequence[int] = (),
    ) -> Received:
        """Send each token's rows to every rank that `is_token_in_rank_TR` names. Collective.

        Args:
            planes: [T, ...] each, any dtype; T may differ between ranks, the other dimensions may not.
            is_token_in_rank_TR: bool.
            call: Description of the call; equal on all ranks.
            note: Integers for every rank; the same number of them on all ranks.

        Raises:
            RanksDisagree: A peer made another call; all ranks raise, and the next call works.
            PeerRefused: A peer's caller refused its arguments; all ranks raise, and the next call works.
            PeerLost, DispatchTimeout: As the mover.
        """
        T = is_token_in_rank_TR.shape[0]
        token_T = torch.arange(T, dtype=torch.int32, device=planes[0].device)
        rows_R = is_token_in_rank_TR.sum(0)
        moved = self._move(call, [*planes, token_T], is_token_in_rank_TR, rows_R, note)
        counts_RR = torch.tensor([words[: self.world_size] for words in moved.notes])
        *received, source_token_N = moved.planes
        notes = [words[self.world_size :] for words in moved.notes]
        return Received(
            received, source_token_N, moved.counts.rows, Route(is_token_in_rank_TR, counts_RR), notes
        )

    def resend(self, planes: Sequence[Tensor], route: Route, *, call: str = "resend") -> list[Tensor]:
        """Send other planes the way of an earlier `send`. Collective; all ranks pass the route of the same send.

        Returns:
            The received planes [N, ...], in the order of that `send`.

        Raises:
            As `send`. RanksDisagree also if a rank passes another send's route.
        """
        words, mask_TR = f"{call}, route {route.fingerprint:08x}", route.is_token_in_rank_TR
        return self._move(words, planes, mask_TR, mask_TR.sum(0)).planes

    def give_back(self, planes: Sequence[Tensor], route: Route, *, call: str = "give back") -> GivenBack:
        """Return one row per received row to the rank it came from. Collective; same route on all ranks.

        Args:
            planes: [N, ...] each, any shape and dtype; rows in the order in which `send` returned them.

        Raises:
            As `resend`.
        """
        device, mask_TR = planes[0].device, route.is_token_in_rank_TR
        counts_R = route.counts_RR[:, self.rank].to(device)
        moved = self._move(f"{call}, route {route.fingerprint:08x}", planes, None, counts_R)
        chosen_Q = select(mask_TR.t(), sum(moved.counts.rows))
        T = max(mask_TR.shape[0], 1)
        return GivenBack(moved.planes, chosen_Q % T, chosen_Q // T)

    def refuse(self, problem: str) -> NoReturn:
        """Refuse this call because this rank's arguments are bad. Collective.

        Raises:
            ValueError: With `problem`, on this rank; every other rank raises PeerRefused with it.
        """
        self.mover.refuse(problem)
        raise ValueError(problem)

    def _move(
        self,
        call: str,
        planes: Sequence[Tensor],
        mask_TR: Tensor | None,
        counts_R: Tensor,
        note: Sequence[int] = (),
    ) -> Moved:
        """Send each rank the rows that the mask selects. Without a mask, rows are already ordered by rank."""
        words = f"{call}: {'; '.join(_describe(plane) for plane in planes)}"
        sent = self.mover.meet(torch.stack([counts_R, counts_R]), zlib.crc32(words.encode()))
        rows = join_planes(planes)
        if mask_TR is not None:
            token_N = select(mask_TR.t(), sum(sent.rows)) % max(mask_TR.shape[0], 1)
            rows = rows.index_select(0, token_N)
        try:
            moved = self.mover.send([rows], sent, (*sent.rows, *note))
        except RanksDisagree as error:
            raise RanksDisagree(f"rank {self.rank} called {words!r}; {error}") from error
        return moved._replace(planes=split_planes(moved.planes[0], planes))


def select(is_chosen: Tensor, count: int) -> Tensor:
    """Return int64 [count]: flat indices of the chosen elements, in order. The host knows their number."""
    flat = is_chosen.reshape(-1)
    place = torch.where(flat, flat.cumsum(0) - 1, count)
    # The last element takes the indices that are not chosen.
    chosen = torch.zeros(count + 1, dtype=torch.int64, device=flat.device)
    return chosen.scatter_(0, place, torch.arange(flat.numel(), device=flat.device))[:count]


def join_planes(planes: Sequence[Tensor]) -> Tensor:
    """Return uint8 [N, B]: the bytes of every plane's row, concatenated."""
    rows = [_as_bytes(plane) for plane in planes]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def sum_dtype(rows: Tensor) -> torch.dtype:
    """Return the type in which rows are added before their sum is rounded once."""
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def split_planes(rows_NB: Tensor, planes: Sequence[Tensor]) -> list[Tensor]:
    """Split rows of `join_planes` into the planes' types and shapes."""
    parts, at = [], 0
    for plane in planes:
        end = at + plane.element_size() * plane.shape[1:].numel()
        part = (
            rows_NB
            if end - at == rows_NB.shape[1]
            else rows_NB[:, at:end].clone(memory_format=torch.contiguous_format)
        )
        parts.append(part.view(-1).view(plane.dtype).view(part.shape[0], *plane.shape[1:]))
        at = end
    return parts


def _as_bytes(plane: Tensor) -> Tensor:
    """View [T, ...] as uint8 [T, bytes of a row]."""
    whole = plane.detach().contiguous()
    # A dimension of size 1 may have any stride, and `view` rejects some of them.
    line = whole.as_strided((whole.numel(),), (1,))
    row_bytes = plane.element_size() * plane.shape[1:].numel()
    return line.view(torch.uint8).view(plane.shape[0], row_bytes)


def _describe(plane: Tensor) -> str:
    return f"{str(plane.dtype).removeprefix('torch.')} {list(plane.shape[1:])}"


# From a token's choices to ranks, on any device, without a wait of the host. A choice is an expert or a slot; each
# rank has the same number of them.

NOT_HERE = -1


def ranks_of(choices_TK: Tensor, per_rank: int) -> Tensor:
    """Return int64 [T, K]: the rank of each choice, -1 for no choice."""
    return torch.div(choices_TK, per_rank, rounding_mode="floor").long()


def token_mask(rank_TK: Tensor, num_ranks: int) -> Tensor:
    """Return bool [T, R]: whether a token has a choice on a rank."""
    mask_TR = torch.zeros(rank_TK.shape[0], num_ranks + 1, dtype=torch.bool, device=rank_TK.device)
    column_TK = torch.where(rank_TK == NOT_HERE, num_ranks, rank_TK)  # the extra column is cut off below
    return mask_TR.scatter_(1, column_TK, True)[:, :num_ranks].contiguous()


def localise(choices_NK: Tensor, rank: int, per_rank: int) -> Tensor:
    """Convert choices to this rank's local numbers, 0 to per_rank - 1. Choices of other ranks become -1."""
    local_NK = choices_NK - rank * per_rank
    is_here = (choices_NK != NOT_HERE) & (local_NK >= 0) & (local_NK < per_rank)
    return torch.where(is_here, local_NK, NOT_HERE)
