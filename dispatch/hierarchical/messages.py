"""Tensors as one message per pair of ranks, for code in plain torch: words that say what they are, then the bytes.

A wire moves windows of bytes; the flat dispatcher's compiled passes fill them by address. What runs per node, and
not per token, needs no such passes: it hands over tensors and gets each peer's back. A message tells its own sizes, so
that the receiver needs to know nothing beforehand; where it does, both sides can say so and gloo need not guess.

Layout, every part 64-byte aligned: 16 int64 (the words, the number of parts, the bytes of each part), then the parts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dispatch.errors import RanksDisagree
from dispatch.meanwhile import Meanwhile, nothing
from dispatch.wires.wire import RankTable, Wire

MAX_WORDS, MAX_PARTS = 8, 4
_ALIGNMENT = 64
_HEADER_WORDS = 16
_HEADER_BYTES = 8 * _HEADER_WORDS
_COUNT_AT, _SIZES_AT = MAX_WORDS, MAX_WORDS + 1  # where the number of parts and their bytes are


class Message(NamedTuple):
    """What goes to, or came from, one rank."""

    words: tuple[int, ...]  # at most MAX_WORDS
    parts: tuple[Tensor, ...]  # at most MAX_PARTS; contiguous; uint8 [bytes] once received


def message_bytes(part_bytes: Sequence[int]) -> int:
    """Return the size of a message with parts of these sizes."""
    return _HEADER_BYTES + sum(_aligned(size) for size in part_bytes)


def num_bytes(message: Message) -> int:
    """Return the bytes that a message takes on its way."""
    return message_bytes([_num_bytes(part) for part in message.parts])


def swap(
    wire: Wire,
    messages: Sequence[Message],
    expected: Sequence[Sequence[int]] | None = None,
    meanwhile: Meanwhile = nothing,
) -> list[Message]:
    """Send one message to every rank and return what each sent. Collective.

    Args:
        wire: what carries them; its own rank's message does not travel.
        messages: by rank.
        expected: bytes of the parts to come from each rank, where the receiver knows them; then on all ranks.
        meanwhile: called while the messages travel; see there.

    Returns:
        By rank: the words and the parts as uint8 [bytes], views that live until this wire's next exchange.

    Raises:
        PeerRefused, PeerLost, DispatchTimeout, RanksDisagree: as the wire's `exchange`.
    """
    rank, ranks = wire.rank, range(wire.world_size)
    send_bytes = RankTable(wire.world_size)
    for peer in ranks:
        send_bytes.values[peer] = 0 if peer == rank else num_bytes(messages[peer])
    wire.open_windows(send_bytes)
    for peer in ranks:
        if peer != rank:
            _write(wire.send_window(peer), messages[peer])
    wire.begin_exchange(send_bytes, _recv_bytes(rank, expected))
    meanwhile()
    wire.finish_exchange()
    return [_as_bytes(messages[peer]) if peer == rank else _read(wire.received(peer), peer) for peer in ranks]


def _recv_bytes(rank: int, expected: Sequence[Sequence[int]] | None) -> RankTable | None:
    if expected is None:
        return None
    table = RankTable(len(expected))
    for peer, sizes in enumerate(expected):
        table.values[peer] = 0 if peer == rank else message_bytes(sizes)
    return table


def _write(window: Tensor, message: Message) -> None:
    assert len(message.words) <= MAX_WORDS and len(message.parts) <= MAX_PARTS, "a message has room for these"
    sizes = [_num_bytes(part) for part in message.parts]
    header = [*message.words, *[0] * (MAX_WORDS - len(message.words)), len(sizes), *sizes]
    header += [0] * (_HEADER_WORDS - len(header))
    window[:_HEADER_BYTES].copy_(torch.tensor(header, dtype=torch.int64).view(torch.uint8))
    at = _HEADER_BYTES
    for part, size in zip(_as_bytes(message).parts, sizes, strict=True):
        window[at : at + size].copy_(part)
        at += _aligned(size)


def _read(received: Tensor, peer: int) -> Message:
    if received.numel() < _HEADER_BYTES:
        raise RanksDisagree(f"rank {peer} sent {received.numel()} bytes, which is no message of this call")
    header = received[:_HEADER_BYTES].view(torch.int64).tolist()
    sizes = header[_SIZES_AT : _SIZES_AT + min(header[_COUNT_AT], MAX_PARTS)]
    parts, at = [], _HEADER_BYTES
    for size in sizes:
        parts.append(received[at : at + size])
        at += _aligned(size)
    return Message(tuple(header[:MAX_WORDS]), tuple(parts))


def _as_bytes(message: Message) -> Message:
    words = message.words + (0,) * (MAX_WORDS - len(message.words))
    return Message(words, tuple(part.reshape(-1).view(torch.uint8) for part in message.parts))


def _num_bytes(part: Tensor) -> int:
    return part.numel() * part.element_size()


def _aligned(num_bytes: int) -> int:
    return (num_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
