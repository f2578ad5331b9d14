"""Ranks join and leave in one epoch while requests run: the tokens stay the same, and nothing leaks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expert_placement.placement import Placement
from expert_placement.resized import resized
from moe.model import Model
from scheduler.assembly import Assembled
from tests.scheduler.epochs.test_regrouping import check_left, requests, undisturbed
from tests.support.engines.crew import Crew
from tests.support.models.families import write_checkpoint

pytestmark = pytest.mark.slow


def next_home(crew: Crew, num_ranks: int) -> Placement:
    """Return a placement with another number of ranks."""
    home = crew.home
    assert home is not None, "the ranks are ready"
    load = np.zeros((home.num_layers, home.num_experts))
    return resized(home, num_ranks, -(-home.num_experts // num_ranks), load).with_version(home.version + 1)


def forbid_reads(built: Assembled) -> None:
    """Let a rank end if it reads an expert from the checkpoint while it follows an order."""
    model: Any = built.model
    true = Model.hold

    def refuse(*_: object) -> None:
        raise AssertionError("an expert is read while requests wait")

    def hold(*arguments: Any) -> None:
        model._read_expert = refuse
        true(model, *arguments)
        del model._read_expert

    model.hold = hold


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ranks_come_and_go_while_requests_run(backend: str, tmp_path: Path) -> None:
    write_checkpoint("gpt_oss", tmp_path)  # has biases
    wanted = requests(0, 24, max_tokens=120)
    with Crew(tmp_path, 2, all2all_backend=backend, prepare=forbid_reads) as crew:
        crew.submit(0, wanted[:4])
        crew.submit(1, wanted[4:8])
        home = next_home(crew, 4)
        crew.prepare(home)
        crew.resize(home)
        for rank in range(4):
            crew.submit(rank, wanted[8 + 4 * rank : 12 + 4 * rank])
        home = next_home(crew, 2)
        crew.prepare(home)
        crew.until(crew.has_begun)
        crew.resize(home)
        for rank in (2, 3):
            crew.replay(rank, rank - 2)
        crew.until(crew.is_done)
        check_left(crew)
        assert crew.faults == [] and crew.read == {0: (home.version, ""), 1: (home.version, "")}
        for rank in (2, 3):
            left = crew.left[rank]
            assert (left.threads, left.shared_files, left.sockets) == ([], [], 0)
        for rank in (0, 1):
            assert crew.left[rank].held_experts == home.local(rank).tolist()
    assert crew.tokens == undisturbed(tmp_path, wanted)
