"""Quantised experts move with their scales: bits stay equal during moves, and a flipped bit of a scale never serves."""

from pathlib import Path

import pytest
import torch

from moe.expert_weights import read_slot
from scheduler.moves.reports import Cause, MoveState
from tests.fixtures import PoolOf
from tests.scheduler.moves.test_relocation import (
    Alone,
    answers,
    moving,
    requests,
    serve_alone,
    slot_digests,
    twice,
)
from tests.support.engines.moves import Intercepted, MovedRank, Moves, build_with_copies, targets
from tests.support.engines.serving import own_share
from tests.support.models.published import write_published
from tests.support.models.quantise import write_quantised

FORMATS = {"mxfp4": ("gpt_oss", None), "fp8": ("qwen3_moe", (32, 32))}
PUBLISHED = ("ModelOpt NVFP4", "GPTQ's second format, symmetric")  # with second scales, and with zeros


@pytest.fixture(
    scope="module",
    params=["mxfp4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", *PUBLISHED))],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a quantised checkpoint."""
    directory = tmp_path_factory.mktemp("checkpoint")
    if request.param in PUBLISHED:
        write_published(request.param, directory)
    else:
        family, block = FORMATS[request.param]
        write_quantised(family, directory, block=block)
    return directory


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Alone:
    """Return what one rank answers."""
    return serve_alone(checkpoint)


def test_quantised_experts_move_whole_and_answers_keep_their_bits(
    checkpoint: Path, alone: Alone, pool_of: PoolOf
) -> None:
    parts = pool_of(2).run(moving, checkpoint, 2, {"all2all_backend": "shm"})
    assert {key: rows for moved, _ in parts for key, rows in answers(moved).items()} == twice(alone.answers)
    for moved, held in parts:
        assert not alone.has_changed(held), "a slot does not hold its expert's codes and scales"
        assert moved.states()[-1] == (2, MoveState.SERVING)


def flipping(directory: Path) -> tuple[MovedRank, bool, int]:
    """Serve while a move starts in which a bit of rank 0's scales is flipped in transit."""
    built = build_with_copies(directory, 6)
    before, start = slot_digests(built), built.relocation.placement
    scales = read_slot(built.model.layers[0], 0).tensors()["up_scales"]
    flipped: list[torch.Tensor] = []

    def flip_the_first_scales(data: torch.Tensor) -> torch.Tensor:
        if len(data) == scales.numel() * scales.element_size() and not flipped:
            flipped.append(data := data.clone())
            data[-1] ^= 1
        return data

    if torch.distributed.get_rank() == 0:
        built.relocation._channel = Intercepted(built.relocation._channel, sending=flip_the_first_scales)
    moved = Moves(built, targets(start, 1), doomed=[1]).serve(own_share(requests()))
    return moved, slot_digests(built) == before and moved.digest == start.digest(), len(flipped)


def test_a_flipped_bit_of_a_scale_never_serves(checkpoint: Path, alone: Alone, pool_of: PoolOf) -> None:
    (sender, sender_same, flipped), (receiver, receiver_same, _) = pool_of(2).run(flipping, checkpoint)
    assert flipped == 1, "no scales were sent"
    assert receiver.states() == [(1, MoveState.FAILED)]
    assert receiver.reports[0].cause is Cause.CHECK_SUM
    assert sender_same and receiver_same, "slots or placement differ from those before the move"
    found = {key: rows for moved in (sender, receiver) for key, rows in answers(moved).items()}
    assert found == alone.answers
