"""Experts move between slots of a GPU while the model serves: verified, switched by one number each, with equal bits."""

import queue
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from expert_placement.placement import Placement
from moe.expert_weights import flat_bytes
from moe.gpu.weights.slots import DeviceSlots
from scheduler.moves.reports import MoveState
from tests.support.gpu.path import Part, build_interpreted, run_steps
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.models.published import write_published
from tests.support.ranks import RankPool

WAIT_S = 120.0
STEPS = [[Part(0, 0, 6)], [Part(0, 6, 7)]]


class Moved(NamedTuple):
    """Logits before and after a move, the tensors of a slot, and the report of the relocation."""

    before: np.ndarray
    after: np.ndarray
    states: list[MoveState]
    follows: bool  # the slot holds all tensors of its expert in the new placement
    names: set[str]  # names of the tensors of an expert's weight
    is_spoiled: bool  # control: damaged experts change the logits


def move(directory: Path, sequence: list[int]) -> Moved:
    """Exchange the experts of two slots in every layer."""
    built = build_interpreted(directory, num_spare=8)
    relocation, old = built.relocation, built.relocation.placement
    before = run_steps(built, [sequence], STEPS)[0]
    slots = old.slot_expert.copy()
    slots[:, [0, 3]] = slots[:, [3, 0]]
    target = Placement(slots, old.num_experts, old.num_ranks).with_version(old.version + 1)
    layer = built.model.layers[1]
    first = {name: tensor.clone() for name, tensor in layer.up.at(0).tensors().items()}
    reports: queue.Queue[MoveState] = queue.Queue()
    relocation.on_report = lambda report: reports.put(report.state)
    relocation.prepare(target)
    states = [reports.get(timeout=WAIT_S)]
    assert relocation.version_to_post() == target.version
    relocation.switch(target.version, 1)
    states.append(reports.get(timeout=WAIT_S))
    held = layer.up.at(3).tensors()
    follows = all(torch.equal(flat_bytes(held[name]), flat_bytes(first[name])) for name in first)
    after = run_steps(built, [sequence], STEPS)[0]
    assert isinstance(layer.up, DeviceSlots)
    for slot in range(len(layer.up.places_S)):
        parts = layer.up.at(slot).tensors()
        damaged = parts.get("scales", parts[""])
        damaged.copy_(damaged.float() / 2)
    prompt = STEPS[:1]
    is_spoiled = not np.array_equal(run_steps(built, [sequence], prompt)[0], after[: prompt[0][0].end])
    return Moved(before, after, states, follows, set(first), is_spoiled)


def check_move(directory: Path, interpreter: RankPool) -> Moved:
    """Move experts and compare."""
    generator = torch.Generator().manual_seed(2)
    sequence = torch.randint(3, VOCABULARY, (7,), generator=generator).tolist()
    moved: Moved = interpreter.run(move, directory, sequence, timeout_s=400.0)[0]
    assert moved.states == [MoveState.VERIFIED, MoveState.SERVING]
    assert moved.follows and np.array_equal(moved.before, moved.after)
    assert moved.is_spoiled, "the comparison does not detect damaged experts"
    return moved


@pytest.mark.slow
def test_a_moved_expert_serves_with_the_same_bits(interpreter: RankPool, tmp_path: Path) -> None:
    write_checkpoint("gpt_oss", tmp_path, is_shallow=True)
    assert check_move(tmp_path, interpreter).names == {"", "bias"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [("compressed-tensors NVFP4", {"scales", "row_scales"}), ("AWQ", {"scales", "zeros"})],
)
def test_a_quantised_expert_moves_whole(
    name: str, parts: set[str], interpreter: RankPool, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoint"
    write_published(
        name, directory, hidden_size=128, moe_intermediate_size=128, head_dim=64, num_hidden_layers=2
    )
    assert check_move(directory, interpreter).names == {"", *parts}
