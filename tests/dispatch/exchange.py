"""Functions that ranks of a pool run: whole dispatches and combines through a wire, expected bits, errors as results."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dispatch.dispatched import TokenDispatcher
from dispatch.dispatcher import Dispatcher
from dispatch.mode import NORMAL, Mode
from dispatch.wires.open import open_wire
from tests.dispatch.oracle import RankCase, RankResult, compute_pairs, simulate


def run_layer(dispatcher: TokenDispatcher, case: RankCase, mode: Mode = NORMAL) -> RankResult:
    """Dispatch, compute, and combine into our memory. Other results are copied out of the dispatcher's buffers."""
    rank = dist.get_rank() if dist.is_initialized() and dist.get_world_size() > 1 else 0
    dispatched = dispatcher.dispatch(case.x_TH, case.slots_TK, mode)
    x_NH, row_P, offsets, *_ = dispatched
    parts = (x_NH.clone(), row_P.clone(), offsets.clone())
    y_PH = compute_pairs(x_NH, row_P, offsets, rank)
    out_TH = torch.full(case.x_TH.shape, float("nan"), dtype=case.x_TH.dtype)
    assert dispatcher.combine(y_PH, case.weights_TK, dispatched, out=out_TH) is out_TH
    return RankResult(*parts, out_TH)


def check_bits(
    results: Sequence[Sequence[RankResult]], layers: list[list[RankCase]], slots_per_rank: int
) -> None:
    """Check that every rank's results of every layer equal the oracle's."""
    for index, cases in enumerate(layers):
        for rank, want in enumerate(simulate(cases, slots_per_rank)):
            for field, ours, oracle in zip(want._fields, results[rank][index], want, strict=True):
                assert ours.dtype == oracle.dtype, f"layer {index}, rank {rank}, {field}"
                assert torch.equal(ours, oracle), f"layer {index}, rank {rank}, {field}"


def run_layers(
    name: str, layers: list[list[RankCase]], slots_per_rank: int, region_bytes: int | None
) -> list[RankResult]:
    """Run several layers, each with one case per rank, through one wire."""
    group = dist.group.WORLD
    wire = open_wire(name, group, timeout_s=20.0, region_bytes=region_bytes)
    assert wire.name == name
    dispatcher = Dispatcher(wire, slots_per_rank=slots_per_rank)
    torch.manual_seed(0)
    results = [run_layer(dispatcher, cases[wire.rank]) for cases in layers]
    dispatcher.close()
    return results


def catch(action: Callable[[], Any]) -> str:
    """Return the error's type and text, or "no error"."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - what is raised is the test's result
        return f"{type(error).__name__}: {error}"
    return "no error"
