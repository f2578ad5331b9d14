"""Calls that a rank rejects, by their arguments or through the wire alone, raise a named error on every rank before anything
is delivered. The next exchange works."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.dispatcher import Dispatcher
from dispatch.errors import DispatchError, PeerRefused
from dispatch.mode import NORMAL, Mode, low_latency
from dispatch.row_formats import row_format
from dispatch.wires.local import LocalWire
from dispatch.wires.open import open_wire
from dispatch.wires.wire import MAX_REFUSAL_BYTES, RankTable, Wire, decode_refusal, encode_refusal
from tests.dispatch.exchange import catch, run_layer
from tests.dispatch.messages import swap, swap_or_refuse, text_of
from tests.dispatch.oracle import RankCase, RankResult, make_cases, simulate
from tests.fixtures import PoolOf

S = 2
BACKENDS = [(name, world_size) for world_size in (2, 4) for name in ("shm", "gloo")]


class Bad(NamedTuple):
    """A way to spoil the arguments of a dispatch, and the text of the error."""

    spoil: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    message: str
    mode: Mode = NORMAL


BAD_DISPATCHES = {
    "dtype": Bad(lambda x, slots: (x.to(torch.int32), slots), "x_TH is torch.int32 [3, 8] on cpu"),
    "slot dtype": Bad(lambda x, slots: (x, slots.int()), "slots_TK is torch.int32"),
    "shape": Bad(lambda x, slots: (x[0], slots), "x_TH is torch.float32 [8]"),
    "tokens": Bad(lambda x, slots: (x[:2], slots), "slots_TK has 3 tokens and x_TH 2"),
    "device": Bad(lambda x, slots: (x.to("meta"), slots), "on meta"),
    "slot": Bad(lambda x, slots: (x, slots + 99), "slots_TK[0, 0] is 99; it must be -1 or in [0, "),
    "too many tokens": Bad(lambda x, slots: (x, slots), "x_TH has 3 tokens; low-latency", low_latency(2)),
    "contiguity": Bad(
        lambda x, slots: (x.T.contiguous().T, slots), "x_TH has strides [1, 3]", low_latency(8)
    ),
}


def open_dispatcher(name: str, **settings: int) -> Dispatcher:
    return Dispatcher(open_wire(name, dist.group.WORLD, timeout_s=20.0), slots_per_rank=S, **settings)


def dispatch_badly(
    name: str, bad_ranks: list[int], cases: list[RankCase], good_tokens: int
) -> tuple[dict[str, str], RankResult]:
    """Make every bad call, then run a good layer."""
    dispatcher = open_dispatcher(name)
    rank = dispatcher.wire.rank
    errors = {}
    for kind, bad in BAD_DISPATCHES.items():
        x_TH, slots_TK = torch.ones(3, 8), torch.zeros(3, 2, dtype=torch.int64)
        if rank in bad_ranks:
            x_TH, slots_TK = bad.spoil(x_TH, slots_TK)
        elif bad.mode.capacity:
            x_TH, slots_TK = x_TH[:good_tokens], slots_TK[:good_tokens]
        errors[kind] = catch(lambda x=x_TH, s=slots_TK, m=bad.mode: dispatcher.dispatch(x, s, m))
    result = run_layer(dispatcher, cases[rank])
    dispatcher.close()
    return errors, result


@pytest.mark.parametrize(("name", "world_size"), BACKENDS)
def test_a_bad_dispatch_is_refused_on_every_rank_and_the_next_call_works(
    pool_of: PoolOf, name: str, world_size: int
) -> None:
    cases, bad_rank = make_cases(1, [3] * world_size, slots_per_rank=S), world_size - 1
    answers = pool_of(world_size).run(dispatch_badly, name, [bad_rank], cases, 2)
    for rank, (errors, result) in enumerate(answers):
        for kind, bad in BAD_DISPATCHES.items():
            by_name = (
                "ValueError: " if rank == bad_rank else f"PeerRefused: rank {bad_rank} refused the call: "
            )
            assert errors[kind].startswith(by_name), kind
            assert bad.message in errors[kind]
        for ours, oracle in zip(result, simulate(cases, S)[rank], strict=True):
            assert torch.equal(ours, oracle)


def test_where_two_ranks_refuse_each_raises_its_own_error_and_the_others_the_lowest(pool_of: PoolOf) -> None:
    answers = pool_of(4).run(dispatch_badly, "shm", [1, 3], make_cases(1, [3] * 4, slots_per_rank=S), 2)
    firsts = [errors["dtype"] for errors, _ in answers]
    assert [text.partition(":")[0] for text in firsts] == ["PeerRefused", "ValueError"] * 2
    assert all("rank 1 refused" in firsts[rank] for rank in (0, 2))


def combine_badly(name: str, bad_rank: int) -> tuple[list[str], bool]:
    dispatcher = open_dispatcher(name)
    x_TH, slots_TK, weights_TK = torch.ones(3, 8), torch.tensor([[0, 2]] * 3), torch.ones(3, 2)
    is_bad = dispatcher.wire.rank == bad_rank
    dispatched = dispatcher.dispatch(x_TH, slots_TK)
    y_PH = dispatched.x_NH[dispatched.row_P]
    spoilt = [
        lambda: dispatcher.combine(y_PH.double() if is_bad else y_PH, weights_TK, dispatched),
        lambda: dispatcher.combine(y_PH[1:] if is_bad else y_PH, weights_TK, dispatched),
        lambda: dispatcher.combine(y_PH, weights_TK[1:] if is_bad else weights_TK, dispatched),
        lambda: dispatcher.combine(y_PH, weights_TK.long() if is_bad else weights_TK, dispatched),
        lambda: dispatcher.combine(y_PH, weights_TK.to("meta") if is_bad else weights_TK, dispatched),
        lambda: dispatcher.combine(
            y_PH, weights_TK, dispatched, out=torch.zeros(3, 16)[:, ::2] if is_bad else torch.zeros(3, 8)
        ),
    ]
    errors = [catch(call) for call in spoilt]
    combined = dispatcher.combine(y_PH, weights_TK, dispatched)  # the same dispatch is still valid
    older, dispatched = dispatched, dispatcher.dispatch(x_TH, slots_TK)
    y_PH = dispatched.x_NH[dispatched.row_P]
    errors.append(catch(lambda: dispatcher.combine(y_PH, weights_TK, older if is_bad else dispatched)))
    again = dispatcher.combine(y_PH, weights_TK, dispatched)
    dispatcher.close()
    return errors, torch.equal(combined, again) and bool((combined == 2).all())


@pytest.mark.parametrize(("name", "world_size"), BACKENDS)
def test_a_bad_combine_is_refused_on_every_rank_and_may_be_repeated(
    pool_of: PoolOf, name: str, world_size: int
) -> None:
    messages = (
        "y_PH is torch.float64",
        "y_PH is",
        "weights_TK is torch.float32 [2, 2]",
        "weights_TK is torch.int64",
        "on meta",
        "out has strides",
        "not from the last",
    )
    for rank, (errors, is_right) in enumerate(pool_of(world_size).run(combine_badly, name, 1)):
        for error, message in zip(errors, messages, strict=True):
            assert error.startswith("ValueError" if rank == 1 else "PeerRefused: rank 1 refused the call: ")
            assert message in error
        assert is_right


DISAGREEMENTS = ("H", "K", "dtype", "slots per rank", "capacity", "row format")


def disagree(name: str, kind: str, odd_rank: int) -> tuple[str, str]:
    """Let one rank differ in one thing. Then all agree."""
    group = dist.group.WORLD
    assert group is not None
    is_odd = group.rank() == odd_rank
    dispatcher = Dispatcher(
        open_wire(name, group, timeout_s=20.0),
        slots_per_rank=3 if kind == "slots per rank" and is_odd else 2,
        rows=row_format("fp8" if kind == "row format" and is_odd else "auto"),
    )
    x_TH = torch.zeros(3, 9 if kind == "H" and is_odd else 8)
    slots_TK = torch.zeros(3, 3 if kind == "K" and is_odd else 2, dtype=torch.int64)
    if kind == "dtype":  # types of equal size, which bytes alone cannot distinguish
        x_TH = x_TH.to(torch.float16 if is_odd else torch.bfloat16)
    mode = low_latency(8 if is_odd else 16) if kind == "capacity" else NORMAL
    first = catch(lambda: dispatcher.dispatch(x_TH, slots_TK, mode))
    good = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64)
    second = catch(lambda: dispatcher.dispatch(*good))
    dispatcher.close()
    return first, second


@pytest.mark.parametrize(("name", "world_size"), BACKENDS)
@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_ranks_that_disagree_all_get_a_named_error(
    pool_of: PoolOf, name: str, world_size: int, kind: str
) -> None:
    seen = {"H": "bytes per row", "dtype": "code of dtype", "row format": "code of dtype"}.get(kind, kind)
    for rank, (first, second) in enumerate(pool_of(world_size).run(disagree, name, kind, 1)):
        peer = 0 if rank == 1 else 1
        assert first.startswith(f"RanksDisagree: rank {peer} made another call than rank {rank}'s dispatch")
        assert f"its {seen}" in first
        if kind not in ("slots per rank", "row format"):  # those stay different
            assert second == "no error"


SMALL, LARGE = 500, 9000  # against regions of 1 KB: many messages need several pieces


def open_wires(name: str, mask_lost: bool = False) -> Wire:
    """Open a wire with small regions."""
    return open_wire(name, dist.group.WORLD, timeout_s=20.0, region_bytes=1024, mask_lost=mask_lost)


def exchange_with_refusals(
    name: str, mask_lost: bool, is_known: bool, refusals: list[list[int]]
) -> list[str]:
    """Run rounds; each entry of `refusals` is a round and the ranks that refuse it. Return this rank's errors by round."""
    wire = open_wires(name, mask_lost)
    errors = []
    for round_, refusers in enumerate(refusals):
        largest = LARGE if round_ % 2 else SMALL
        errors.append(swap_or_refuse(wire, round_, largest, refusers, is_known=is_known))
    assert not wire.mask.values.any(), "a refusing rank must not count as lost"
    wire.close()
    return errors


WIRES = [("shm", False), ("shm", True), ("gloo", False), ("gloo", True)]


@pytest.mark.crossed("name", "mask_lost", "world_size", every=2)
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
    """Refuse on rank 0 with a text. The others return the text that they received."""
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
    wire.refuse("it is lost")
    wire.exchange(RankTable(1), None)
    assert wire.received(0).numel() == 0
