"""Drafts of the GPU path, interpreted, equal transformers' own. Captured steps keep their starting values in place."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moe.families import UnsupportedModelError
from moe.model import Skeleton
from scheduler.policy.config import EngineConfig
from scheduler.step.parts import backend_of
from tests.moe.test_mtp import LENGTHS, TEXTS, TOLERANCE, Drafted, draft_all, wanted, worst
from tests.support.models.drafts import open_drafting, rows_of
from tests.support.models.mtp import write_mtp_checkpoint
from tests.support.ranks import RankPool

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_next", "mimo_v2_flash")


def answer(directory: Path, texts: list[list[int]]) -> list[Drafted]:
    """Draft in the interpreter."""
    return draft_all(open_drafting(directory, device="interpreter"), texts, 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_equal_transformers(family: str, interpreter: RankPool, tmp_path: Path) -> None:
    drafter = write_mtp_checkpoint(family, tmp_path)
    found: list[Drafted] = interpreter.run(answer, tmp_path, TEXTS[1:], timeout_s=400.0)[0]
    assert len(found) == len(LENGTHS) - 1
    for ours, text in zip(found, TEXTS[1:], strict=True):
        assert worst(ours, wanted(drafter, text)) < TOLERANCE


def kept_by_address(directory: Path, text: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Draft after a step, and again after its hidden values were restored at their address, as by a replay."""
    model = open_drafting(directory, device="interpreter")
    model.model.skeleton.backend.warm_up(model.model, model.cache, lambda _done, _total: None)
    assert not model.model.load_counts.table.any(), "warm-up must not be counted"
    model.forward([text])
    place, kept = model.model._hidden_TD, model.model._hidden_TD.clone()
    first = model.draft(0, rows_of(0, text[1:]))[0]
    model.forward([text[::-1]])
    assert model.model._hidden_TD is place, "a captured step would write elsewhere"
    assert not torch.equal(place[: len(text)], kept[: len(text)])
    place.copy_(kept)
    return first, model.draft(0, rows_of(0, text[1:]))[0]


@pytest.mark.slow
def test_every_step_leaves_hidden_values_at_the_same_place(interpreter: RankPool, tmp_path: Path) -> None:
    write_mtp_checkpoint("deepseek_v3", tmp_path)
    first, again = interpreter.run(kept_by_address, tmp_path, TEXTS[1], timeout_s=400.0)[0]
    assert np.array_equal(first, again)


def compiled(directory: Path) -> str:
    """Return the log about drafting layers of a model for torch.compile."""
    config = EngineConfig(
        directory=directory,
        kv_cache_bytes=1 << 20,
        device="interpreter",
        batch_invariant=False,
        enable_torch_compile=True,
        compiler="eager",
    )
    Skeleton(directory, backend_of(config))
    with pytest.raises(UnsupportedModelError) as caught:
        Skeleton(directory, backend_of(config), has_mtp=True)
    return str(caught.value)


def test_torch_compile_is_refused_beside_them(interpreter: RankPool, tmp_path: Path) -> None:
    write_mtp_checkpoint("glm4_moe", tmp_path)
    said = interpreter.run(compiled, tmp_path)[0]
    assert said == (
        "glm4_moe has layers for multi-token prediction, which --enable-torch-compile does not support: remove it; "
        "serve it with --device cpu"
    )
