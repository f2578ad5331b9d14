"""Experts move between slots of a GPU while the model serves: verified, switched by one number each, equal bits after."""

import queue
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from expert_placement.placement import Placement
from moe.gpu.slots import DeviceSlots
from scheduler.moves.reports import MoveState
from tests.support.gpu.path import Part, build_interpreted, run_steps
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.ranks import RankPool

WAIT_S = 120.0
STEPS = [[Part(0, 0, 6)], [Part(0, 6, 7)]]


class Moved(NamedTuple):
    """Logits before and after a move, what the tensors of a slot are, and what the relocation said."""

    before: np.ndarray
    after: np.ndarray
    states: list[MoveState]
    follows: bool  # the slot's weights are those of the expert that the new placement has there
    is_spoiled: bool  # an expert that was damaged on its way would have been refused


def move(directory: Path, sequence: list[int]) -> Moved:
    """Exchange the experts of two slots in every layer."""
    built = build_interpreted(directory, num_spare=8)
    relocation, old = built.relocation, built.relocation.placement
    before = run_steps(built, [sequence], STEPS)[0]
    slots = old.slot_expert.copy()
    slots[:, [0, 3]] = slots[:, [3, 0]]
    target = Placement(slots, old.num_experts, old.num_ranks).with_version(old.version + 1)
    layer = built.model.layers[1]
    first = layer.up.at(0).tensors()[""].clone()
    reports: queue.Queue[MoveState] = queue.Queue()
    relocation.on_report = lambda report: reports.put(report.state)
    relocation.prepare(target)
    states = [reports.get(timeout=WAIT_S)]
    assert relocation.version_to_post() == target.version
    relocation.switch(target.version, 1)
    states.append(reports.get(timeout=WAIT_S))
    follows = torch.equal(layer.up.at(3).tensors()[""], first)
    after = run_steps(built, [sequence], STEPS)[0]
    assert isinstance(layer.up, DeviceSlots)
    layer.up.at(3).tensors()[""].add_(0.25)
    is_spoiled = not np.array_equal(run_steps(built, [sequence], STEPS)[0], after)
    return Moved(before, after, states, follows, is_spoiled)


@pytest.mark.slow
def test_a_moved_expert_serves_with_the_same_bits(interpreter: RankPool, tmp_path: Path) -> None:
    write_checkpoint("gpt_oss", tmp_path)  # has biases
    generator = torch.Generator().manual_seed(2)
    sequence = torch.randint(3, VOCABULARY, (7,), generator=generator).tolist()
    moved: Moved = interpreter.run(move, tmp_path, sequence, timeout_s=400.0)[0]
    assert moved.states == [MoveState.VERIFIED, MoveState.SERVING]
    assert moved.follows and np.array_equal(moved.before, moved.after)
    assert moved.is_spoiled, "the comparison sees no change"
