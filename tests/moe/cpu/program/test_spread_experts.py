"""Programs that stop only to wait for other ranks have the bits of programs with experts called from Python."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kvcache.step import Span
from moe.cpu.program.layer import LayerProgram
from moe.cpu.program.net import NetProgram
from moe.cpu.program.spread_experts import SpreadExperts
from scheduler.assembly import Assembled
from tests.fixtures import PoolOf
from tests.support.engines.serving import build
from tests.support.models.families import VOCABULARY

# By step and rank: tokens before and in each sequence's part, and the agreed number. The second rank is idle at
# times, and does not know in the first step how many rows it will receive.
STEPS = (
    ([[(0, 90), (0, 20)], [(0, 3)]], 0),
    ([[(90, 1), (20, 1)], [(3, 1)]], 8),
    ([[(91, 1), (21, 1)], []], 8),
    ([[], [(4, 30)]], 0),
    ([[(92, 1), (22, 1)], [(34, 1)]], 8),
)


class Ran(NamedTuple):
    """Results of a rank's engine."""

    logits: list[Tensor]
    counts: np.ndarray
    samples: list[Tensor]
    has_times: bool
    num_met: int  # number of exchanges by programs


def run_steps(built: Assembled) -> list[Tensor]:
    """Run this rank's steps. Return the logits of all its rows. Collective."""
    step, cache, found = built.runner.step, built.runner._cache, []
    tokens = torch.randint(3, VOCABULARY, (8, 400), generator=torch.Generator().manual_seed(dist.get_rank()))
    for of_ranks, agreed in STEPS:
        batch = of_ranks[dist.get_rank()]
        spans = [
            Span(start, length, range(row * 8, row * 8 + 8)) for row, (start, length) in enumerate(batch)
        ]
        ids = [tokens[row, start : start + length] for row, (start, length) in enumerate(batch)]
        step.fill(spans, len(batch) if agreed else 0, agreed_tokens=agreed)
        inputs = step.inputs(torch.cat([*ids, tokens[0, :0]]).tolist(), range(step.num_tokens))
        found.append(built.model.forward(inputs.token_T, cache, inputs.row_R))
    return found


def ran(directory: Path, is_spread: bool, threads: int, region_bytes: int | None) -> Ran:
    """Build an engine and run the steps twice. Nothing is sampled in the second run."""
    met: list[SpreadExperts] = []
    with pytest.MonkeyPatch.context() as patched:
        if region_bytes is not None:
            patched.setattr("dispatch.wires.shm.fitting_region_bytes", lambda _: region_bytes)
        if not is_spread:
            patched.setattr(LayerProgram, "is_spread", False)
        else:
            meet = SpreadExperts.meet_with_rows

            def note(self: SpreadExperts) -> None:
                met.append(self)
                meet(self)

            patched.setattr(SpreadExperts, "meet_with_rows", note)
        built = build(directory, max_model_len=128, threads=threads)
        logits = [*run_steps(built), *run_steps(built)]
    counts = built.model.load_counts
    samples = [layer.sample_TD for layer in built.model.layers]
    return Ran(logits, counts.table.copy(), samples, counts.experts_s > 0, len(met))


@pytest.mark.crossed("family", every=3)
@pytest.mark.parametrize(
    ("family", "threads", "region_bytes"),
    [("qwen3_moe", 1, None), ("deepseek_v3", 2, None), ("glm4_moe", 1, 2048)],
)
def test_experts_that_programs_meet_give_the_bits_of_those_that_python_asks(
    checkpoint: Callable[[str], Path], pool_of: PoolOf, family: str, threads: int, region_bytes: int | None
) -> None:
    pool, directory = pool_of(2), checkpoint(family)
    ours, theirs = (pool.run(ran, directory, is_spread, threads, region_bytes) for is_spread in (True, False))
    for one, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, one.logits, other.logits))
        assert (one.counts == other.counts).all() and one.counts.sum()
        assert all(map(torch.equal, one.samples, other.samples))
        assert one.has_times and other.has_times
        assert one.num_met > 0 == other.num_met


def rooms(directory: Path) -> list[int]:
    """Return the room for tokens per rank after each step."""
    built = build(directory, max_model_len=128)
    program = built.model.net.forward.__self__
    assert isinstance(program, NetProgram)
    found = []
    for _ in range(4):
        run_steps(built)
        found.append(program._program._activations.tokens_per_rank)
    return found


def test_a_rank_to_which_more_rows_come_than_it_knew_makes_room_for_them(
    checkpoint: Callable[[str], Path], pool_of: PoolOf
) -> None:
    of_ranks = pool_of(2).run(rooms, checkpoint("qwen3_moe"))
    # In the first round Python calls the experts, to take samples. Later rounds have room for a rank's own 110 or 30
    # tokens, and for the 113 of both ranks once these have arrived.
    assert of_ranks == [[32, 128, 128, 128], [32, 64, 64, 64]]
