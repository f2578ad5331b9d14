"""Rotary embeddings that change with a sequence's length: each sequence has its own, also while it grows."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.engines.serving import build, request, serve, teacher_forced
from tests.support.models.families import make_model
from tests.support.models.family_sweep import prompts, write_tiny

LIMIT, STEPS, TOLERANCE = 32, 16, 1e-4
PARAMETERS: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0 + index / 10 for index in range(8)],
    "long_factor": [2.0 + index / 2 for index in range(8)],
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("longrope")
    model = make_model("mixtral", max_position_embeddings=128, rope_parameters=PARAMETERS)
    model.save_pretrained(directory)
    return directory, model


def logits_of(model: PreTrainedModel, sequence: list[int]) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = model(torch.tensor([sequence])).logits[0].numpy()
    return found


def test_each_sequence_of_a_batch_gives_what_it_gives_alone(oracle: tuple[Path, PreTrainedModel]) -> None:
    directory, model = oracle
    sequences = prompts(20, 60, LIMIT, LIMIT + 1)
    theirs = [logits_of(model, sequence) for sequence in sequences]
    for ours, wanted in zip(teacher_forced(build(directory), sequences), theirs, strict=True):
        assert np.abs(ours - wanted).max() < TOLERANCE


@pytest.mark.parametrize("tokens", [pytest.param(512, marks=pytest.mark.slow), 16])
def test_a_sequence_that_grows_long_goes_on_as_if_it_had_been(
    oracle: tuple[Path, PreTrainedModel], tokens: int
) -> None:
    """The oracle runs the whole text for every token, once for both waves."""
    directory, model = oracle

    @cache
    def last_of(text: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = logits_of(model, list(text))[-1]
        return row

    asked = prompts(20, 60, LIMIT - 1, LIMIT, 3)
    built = build(directory, max_num_batched_tokens=tokens, max_num_seqs=4)
    waves = [
        [request(f"{wave} {index}", prompt, max_tokens=STEPS) for index, prompt in enumerate(asked)]
        for wave in range(2)
    ]
    served = serve(built, *waves)
    for request_id, found in served.token_ids.items():
        text = list(asked[int(request_id.split()[1])])
        for token in found:
            best = np.sort(row := last_of(tuple(text)))
            assert row.argmax() == token or best[-1] - best[-2] < TOLERANCE, (request_id, len(text))
            text.append(token)
        assert len(found) == STEPS
    assert built.scheduler.stats.prefix_hit_tokens > 0
    assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks


def test_phimoe_s_own_code_for_it_is_run_too(tmp_path: Path) -> None:
    parameters = {**PARAMETERS, "short_mscale": 1.1, "long_mscale": 1.4}
    model = write_tiny("phimoe", tmp_path, rope_parameters=parameters, max_position_embeddings=128)
    sequences = prompts(20, 60, LIMIT, LIMIT + 1)
    for ours, sequence in zip(teacher_forced(build(tmp_path), sequences), sequences, strict=True):
        assert np.abs(ours - logits_of(model, sequence)).max() < TOLERANCE
