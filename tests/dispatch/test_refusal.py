"""Bad arguments on one rank are a named error on every rank, and the next exchange works."""

import pytest
import torch.distributed as dist

from dispatch.errors import DispatchError, PeerRefused
from dispatch.wires.local import LocalWire
from dispatch.wires.open import open_wire
from dispatch.wires.wire import MAX_REFUSAL_BYTES, RankTable, Wire, decode_refusal, encode_refusal
from tests.conftest import PoolOf
from tests.dispatch.messages import swap, swap_or_refuse, text_of

SMALL, LARGE = 500, 9000  # against regions of 1 KB: many messages go in several pieces


def open_wires(name: str, mask_lost: bool = False) -> Wire:
    """Open a wire with small regions."""
    return open_wire(name, dist.group.WORLD, timeout_s=20.0, region_bytes=1024, mask_lost=mask_lost)


def exchange_with_refusals(
    name: str, mask_lost: bool, is_known: bool, refusals: list[list[int]]
) -> list[str]:
    """Each entry of `refusals` is a round and the ranks that refuse it. Returns this rank's errors by round."""
    wire = open_wires(name, mask_lost)
    errors = []
    for round_, refusers in enumerate(refusals):
        largest = LARGE if round_ % 2 else SMALL
        errors.append(swap_or_refuse(wire, round_, largest, refusers, is_known=is_known))
    assert not wire.mask.values.any(), "a rank that refuses is not lost"
    wire.close()
    return errors


WIRES = [("shm", False), ("shm", True), ("gloo", False), ("gloo", True)]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("name", "mask_lost"), WIRES)
def test_a_refusal_is_a_named_error_on_every_rank_and_the_next_exchange_works(
    pool_of: PoolOf, name: str, mask_lost: bool, world_size: int, is_known: bool
) -> None:
    last, everybody = world_size - 1, list(range(world_size))
    refusals = [[], [], [0], [], [last], [last], [], [], everybody[1:], [], everybody, everybody[:-1], [], []]
    results = pool_of(world_size).run(exchange_with_refusals, name, mask_lost, is_known, refusals)
    for rank, errors in enumerate(results):
        for refusers, error in zip(refusals, errors, strict=True):
            if not refusers:
                assert error == ""
            elif rank in refusers:
                assert error == text_of(rank)
            else:
                assert error == f"rank {min(refusers)} refused the call: {text_of(min(refusers))}"


def refuse_at_length(name: str, text: str) -> str:
    """Rank 0 refuses with a text; the others return what they read of it."""
    wire = open_wires(name)
    try:
        if wire.rank == 0:
            wire.refuse(text)
        else:
            swap(wire, 0, SMALL, is_known=False)
    except PeerRefused as error:
        return error.text
    finally:
        wire.close()
    return text


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_long_refusal_is_cut_between_characters(pool_of: PoolOf, name: str) -> None:
    ours, theirs = pool_of(2).run(refuse_at_length, name, "x" + "ä" * 1000)
    assert ours.startswith(theirs)
    assert MAX_REFUSAL_BYTES - 2 < len(theirs.encode()) <= MAX_REFUSAL_BYTES


def test_a_refusal_is_bad_input_and_an_error_between_ranks() -> None:
    error = PeerRefused(2, "slots_TK[3, 1] is 99; it must be below 8")
    assert str(error) == "rank 2 refused the call: slots_TK[3, 1] is 99; it must be below 8"
    assert isinstance(error, ValueError)
    assert isinstance(error, DispatchError)


def test_refusals_survive_their_bytes() -> None:
    assert decode_refusal(encode_refusal("H is 7 µ it must be 8")) == "H is 7 µ it must be 8"
    assert decode_refusal(encode_refusal("ä", max_bytes=1)) == ""


def test_one_rank_may_refuse() -> None:
    wire = LocalWire()
    wire.refuse("nobody hears it")
    wire.exchange(RankTable(1), None)
    assert wire.received(0).numel() == 0
