"""Send rows of several tensors to the ranks that want them, and rows back: the exchange under the public faces.

A row is one token; what travels of it lies in several tensors, here called planes (hidden values, scales, choices,
weights), which all have one row per token and otherwise any shape and dtype. A message holds a head, then each
plane's rows as bytes, so that dtypes that a wire does not know (float8) travel too, in one exchange.
Rows arrive ordered by source rank, then source token, whatever the wire.

The head says what call this is, in words that must be equal on all ranks, so that ranks which disagree get the words
of both in an error instead of wrong data; and how many rows the sender sends to every rank, so that all ranks know
the whole matrix and can agree on it later. Sizes are always found out in the exchange itself, even where a cached
route predicts them: it costs no further round trip, and a peer with another route is then named instead of waited for.

Plain torch over a `Wire`; knows neither experts nor sums. The service's `Dispatcher` does not use it: its rows
have one plane, and compiled kernels.

Legend: T tokens of this rank, N rows received, Q rows that came back, R ranks.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from dispatch.errors import PeerLost, RanksDisagree
from dispatch.wires.wire import RankTable, Wire

_ALIGNMENT = 64  # of every part of a message, so that any dtype can be viewed where it lies
_MAGIC = 0x57455053  # another protocol's message on the same wire does not begin like this
_FIRST_WORDS = 3  # magic, length of the call's words, number of counts and notes


class Route(NamedTuple):
    """Where rows went and came from. Made by `send`, good for any later `resend` and `give_back`."""

    is_token_in_rank_TR: Tensor  # bool: whether this rank sent the token to the rank
    counts_RR: Tensor  # int64 on the CPU: rows that rank i sent to rank j; the same on all ranks

    @property
    def fingerprint(self) -> int:
        """A number that all ranks of the same `send` share; another `send` has another one if its counts differ."""
        return zlib.crc32(self.counts_RR.numpy().tobytes())


class Received(NamedTuple):
    """What `send` brought, ordered by source rank, then source token."""

    planes: list[Tensor]  # [N, ...] each, in the order and dtypes of what was sent
    source_token_N: Tensor  # int32: which token of its source each row is
    counts_R: list[int]  # rows from each rank
    route: Route
    notes: list[list[int]]  # every rank's note, by rank


class GivenBack(NamedTuple):
    """What `give_back` brought home, ordered by answering rank, then token."""

    planes: list[Tensor]  # [Q, ...] each
    token_Q: Tensor  # int64: the token that each row answers
    rank_Q: Tensor  # int64: who answered


class _Part(NamedTuple):
    """One rank's share of an exchange."""

    counts: list[int]  # rows this rank sends to every rank
    note: list[int]
    planes: list[Tensor]  # uint8 [n, bytes of a row]


class RowExchange:
    """One rank's end. Calls are collective, in the same order on all ranks; none of them keeps anything.

    Args:
        wire: stays the caller's to close. Masked ranks are an error here: every rank must take part.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._send_bytes = RankTable(wire.world_size)
        self._peers = [rank for rank in range(wire.world_size) if rank != wire.rank]

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
            planes: [T, ...] each, any dtype; T may differ between ranks, what follows it may not.
            is_token_in_rank_TR: bool.
            call: what the caller is doing, in words that must be equal on all ranks.
            note: integers that every rank is to know, as many on all ranks.

        Raises:
            RanksDisagree: a peer made another call; all ranks raise, and the next call works.
            PeerRefused: a peer's caller refused its arguments; likewise.
            PeerLost, DispatchTimeout: as the wire.
        """
        token_T = torch.arange(is_token_in_rank_TR.shape[0], dtype=torch.int32, device=planes[0].device)
        rows_R = sent_tokens(is_token_in_rank_TR)
        parts = self._exchange(call, [*planes, token_T], rows_R, note)
        *received, source_token_N = _join([*planes, token_T], parts)
        route = Route(is_token_in_rank_TR, torch.tensor([part.counts for part in parts]))
        counts_R = [part.counts[self.wire.rank] for part in parts]
        return Received(received, source_token_N, counts_R, route, [part.note for part in parts])

    def resend(self, planes: Sequence[Tensor], route: Route, *, call: str = "resend") -> list[Tensor]:
        """Send other planes the way of an earlier `send`. Collective; all ranks with the same send's route.

        Returns:
            The received planes [N, ...], ordered as that `send`'s.

        Raises:
            as `send`; RanksDisagree also where a rank has another send's route.
        """
        rows_R = sent_tokens(route.is_token_in_rank_TR)
        return _join(planes, self._exchange(f"{call}, route {route.fingerprint:08x}", planes, rows_R, ()))

    def give_back(self, planes: Sequence[Tensor], route: Route, *, call: str = "give back") -> GivenBack:
        """Return one row per received row to the ranks they came from. Collective; same route on all ranks.

        Args:
            planes: [N, ...] each, rows in the order in which `send` brought them; any shape and dtype.

        Raises:
            as `resend`.
        """
        counts = route.counts_RR[:, self.wire.rank].tolist()
        rows_R = torch.split(torch.arange(sum(counts), device=planes[0].device), counts)
        parts = self._exchange(f"{call}, route {route.fingerprint:08x}", planes, rows_R, ())
        tokens_R = sent_tokens(route.is_token_in_rank_TR)
        sent = torch.tensor([tokens.numel() for tokens in tokens_R])
        ranks = torch.arange(self.wire.world_size).repeat_interleave(sent)
        return GivenBack(_join(planes, parts), torch.cat(tokens_R), ranks.to(planes[0].device))

    def refuse(self, problem: str) -> NoReturn:
        """Take part in this call only to say that this rank's arguments are bad, and raise. Collective.

        Raises:
            ValueError: with `problem`, here; every other rank raises PeerRefused with it.
        """
        self.wire.refuse(problem)
        raise ValueError(problem)

    def _exchange(
        self,
        call: str,
        planes: Sequence[Tensor],
        rows_R: Sequence[Tensor],
        note: Sequence[int],
    ) -> list[_Part]:
        """Send `rows_R[r]` of every plane to rank r and return every rank's part, this rank's own among them."""
        words = f"{call}: {'; '.join(_describe(plane) for plane in planes)}"
        flat = [_as_bytes(plane) for plane in planes]
        counts = [rows.numel() for rows in rows_R]
        head = _pack_head(words, [*counts, *note])
        for peer in self._peers:
            self._send_bytes.values[peer] = head.numel() + sum(
                _padded(counts[peer] * p.shape[1]) for p in flat
            )
        self.wire.open_windows(self._send_bytes)
        for peer in self._peers:
            if not self.wire.mask.values[peer]:
                _fill(self.wire.send_window(peer), head, flat, rows_R[peer])
        self.wire.exchange(self._send_bytes, None)
        own = _Part(counts, list(note), [p.index_select(0, rows_R[self.wire.rank]) for p in flat])
        return [own if r == self.wire.rank else self._read(r, words, flat) for r in range(len(counts))]

    def _read(self, peer: int, words: str, flat: list[Tensor]) -> _Part:
        """Take a peer's message apart; the planes stay where they lie."""
        if self.wire.mask.values[peer]:
            raise PeerLost(peer, "it is masked, and this exchange needs every rank")
        message = self.wire.received(peer)
        theirs, values, at = _unpack_head(message)
        if theirs != words:
            here = f"rank {self.wire.rank} is in {words!r}"
            raise RanksDisagree(
                f"rank {peer} is in {theirs!r} where {here}; all ranks must make the same call"
            )
        R = self.wire.world_size
        count, planes = values[self.wire.rank], []
        for plane in flat:
            num_bytes = count * plane.shape[1]
            planes.append(message[at : at + num_bytes].view(count, plane.shape[1]))
            at += _padded(num_bytes)
        return _Part(values[:R], values[R:], planes)


def sent_tokens(is_token_in_rank_TR: Tensor) -> list[Tensor]:
    """Return for each rank the tokens that go there, ascending, int64."""
    return [column.nonzero().squeeze(1) for column in is_token_in_rank_TR.unbind(1)]


def _fill(window: Tensor, head: Tensor, flat: list[Tensor], rows: Tensor) -> None:
    at = head.numel()
    window[:at].copy_(head)
    for plane in flat:
        num_bytes = rows.numel() * plane.shape[1]
        window[at : at + num_bytes].copy_(plane.index_select(0, rows).view(-1))
        at += _padded(num_bytes)


def _join(planes: Sequence[Tensor], parts: list[_Part]) -> list[Tensor]:
    """Put all ranks' rows of each plane together, in the plane's dtype and shape and on its device."""
    joined = []
    for index, plane in enumerate(planes):
        rows = torch.cat([part.planes[index].to(plane.device) for part in parts])
        joined.append(rows.view(-1).view(plane.dtype).view(rows.shape[0], *plane.shape[1:]))
    return joined


def _as_bytes(plane: Tensor) -> Tensor:
    """See [T, ...] as uint8 [T, bytes of a row]."""
    row_bytes = plane.element_size() * plane.shape[1:].numel()
    whole = plane.detach().contiguous()
    line = whole.as_strided(
        (whole.numel(),), (1,)
    )  # a dimension of size 1 keeps any stride, which views mind
    return line.view(torch.uint8).view(plane.shape[0], row_bytes)


def _describe(plane: Tensor) -> str:
    return f"{str(plane.dtype).removeprefix('torch.')} {list(plane.shape[1:])}"


def _pack_head(words: str, values: Sequence[int]) -> Tensor:
    text = words.encode()
    first = torch.tensor([_MAGIC, len(text), len(values), *values], dtype=torch.int64).view(torch.uint8)
    head = torch.zeros(_padded(first.numel() + len(text)), dtype=torch.uint8)
    head[: first.numel()] = first
    head[first.numel() : first.numel() + len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    return head


def _unpack_head(message: Tensor) -> tuple[str, list[int], int]:
    """Return the peer's words, its counts and notes, and where its planes begin."""
    first_bytes = 8 * _FIRST_WORDS
    first = (
        message[:first_bytes].clone().view(torch.int64).tolist() if message.numel() >= first_bytes else [0]
    )
    if first[0] != _MAGIC:
        return "another protocol's call", [], 0
    _, text_bytes, num_values = first
    text_at = first_bytes + 8 * num_values
    values = message[first_bytes:text_at].clone().view(torch.int64).tolist()
    text = bytes(message[text_at : text_at + text_bytes].tolist()).decode()
    return text, values, _padded(text_at + text_bytes)


def _padded(num_bytes: int) -> int:
    return (num_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
