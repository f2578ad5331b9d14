"""Quantised checkpoints: the rows of the image tower keep their bits."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.vision.tower import Tower
from tests.support.engines.serving import build, teacher_forced
from tests.support.models.quantise import Tensors, change_file, fp8_config, is_fp8, quantise_fp8
from tests.support.models.seeing import SeenPrompt, draw_picture, prompt_of, write_seeing_checkpoint

TOLERANCE = 1e-4
BLOCK = (32, 32)
# As in published files: the tower's modules are listed one by one, or by a part of their names.
KEPT = ["lm_head", "model.language_model.layers.*.mlp.gate", "model.language_model.layers.*.mlp.experts"]
LISTS = {"one by one": [], "by a part": ["model.visual"]}


class Case(NamedTuple):
    directory: Path
    prompt: SeenPrompt
    model: PreTrainedModel

    def rows(self, directory: Path) -> list[Tensor]:
        """Return the rows of the prompt's pictures."""
        tower = Tower(directory)
        return [tower.encode(picture.inputs).rows_LND for picture in self.prompt.pictures]

    def logits(self, directory: Path) -> np.ndarray:
        """Return the logits of the prompt with the rows of the directory's own tower."""
        built = build(directory, max_model_len=128)
        [logits] = teacher_forced(
            built, [self.prompt.token_ids], images=[self.prompt.images(Tower(directory))]
        )
        return logits

    @torch.inference_mode()
    def wanted(self) -> np.ndarray:
        """Return `transformers`' logits."""
        logits: np.ndarray = self.model(**self.prompt.inputs()).logits[0].numpy()
        return logits


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Return a checkpoint with hidden sizes that blocks of scales divide."""
    model = write_seeing_checkpoint("qwen3_vl_moe", tmp_path / "plain")
    pictures = [draw_picture(*size, seed, model.config) for seed, size in enumerate(((8, 4), (4, 8)))]
    return Case(tmp_path / "plain", prompt_of([3, pictures[0], 4, pictures[1], 5]), model)


def in_fp8(case: Case, directory: Path, listed: list[str]) -> None:
    """Write the decoder's linear layers in FP8, and set the oracle to the decoded weights."""
    shutil.copytree(case.directory, directory)
    kept = [*KEPT, *listed]

    def quantise(tensors: Tensors) -> None:
        for name, tensor in list(tensors.items()):
            if "language_model" in name and is_fp8(name, tensor):
                quantised = quantise_fp8(tensors.pop(name), BLOCK)
                tensors.update({f"{name}{suffix}": part for suffix, part in quantised.stored.items()})
                case.model.get_parameter(name).data = quantised.meaning
            elif not listed and ".visual." in name and name.endswith(".weight"):
                kept.append(name.removesuffix(".weight"))

    change_file(directory, quantise)
    config = json.loads((directory / "config.json").read_text())
    described = {**fp8_config(BLOCK), "modules_to_not_convert": kept}
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": described}))


@pytest.mark.parametrize("listed", LISTS.values(), ids=LISTS)
def test_the_tower_of_a_checkpoint_in_fp8_keeps_its_bits(
    listed: list[str], case: Case, tmp_path: Path
) -> None:
    before = case.wanted()
    in_fp8(case, tmp_path / "fp8", listed)
    for ours, plain in zip(case.rows(tmp_path / "fp8"), case.rows(case.directory), strict=True):
        assert torch.equal(ours, plain)
    found = case.logits(tmp_path / "fp8")
    assert np.abs(found - case.wanted()).max() < TOLERANCE
    assert np.abs(found - before).max() > 100 * TOLERANCE, "the decoder is not quantised"
