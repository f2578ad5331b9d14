"""Exchanges of plain bytes through a wire, with contents that show their origin. Run by ranks of a pool."""

import torch

from dispatch.errors import PeerRefused
from dispatch.wires.wire import RankTable, Wire


def message(round_: int, source: int, to: int, num_bytes: int) -> torch.Tensor:
    """Return the bytes that `source` sends `to` in a round. No two messages are equal."""
    seed = 7919 * round_ + 101 * source + to
    return torch.arange(seed, seed + num_bytes).mul(31).to(torch.uint8)


def size_of(round_: int, source: int, to: int, largest: int) -> int:
    """Return uneven sizes, including 0."""
    return (5 * round_ + 3 * source + 7 * to) % 11 * largest // 10


def swap(wire: Wire, round_: int, largest: int, *, is_known: bool) -> list[str]:
    """Exchange one round's messages. Return errors in the received data. Nothing arrives from masked ranks."""
    R, rank = wire.world_size, wire.rank
    sends, receives = RankTable(R), RankTable(R)
    for peer in range(R):
        sends.values[peer] = size_of(round_, rank, peer, largest)
        receives.values[peer] = size_of(round_, peer, rank, largest)
    wire.open_windows(sends)
    for peer in range(R):
        window = wire.send_window(peer)
        if peer != rank:
            window.copy_(message(round_, rank, peer, int(sends.values[peer])))
    wire.exchange(sends, receives if is_known else None)
    wrong = []
    for peer in range(R):
        is_silent = peer == rank or wire.mask.values[peer] == 1
        want = message(round_, peer, rank, 0 if is_silent else int(receives.values[peer]))
        if not torch.equal(wire.received(peer), want):
            wrong.append(f"round {round_}: rank {rank} has other bytes of {peer}")
        if is_silent and wire.recv_addresses.values[peer] != 0 and peer != rank:
            wrong.append(f"round {round_}: rank {rank} has an address for masked rank {peer}")
    return wrong


def swap_or_refuse(wire: Wire, round_: int, largest: int, refusers: list[int], *, is_known: bool) -> str:
    """Run one round that some ranks refuse. Return this rank's error, or ""."""
    if wire.rank in refusers:
        wire.refuse(text_of(wire.rank))
        return text_of(wire.rank)
    try:
        wrong = swap(wire, round_, largest, is_known=is_known)
    except PeerRefused as error:
        assert (error.rank, error.text) == (min(refusers), text_of(min(refusers))), error
        return str(error)
    return "; ".join(wrong)


def text_of(rank: int) -> str:
    """Return a rank's refusal text."""
    return f"x_TH of rank {rank} is bäd"
