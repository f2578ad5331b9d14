"""Experts for images: which rows go to them, and what the rank counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from moe.families import UnsupportedModelError, build_on_meta
from moe.vision import image_experts
from moe.vision.tower import Tower
from tests.support.engines.serving import build, teacher_forced
from tests.support.models.families import make_config
from tests.support.models.seeing import (
    BEGIN,
    END,
    PLACE,
    SeenPrompt,
    draw_picture,
    prompt_of,
    write_seeing_checkpoint,
)

TOP_K = 2


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("ernie")
    return directory, write_seeing_checkpoint("ernie4_5_vl_moe", directory)


def seen_prompt(model: PreTrainedModel) -> SeenPrompt:
    pictures = [draw_picture(*size, seed, model.config) for seed, size in enumerate(((8, 4), (4, 4)))]
    return prompt_of([5, pictures[0], 7, pictures[1], 3])


def worst(found: np.ndarray, model: PreTrainedModel, prompt: SeenPrompt, kinds: torch.Tensor) -> float:
    """Return the largest difference of any logit from transformers' model with these kinds of its rows."""
    with torch.inference_mode():
        wanted = model(**prompt.inputs() | {"moe_mm_token_type_ids": kinds}).logits[0].numpy()
    return float(np.abs(found - wanted).max())


def test_only_the_rows_of_an_image_and_those_around_it_go_to_its_experts(
    written: tuple[Path, PreTrainedModel],
) -> None:
    directory, model = written
    prompt = seen_prompt(model)
    ids = torch.tensor([prompt.token_ids])
    right = torch.isin(ids, torch.tensor([PLACE, BEGIN, END])).int()
    [found] = teacher_forced(
        build(directory, max_model_len=128), [prompt.token_ids], images=[prompt.images(Tower(directory))]
    )
    assert worst(found, model, prompt, right) < 1e-4
    wrong = {
        "all rows to experts for text": torch.zeros_like(ids),
        "all rows to experts for images": torch.ones_like(ids),
        "the tokens around an image to experts for text": (ids == PLACE).int(),
    }
    for name, kinds in wrong.items():
        assert worst(found, model, prompt, kinds) > 1e-2, f"the control did not fail: {name}"


def test_choices_are_counted_for_both_kinds_of_experts(written: tuple[Path, PreTrainedModel]) -> None:
    directory, model = written
    prompt = seen_prompt(model)
    built = build(directory, max_model_len=128)
    built.model.load_counts.clear()
    teacher_forced(built, [prompt.token_ids], images=[prompt.images(Tower(directory))])
    names = list(built.model.skeleton.experts)
    assert [name.split(".")[-2] for name in names] == ["text_moe", "vision_moe"] * 2
    num_image = sum(token in (PLACE, BEGIN, END) for token in prompt.token_ids)
    counted = [int(layer.expert_E.sum()) for layer in built.model.load_counts.layers]
    of_text = (len(prompt.token_ids) - num_image) * TOP_K
    assert counted == [of_text, num_image * TOP_K] * 2


def test_a_text_reaches_no_expert_for_images(written: tuple[Path, PreTrainedModel]) -> None:
    directory, model = written
    prompt = prompt_of([21])
    built = build(directory, max_model_len=128)
    built.model.load_counts.clear()
    with torch.inference_mode():
        wanted = model(**prompt.inputs()).logits[0].numpy()
    [found] = teacher_forced(built, [prompt.token_ids])
    assert np.abs(found - wanted).max() < 1e-4
    counted = [int(layer.expert_E.sum()) for layer in built.model.load_counts.layers]
    assert counted == [21 * TOP_K, 0] * 2


def test_tokens_of_images_come_from_the_configuration() -> None:
    config = make_config("ernie4_5_vl_moe")
    config.image_token_id, config.image_start_token_id, config.image_end_token_id = 7, 8, 9
    config.video_token_id = config.video_start_token_id = config.video_end_token_id = 5
    assert image_experts.tokens_of_images(config) == [5, 7, 8, 9]


def test_a_block_that_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_on_meta(make_config("ernie4_5_vl_moe"))
    block = type(next(module for module in model.modules() if hasattr(module, "vision_moe")))
    own = block.forward

    def forward(self: Any, hidden_states: torch.Tensor, kinds: torch.Tensor) -> Any:
        out, logits = own(self, hidden_states, kinds)
        return out + 0.5 * hidden_states * kinds[..., None].bool(), logits

    monkeypatch.setattr(block, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="uses its experts for images in an unknown way"):
        image_experts.exchange(model)


def test_a_model_without_experts_for_images_is_unchanged() -> None:
    assert image_experts.exchange(build_on_meta(make_config("qwen3_vl_moe"))) == 0
