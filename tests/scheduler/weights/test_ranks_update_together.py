"""Several ranks change their base weights at one step, with copies of experts, moves, lost ranks and ranks that return."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expert_placement.config import EplbConfig
from scheduler.policy.request import Request
from scheduler.weights.versions import WeightAction, WeightDigests, WeightOrder, WeightState
from tests.scheduler.weights.test_versions_served import requests
from tests.support.engines.crew import Crew, Doom
from tests.support.engines.serving import build, serve
from tests.support.engines.versions import FILE, digests_of, stage, version, write_other
from tests.support.models.families import write_checkpoint

pytestmark = pytest.mark.slow
COPIES = {"eplb_config": EplbConfig(num_redundant_experts=2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four checkpoints of one configuration."""
    made = [tmp_path_factory.mktemp(f"seed{seed}") for seed in range(4)]
    for seed, directory in enumerate(made):
        write_checkpoint("qwen3_moe", directory, seed=seed)
    return made


@pytest.fixture
def crew(folders: list[Path]) -> Iterator[Crew]:
    with Crew(folders[0], 2, **COPIES) as running:
        yield running


def alone(directory: Path, wanted: list[Request]) -> dict[str, list[int]]:
    return serve(build(directory, max_model_len=320), wanted).token_ids


def ask(crew: Crew, name: str, **how: Any) -> dict[str, list[int]]:
    """Serve requests on all members. Return their tokens."""
    wanted = requests(name, **how)
    for place, rank in enumerate(crew.members):
        crew.submit(rank, wanted[place :: len(crew.members)])
    crew.until(lambda: crew.is_done(*(each.request_id for each in wanted)))
    return {each.request_id: crew.tokens[each.request_id] for each in wanted}


def merged(crew: Crew, number: int) -> WeightOrder:
    """Return the order to serve a staged version, with all ranks' check sums. Copies must have equal ones."""
    found = [
        digests_of(each)
        for each in crew.weight_reports
        if each.number == number and each.state is WeightState.STAGED
    ]
    assert len({each.plain for each in found}) == 1
    sums_RLE = np.stack([each.experts_LE for each in found])
    most_LE = sums_RLE.max(axis=0)
    assert ((sums_RLE == most_LE) | (sums_RLE == 0)).all() and (most_LE != 0).all()
    return WeightOrder(
        action=WeightAction.SERVE,
        version=crew.versions[number],
        digests=WeightDigests(found[0].plain, most_LE),
    )


def stage_all(crew: Crew, number: int, folder: Path) -> None:
    crew.order_weights(stage(version(number, folder)))
    crew.until(
        lambda: all(crew.weight_states(number).get(rank) is WeightState.STAGED for rank in crew.members)
    )


def update(crew: Crew, number: int, folder: Path) -> None:
    stage_all(crew, number, folder)
    crew.order_weights(merged(crew, number))
    crew.until(lambda: is_served(crew, number))


def is_served(crew: Crew, number: int) -> bool:
    return all(crew.weight_states(number).get(rank) is WeightState.SERVING for rank in crew.members)


def test_all_ranks_switch_at_one_step_while_they_serve(crew: Crew, folders: list[Path]) -> None:
    stage_all(crew, 1, folders[1])
    wanted = requests("open", count=6, max_tokens=200)
    for rank in (0, 1):
        crew.submit(rank, wanted[rank::2])
    crew.until(crew.has_begun)
    crew.order_weights(merged(crew, 1))
    crew.until(lambda: is_served(crew, 1))
    steps = {each.step for each in crew.weight_reports if each.state is WeightState.SERVING}
    assert len(steps) == 1
    assert ask(crew, "after") == alone(folders[1], requests("after"))
    crew.until(crew.is_done)
    old = alone(folders[0], wanted)
    for each in wanted:
        tokens = crew.tokens[each.request_id]
        same = next(
            (
                at
                for at, (one, other) in enumerate(zip(tokens, old[each.request_id], strict=True))
                if one != other
            ),
            len(tokens),
        )
        again = Request(**{**vars(each), "replayed_ids": tuple(tokens[:same])})
        if same < len(tokens):
            assert tokens[same:] == alone(folders[1], [again])[each.request_id]
    crew.stop()


def test_many_updates_between_moves_of_experts(crew: Crew, folders: list[Path]) -> None:
    assert crew.home is not None
    home = crew.home
    for number in (1, 2, 3):
        update(crew, number, folders[number])
        halves = np.split(home.slot_expert, 2, axis=1)
        slots = np.concatenate(halves[:: -1 if number % 2 else 1], axis=1)
        target = type(home)(slots, home.num_experts, home.num_ranks).with_version(number + 10)
        num_before = len(crew.reports)
        crew.move(target)
        crew.until(lambda count=num_before: len(crew.reports) >= count + 4)  # type: ignore[misc]
        assert ask(crew, f"after{number}") == alone(folders[number], requests(f"after{number}"))
    crew.stop()


def test_a_rank_that_was_killed_returns_with_the_newest_weights(crew: Crew, folders: list[Path]) -> None:
    update(crew, 1, folders[1])
    crew.kill(1)
    crew.order([0])
    crew.until(lambda: crew.serve_in(1))
    assert ask(crew, "alone") == alone(folders[1], requests("alone"))
    crew.bring_back(1)
    crew.order_weights(crew.weights, to=[1])
    crew.until(
        lambda: crew.weight_reports[-1].rank == 1 and crew.weight_reports[-1].state is WeightState.STAGED
    )
    crew.order([0, 1])
    crew.until(lambda: crew.serve_in(2))
    assert crew.weight_states(1)[1] is WeightState.SERVING
    assert ask(crew, "both") == alone(folders[1], requests("both"))
    crew.stop()


@pytest.mark.parametrize("is_told", [True, False])
def test_a_rank_that_is_lost_before_the_switch_does_not_divide_the_others(
    folders: list[Path], is_told: bool
) -> None:
    """The order to serve is final: the survivors serve the new weights even if they got it after the loss."""
    with Crew(folders[0], 3, **COPIES) as crew:
        stage_all(crew, 1, folders[1])
        order = merged(crew, 1)
        if is_told:
            crew.order_weights(order, to=[0])  # rank 0 posts it; the others do not, so no rank switches
        crew.kill(2)
        crew.order_weights(order, to=[0, 1])
        crew.order([0, 1])
        crew.until(lambda: crew.serve_in(1))
        assert crew.weight_states(1)[0] is crew.weight_states(1)[1] is WeightState.SERVING
        assert ask(crew, "after") == alone(folders[1], requests("after"))
        crew.stop()


def test_a_rank_that_dies_while_it_loads_leaves_the_old_weights(folders: list[Path]) -> None:
    doom = Doom(function="scheduler.weights.loading.check_facts")
    with Crew(folders[0], 2, dooms={1: doom}, **COPIES) as crew:
        one = version(1, folders[1])
        wanted = requests("open", max_tokens=120)
        crew.submit(0, wanted)
        crew.until(crew.has_begun)
        crew.order_weights(stage(one))
        crew.until(lambda: crew.lost == [1])
        crew.order_weights(WeightOrder(action=WeightAction.DROP, version=one), to=[0])
        crew.order([0])
        crew.until(crew.is_done)
        assert {each.request_id: crew.tokens[each.request_id] for each in wanted} == alone(folders[0], wanted)
        crew.stop()


def test_an_expert_of_a_lost_rank_is_read_from_the_new_weights_and_verified(
    folders: list[Path], tmp_path: Path
) -> None:
    changing = write_other("qwen3_moe", tmp_path / "b", seed=1)
    with Crew(folders[0], 2) as crew:
        update(crew, 1, changing)
        with (changing / FILE).open("r+b") as file:
            file.write((folders[2] / FILE).read_bytes())
        crew.kill(1)
        crew.order([0])
        crew.until(lambda: bool(crew.faults))
        [(rank, fault)] = crew.faults[-1:]
        assert rank == 0 and fault.is_final and "is not the one that serves" in fault.reason
