"""Checkpoints of families on disk, for tests that do not change them, and thread counts of kernels."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dispatch.compiled.team import Team
from tests.moe.loaded import SEQUENCES
from tests.moe.quantised_cases import CASES, Case
from tests.support.models.families import write_checkpoint
from tests.support.models.quantise import write_quantised


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return `checkpoint(family)`: a family's checkpoint on disk, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def written(family: str) -> Path:
        if not (root / family).is_dir():
            write_checkpoint(family, root / family)
        return root / family

    return written


@pytest.fixture(scope="session")
def mixtral(checkpoint: Callable[[str], Path]) -> Path:
    """Return a checkpoint with one tensor per expert."""
    return checkpoint("mixtral")


@pytest.fixture(scope="session")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Return `quantised(name)`: one of CASES and its oracle's logits, written once."""
    made: dict[str, Case] = {}

    def written(name: str) -> Case:
        if name not in made:
            directory = tmp_path_factory.mktemp("quantised")
            family, settings = CASES[name]
            oracle = write_quantised(family, directory, **settings)
            with torch.inference_mode():
                logits = [oracle(torch.tensor([tokens])).logits[0].numpy() for tokens in SEQUENCES]
            made[name] = Case(directory, logits)
        return made[name]

    return written


@pytest.fixture(scope="session")
def two_threads() -> Iterator[Team]:
    """Return a team of two threads."""
    team = Team(2)
    yield team
    team.close()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def team(request: pytest.FixtureRequest, two_threads: Team, monkeypatch: pytest.MonkeyPatch) -> Team | None:
    """Return the threads that kernels use even for little work: only the test's own (None), or a team."""
    monkeypatch.setattr("dispatch.compiled.team.SHARED_NS", -1)
    return None if request.param == 1 else two_threads
