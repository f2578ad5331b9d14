"""Checks before any weight is read."""

from pathlib import Path

import pytest

from expert_placement.files import save_placement
from scheduler.moves.start_placement import start_placement
from scheduler.policy.config import ConfigError
from server.serve.preflight.checks import (
    check_backend,
    check_compiler,
    check_nodes,
    check_start,
    note_on_redundancy,
)
from server.serve.preflight.memory import rank_experts, weight_bytes
from server.serve.preflight.model import PreflightError
from tests.support.models.fake_checkpoint import CONFIG, write_checkpoint
from tests.support.placement.placements import random_placement
from tests.support.service.starts import options_for


@pytest.mark.usefixtures("much_memory")
def test_a_good_model_passes(tmp_path: Path) -> None:
    check_start(options_for(write_checkpoint(tmp_path)), pool_sizes=[2, 2], has_front=True)


@pytest.mark.usefixtures("much_memory")
def test_more_ranks_than_experts_are_allowed(tmp_path: Path) -> None:
    check_start(options_for(write_checkpoint(tmp_path)), pool_sizes=[7], has_front=False)


@pytest.mark.usefixtures("much_memory")
def test_a_placement_for_the_model_and_the_ranks_passes_and_its_slots_count(tmp_path: Path) -> None:
    model, file = write_checkpoint(tmp_path / "model"), tmp_path / "placement.json"
    save_placement(random_placement(1, 4, 2, 3, seed=1), file)
    options = options_for(model, f"--expert-placement={file}")
    check_start(options, pool_sizes=[2, 2], has_front=True)
    weights = weight_bytes(model, CONFIG, 4)
    assert rank_experts(weights, CONFIG, options, 2).slots_per_rank == 3


@pytest.mark.parametrize(
    ("requested", "num_ranks", "note"),
    [
        (0, 3, None),
        (4, 2, None),
        (
            3,
            2,
            "num_redundant_experts is 3, but 4 are used: each of the 2 ranks has the same number of slots (4 for the 4",
        ),
        (1, 3, "num_redundant_experts is 1, but 2 are used: each of the 3 ranks"),
    ],
)
def test_redundant_experts_that_do_not_divide_by_the_ranks_are_said_aloud(
    tmp_path: Path, requested: int, num_ranks: int, note: str | None
) -> None:
    flag = f'--eplb-config={{"num_redundant_experts": {requested}}}'
    said = note_on_redundancy(options_for(write_checkpoint(tmp_path), flag), num_ranks)
    assert said is None if note is None else str(said).startswith(note)


@pytest.mark.parametrize(("requested", "num_ranks", "most"), [(5, 2, 4), (40, 2, 4), (1, 1, 0), (9, 3, 8)])
def test_more_redundant_experts_than_ranks_have_a_use_for_are_refused_in_the_ranks_own_words(
    tmp_path: Path, requested: int, num_ranks: int, most: int
) -> None:
    """The launcher once announced that it would use fewer, and then the ranks ended."""
    directory = write_checkpoint(tmp_path)
    options = options_for(directory, f'--eplb-config={{"num_redundant_experts": {requested}}}')
    with pytest.raises(
        PreflightError, match=f"use for at most {most} in addition to the model's 4 experts"
    ) as early:
        check_start(options, pool_sizes=[num_ranks] * num_ranks, has_front=False)
    with pytest.raises(ConfigError) as late:
        start_placement(1, 4, num_ranks, eplb=options.engine.eplb_config, hosts=("a",) * num_ranks, file=None)
    assert str(early.value) == f"--eplb-config: {late.value}"


def test_what_fits_the_ranks_and_the_device_passes(tmp_path: Path) -> None:
    check_backend("local", 1)
    check_nodes(0, 3, on_gpus=True)
    check_nodes(3, 6, on_gpus=False)
    check_compiler(options_for(tmp_path, "--enable-torch-compile", "--device=cuda"))
