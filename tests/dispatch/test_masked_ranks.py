"""A rank that is masked as lost takes part in nothing, and what was chosen there adds nothing."""

import pytest
import torch
import torch.distributed as dist

from dispatch.dispatcher import Dispatcher
from dispatch.mode import NORMAL, Mode, low_latency
from dispatch.wires.open import open_wire
from tests.conftest import PoolOf
from tests.dispatch.exchange import run_layer
from tests.dispatch.oracle import RankCase, RankResult, make_cases, simulate

S, LOST = 4, 2


def run_without(name: str, cases: list[RankCase], mode: Mode) -> tuple[RankResult, RankResult] | None:
    """One layer with everybody, then one without rank LOST, which makes no further call."""
    wire = open_wire(name, dist.group.WORLD, timeout_s=20.0, mask_lost=True)
    dispatcher, case = Dispatcher(wire, slots_per_rank=S), cases[wire.rank]
    whole = run_layer(dispatcher, case)
    rest = None
    if wire.rank != LOST:
        wire.mask.values[LOST] = 1
        rest = run_layer(dispatcher, case, mode)
    dist.barrier()
    dispatcher.close()
    return None if rest is None else (whole, rest)


def without(case: RankCase, rank: int) -> RankCase:
    """The case as if nobody had chosen what lives on LOST, and LOST had no tokens."""
    is_there = torch.div(case.slots_TK, S, rounding_mode="floor") == LOST
    slots_TK = case.slots_TK.masked_fill(is_there, -1)
    return RankCase(*(part[:0] for part in case)) if rank == LOST else case._replace(slots_TK=slots_TK)


@pytest.mark.parametrize("name", ["shm", "gloo"])
@pytest.mark.parametrize("mode", [NORMAL, low_latency(8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_was_chosen_on_a_masked_rank_adds_nothing(
    pool_of: PoolOf, name: str, mode: Mode, dtype: torch.dtype
) -> None:
    cases = make_cases(4, [5, 8, 6], slots_per_rank=S, no_choice=0.0, dtype=dtype)
    whole, rest = simulate(cases, S), simulate([without(case, rank) for rank, case in enumerate(cases)], S)
    answers = pool_of(3).run(run_without, name, cases, mode)
    assert answers[LOST] is None
    for rank in (0, 1):
        for ours, oracle in zip(answers[rank], (whole[rank], rest[rank]), strict=True):
            for field, mine, theirs in zip(oracle._fields, ours, oracle, strict=True):
                assert torch.equal(mine, theirs), field
