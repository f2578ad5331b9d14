"""Prompts with images and an adapter equal the merged model, and share cached prefixes only if both are equal."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe.vision.tower import Tower
from scheduler.policy.request import Request
from tests.moe.lora.test_adapted_model import ATTENTION, TOLERANCE, place_all
from tests.support.engines.serving import build, request, serve, teacher_forced
from tests.support.models.adapters import FUSED, SINGLE, merged, write_adapter
from tests.support.models.greedy import greedy_with_images
from tests.support.models.seeing import draw_picture, prompt_of, write_seeing_checkpoint

STEPS = 8
MODULES = (*ATTENTION, "lm_head", "embed_tokens")


@pytest.mark.parametrize("family", ["qwen3_vl_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_prompts_with_images_equal_the_merged_model(family: str, tmp_path: Path) -> None:
    model = write_seeing_checkpoint(family, tmp_path / "model")
    adapters = [
        write_adapter(
            tmp_path / f"adapter{at}", model, modules=MODULES, experts=layout, rank=4 + 13 * at, seed=at
        )
        for at, layout in enumerate((FUSED, SINGLE))
    ]
    models = [model, *(merged(model, each) for each in adapters)]
    pictures = [draw_picture(*size, seed, model.config) for seed, size in enumerate(((4, 8), (4, 8), (4, 4)))]
    # Two prompts with equal tokens and other pictures, and one with two pictures.
    prompts = [prompt_of([9, pictures[0], 20], 0), prompt_of([9, pictures[1], 20], 0)]
    prompts.append(prompt_of([2, pictures[2], 3, pictures[0], 12], 1))
    assert prompts[0].token_ids == prompts[1].token_ids
    tower = Tower(tmp_path / "model")
    images = [prompt.images(tower) for prompt in prompts]
    built = build(tmp_path / "model", max_model_len=128, enable_lora=True, max_loras=2)
    digests = place_all(built, [each.directory for each in adapters])

    def asked(name: str, at: int, place: int) -> Request:
        """Return a request for a prompt with the adapter of a place."""
        plain = request(name, prompts[at].token_ids, images=images[at], max_tokens=STEPS, stop_token_ids=())
        return replace(plain, adapter="" if place < 0 else digests[place], adapter_place=place)

    pairs = [(at, place) for at in range(len(prompts)) for place in (-1, 0, 1)]
    found = teacher_forced(
        built,
        [prompts[at].token_ids for at, _ in pairs],
        [place for _, place in pairs],
        images=[images[at] for at, _ in pairs],
    )
    served = serve(
        built,
        [asked("first", 0, 0)],
        [asked("other adapter", 0, 1)],
        [asked("other picture", 1, 0)],
        [asked("no adapter", 0, -1)],
        [asked("same", 0, 0)],
        [asked(f"{at} {place}", at, place) for at, place in pairs],
    )
    for (at, place), logits in zip(pairs, found, strict=True):
        prompt, oracle = prompts[at], models[place + 1]
        with torch.inference_mode():
            assert np.abs(logits - oracle(**prompt.inputs()).logits[0].numpy()).max() < TOLERANCE
        answer = served.token_ids[f"{at} {place}"]
        assert prompt.token_ids + answer == greedy_with_images(oracle, prompt, answer)[0]
    cached = {each.request_id: each.num_cached_tokens for each in served.outputs if each.num_cached_tokens}
    assert {name for name in cached if name[0].isalpha()} == {"same"}
    assert {"0 -1", "0 0", "0 1", "1 0"} <= set(cached)
