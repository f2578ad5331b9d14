"""What ranks of a pool run: whole dispatches and combines through a wire, and the same bits they must give."""

import torch
import torch.distributed as dist

from dispatch.dispatcher import Dispatcher
from dispatch.wires.open import open_wire
from tests.dispatch.oracle import RankCase, RankResult, compute_pairs


def run_layer(dispatcher: Dispatcher, case: RankCase) -> RankResult:
    """Dispatch, compute, combine; the results are copied out of the dispatcher's buffers."""
    dispatched = dispatcher.dispatch(case.x_TH, case.slots_TK)
    x_NH, row_P, offsets, _ = dispatched
    parts = (x_NH.clone(), row_P.clone(), offsets.clone())
    y_PH = compute_pairs(x_NH, row_P, offsets, dispatcher.wire.rank)
    combined = dispatcher.combine(y_PH, case.weights_TK, dispatched)
    return RankResult(*parts, combined)


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
