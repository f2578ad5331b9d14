"""First placement of experts: even, with redundant copies, or from a file; and mistakes that are rejected."""

from pathlib import Path

import pytest
import torch.distributed as dist

from expert_placement.config import EplbConfig
from expert_placement.files import save_placement
from expert_placement.placement import EMPTY, Placement, linear_placement
from scheduler.moves.start_placement import start_placement
from scheduler.policy.config import ConfigError
from scheduler.step.groups import check_agreed
from tests.fixtures import PoolOf
from tests.support.placement.placements import random_placement


def start(layers: int, experts: int, ranks: int, redundant: int = 0, file: Path | None = None) -> Placement:
    """Return the first placement with all ranks on one host."""
    eplb = EplbConfig(num_redundant_experts=redundant)
    return start_placement(layers, experts, ranks, eplb=eplb, hosts=("one",) * ranks, file=file)


def test_without_a_wish_experts_are_in_order() -> None:
    placement = start(3, 10, 4)
    assert placement.digest() == linear_placement(3, 10, 4).digest()


def test_redundant_slots_hold_copies_and_are_rounded_up_to_full_ranks() -> None:
    placement = start(3, 10, 4, redundant=3)
    assert placement.slots_per_rank == 4
    assert not (placement.slot_expert == EMPTY).any()
    assert (placement.num_copies.sum(axis=1) == 16).all()
    assert placement.digest() == start(3, 10, 4, redundant=6).digest()


def test_copies_go_to_other_nodes_where_that_is_wished() -> None:
    eplb = EplbConfig(num_redundant_experts=8, min_nodes=2)
    placement = start_placement(2, 8, 4, eplb=eplb, hosts=("a", "a", "b", "b"), file=None)
    for row in placement.slot_expert:
        assert set(row[:8]) == set(row[8:]) == set(range(8))


def test_more_redundancy_than_ranks_can_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 8 in addition to the model's 8 experts"):
        start(1, 8, 2, redundant=9)
    with pytest.raises(ConfigError, match="at most 0"):
        start(1, 8, 1, redundant=1)


def test_a_file_decides(tmp_path: Path) -> None:
    placement = random_placement(2, 8, 4, 4, seed=1, version=7)
    save_placement(placement, tmp_path / "p.json")
    read = start(2, 8, 4, file=tmp_path / "p.json")
    assert (read.digest(), read.version) == (placement.digest(), 7)


def test_a_file_of_another_service_is_refused_by_its_sizes(tmp_path: Path) -> None:
    save_placement(random_placement(2, 8, 4, 4, seed=1), tmp_path / "p.json")
    with pytest.raises(
        ConfigError, match="2 layers of 8 experts on 4 ranks; this service has 2 layers of 8 experts on 2"
    ):
        start(2, 8, 2, file=tmp_path / "p.json")


def test_a_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read: No such file"):
        start(2, 8, 2, file=tmp_path / "absent.json")


def agreed(seeds: list[int]) -> str:
    """Check one placement per rank. Return the message."""
    placement = random_placement(2, 8, dist.get_world_size(), 6, seed=seeds[dist.get_rank()])
    try:
        check_agreed(placement, dist.group.WORLD)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_different_files_refuse_to_start(pool_of: PoolOf) -> None:
    assert pool_of(2).run(agreed, [1, 1]) == ["", ""]
    told = pool_of(2).run(agreed, [1, 2])
    assert all("give every node the same file" in text for text in told)
