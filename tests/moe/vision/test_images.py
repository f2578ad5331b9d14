"""Models that see return `transformers`' own tokens for prompts with images, on 1, 2 and 4 ranks."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kvcache.images import Image
from moe.families import UnsupportedModelError
from moe.load.checkpoint import Checkpoint
from moe.model import Skeleton
from moe.vision.tower import Tower
from scheduler.assembly import Assembled
from tests.fixtures import PoolOf
from tests.support.engines.serving import build, occupy, own_share, request, serve, teacher_forced
from tests.support.models.families import write_checkpoint
from tests.support.models.greedy import greedy_with_images
from tests.support.models.seeing import SeenPrompt, draw_picture, prompt_of, write_seeing_checkpoint

STEPS = 8
TOLERANCE = 1e-4
# Logits of `transformers` itself differ from its logits in float64 by up to 4e-4.
NOISY = {"gemma4": 1e-3}
FAMILIES = (
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "intern_s2_preview",
    "glm4v_moe",
    "mistral3",
    "mistral_large4",
    "llama4",
    "gemma4",
    "ernie4_5_vl_moe",
    "kimi_k25",
)


class Oracle(NamedTuple):
    """Results of transformers' whole model in eager float32."""

    directory: Path
    prompts: list[SeenPrompt]
    images: list[list[Image]]
    sequences: list[list[int]]  # prompt and greedy tokens
    logits: list[np.ndarray]  # [tokens, V] each
    alone: Assembled  # our engine, which has served all prompts alone
    guesses: list[list[int]]  # its tokens


class RankAnswer(NamedTuple):
    """One rank's share."""

    sequences: list[list[int]]
    logits: list[np.ndarray]


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Return a family's checkpoint on disk, prompts with images, and their greedy continuations."""
    directory = tmp_path_factory.mktemp(request.param)
    model = write_seeing_checkpoint(request.param, directory)
    tall, wide, small, large = (
        draw_picture(*size, seed, model.config) for seed, size in enumerate(((8, 4), (4, 8), (4, 4), (8, 8)))
    )
    prompts = [
        prompt_of([5, wide, 7], 0),
        prompt_of([3, tall, 4, wide, 9], 1),
        prompt_of([21], 2),
        prompt_of([small, 2, small, 6], 3),
        prompt_of([2, large, 9], 4),
    ]
    tower = Tower(directory)
    images = [prompt.images(tower) for prompt in prompts]
    alone, guesses = serve_share(directory, [prompt.token_ids for prompt in prompts], images)
    found = [greedy_with_images(model, *each) for each in zip(prompts, guesses, strict=True)]
    sequences, logits = [tokens for tokens, _ in found], [each.numpy() for _, each in found]
    return Oracle(directory, prompts, images, sequences, logits, alone, guesses)


def serve_share(
    directory: Path, prompts: list[list[int]], images: list[list[Image]]
) -> tuple[Assembled, list[list[int]]]:
    """Serve this rank's prompts. Return the engine, and the tokens of each."""
    built = build(directory, max_model_len=128, max_num_batched_tokens=512)
    own = own_share(list(enumerate(prompts)))
    asked = [
        request(str(index), prompt, images=images[index], max_tokens=STEPS, stop_token_ids=())
        for index, prompt in own
    ]
    served = serve(built, asked)
    return built, [served.token_ids[str(index)] for index, _ in own]


def answer(
    directory: Path, prompts: list[list[int]], images: list[list[Image]], sequences: list[list[int]]
) -> RankAnswer:
    """Serve this rank's prompts, then run its teacher-forced sequences."""
    built, tokens = serve_share(directory, prompts, images)
    made = [prompt + more for prompt, more in zip(own_share(prompts), tokens, strict=True)]
    return RankAnswer(made, teacher_forced(built, own_share(sequences), images=own_share(images)))


def tolerance_of(oracle: Oracle) -> float:
    """Return the largest difference of logits that is noise."""
    return next((noise for family, noise in NOISY.items() if family in oracle.directory.name), TOLERANCE)


def worst(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Return the largest difference of any logit."""
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("oracle", "world_size"),
    [
        pytest.param(family, size, marks=() if (family, size) == ("qwen3_vl_moe", 1) else pytest.mark.slow)
        for family in FAMILIES
        for size in (1, 2, 4)
    ],
    indirect=["oracle"],
    scope="module",
)
def test_greedy_tokens_and_logits_equal_transformers(
    oracle: Oracle, world_size: int, pool_of: PoolOf
) -> None:
    token_ids = [prompt.token_ids for prompt in oracle.prompts]
    if world_size == 1:
        logits = teacher_forced(oracle.alone, oracle.sequences, images=oracle.images)
        made = [prompt + more for prompt, more in zip(token_ids, oracle.guesses, strict=True)]
        answers = [RankAnswer(made, logits)]
    else:
        given = token_ids, oracle.images, oracle.sequences
        answers = pool_of(world_size).run(answer, oracle.directory, *given)
    for rank, found in enumerate(answers):
        share = slice(rank, None, world_size)
        assert worst(found.logits, oracle.logits[share]) < tolerance_of(oracle)
        assert found.sequences == oracle.sequences[share]


@pytest.mark.parametrize("oracle", ["qwen3_vl_moe"], indirect=True, scope="module")
def test_swapped_images_positions_and_later_rows_show_in_the_logits(oracle: Oracle) -> None:
    """The control: every part of what a request carries changes the logits."""
    built, [tall, wide] = build(oracle.directory, max_model_len=128), oracle.images[1]
    assert tall.rows is not None and wide.rows is not None and len(tall.rows) == 3
    earlier = wide.rows.copy()
    earlier[1:] = 0
    wrong = {
        "swapped": [tall._replace(rows=wide.rows), wide._replace(rows=tall.rows)],
        "turned": [tall._replace(height=tall.width, width=tall.height), wide],
        "plain": [image._replace(height=0, width=0) for image in (tall, wide)],
        "without later rows": [tall, wide._replace(rows=earlier)],
        "later rows swapped": [tall, wide._replace(rows=wide.rows[[0, 2, 1]].copy())],
    }
    for name, images in wrong.items():
        found = teacher_forced(built, [oracle.sequences[1]], images=[images])
        assert worst(found, [oracle.logits[1]]) > 100 * TOLERANCE, f"the control did not fail: {name}"


@pytest.mark.parametrize(
    "oracle",
    [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
    indirect=True,
    scope="module",
)
def test_swapped_images_show_in_the_logits_of_every_family(oracle: Oracle) -> None:
    """The control of the families that place rows only."""
    built, images = build(oracle.directory, max_model_len=128), oracle.images[1]
    rows = {image.digest: image.rows for image in images}
    assert len(rows) == 2
    swapped = dict(zip(rows, reversed(rows.values()), strict=True))
    found = teacher_forced(
        built,
        [oracle.sequences[1]],
        images=[[image._replace(rows=swapped[image.digest]) for image in images]],
    )
    assert worst(found, [oracle.logits[1]]) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "oracle",
    [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
    indirect=True,
    scope="module",
)
def test_cuts_hits_and_preemption_change_no_token(oracle: Oracle) -> None:
    """Prompts in chunks run together, twice, so that the second run continues from cached blocks inside images.

    Chunks have 11 tokens. Where images must stay whole, they have as many as the largest image.
    """
    stays_whole = any(shape.sees_images for shape in Skeleton(oracle.directory).cache_shapes)
    assert stays_whole == ("gemma4" in oracle.directory.name)
    most = 16 if stays_whole else 11
    built = build(oracle.directory, max_model_len=128, max_num_batched_tokens=most, max_num_seqs=4)
    occupy(built, leaving=14)
    waves = [
        [
            request(
                f"{wave} {index}", prompt.token_ids, images=images, max_tokens=5 * STEPS, stop_token_ids=()
            )
            for index, (prompt, images) in enumerate(zip(oracle.prompts, oracle.images, strict=True))
        ]
        for wave in range(2)
    ]
    served = serve(built, *waves)
    assert built.scheduler.stats.num_preemptions > 0
    assert any(each.num_cached_tokens for each in served.outputs if each.request_id.startswith("1"))
    for request_id, tokens in served.token_ids.items():
        index = int(request_id.split()[1])
        assert oracle.prompts[index].token_ids + tokens[:STEPS] == oracle.sequences[index]


@pytest.mark.slow
@pytest.mark.parametrize("oracle", ["gemma4"], indirect=True, scope="module")
def test_rows_of_an_image_see_later_rows_in_windowed_layers_only(oracle: Oracle) -> None:
    """The control: causal attention, and both ways in all layers, change the logits."""
    sequence, images = oracle.sequences[4], oracle.images[4]
    built = build(oracle.directory, max_model_len=128)
    shapes = built.model.skeleton.cache_shapes
    own = list(shapes)
    assert [shape.sees_images for shape in own] == [True, False, True, True, False]
    assert worst(teacher_forced(built, [sequence], images=[images]), [oracle.logits[4]]) < tolerance_of(
        oracle
    )
    for sees_images in ([False] * 5, [True] * 5):
        shapes[:] = [replace(shape, sees_images=sees) for shape, sees in zip(own, sees_images, strict=True)]
        found = teacher_forced(built, [sequence], images=[images])
        assert worst(found, [oracle.logits[4]]) > 100 * TOLERANCE, "the control did not fail"


@pytest.mark.parametrize("oracle", ["qwen3_vl_moe"], indirect=True, scope="module")
def test_an_equal_prompt_with_another_image_hits_no_cached_prefix_of_it(oracle: Oracle) -> None:
    prompt, [tall, wide] = oracle.prompts[1].token_ids, oracle.images[1]
    other = tall._replace(digest="ff" * 32, rows=None if tall.rows is None else tall.rows[:, ::-1].copy())
    built = build(oracle.directory, max_model_len=128)
    served = serve(
        built,
        [request("first", prompt, images=[tall, wide], max_tokens=2)],
        [request("same", prompt, images=[tall, wide], max_tokens=2)],
        [request("other", prompt, images=[other, wide], max_tokens=2)],
    )
    cached = {each.request_id: each.num_cached_tokens for each in served.outputs if each.num_cached_tokens}
    assert cached == {"same": len(prompt) // 16 * 16}


@pytest.mark.parametrize("oracle", ["qwen3_vl_moe"], indirect=True, scope="module")
def test_a_replayed_answer_continues_with_the_same_tokens(oracle: Oracle) -> None:
    prompt, sequence = oracle.prompts[1].token_ids, oracle.sequences[1]
    answer = sequence[len(prompt) :]
    whole = request("again", prompt, images=oracle.images[1], max_tokens=STEPS, stop_token_ids=())
    served = serve(
        build(oracle.directory, max_model_len=128), [replace(whole, replayed_ids=tuple(answer[:5]))]
    )
    assert served.token_ids["again"] == answer[5:]


@pytest.mark.parametrize("oracle", ["qwen3_vl_moe"], indirect=True, scope="module")
def test_rows_of_another_width_end_the_request_only(oracle: Oracle) -> None:
    prompt, [tall, wide] = oracle.prompts[1].token_ids, oracle.images[1]
    bad = wide._replace(rows=np.zeros((3, 8, 5), np.float32))
    built = build(oracle.directory, max_model_len=128)
    served = serve(
        built,
        [
            request("bad", prompt, images=[tall, bad], max_tokens=2),
            request("good", prompt, images=[tall, wide], max_tokens=2, stop_token_ids=()),
        ],
    )
    [error] = [each.error for each in served.outputs if each.request_id == "bad"]
    assert "expected 8 rows or more of 64 values" in error
    assert prompt + served.token_ids["good"] == oracle.sequences[1][: len(prompt) + 2]


@pytest.mark.parametrize("oracle", ["qwen3_vl_moe"], indirect=True, scope="module")
def test_the_tower_reads_nothing_of_the_decoder(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    own = Checkpoint.read

    def recorded(self: Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return own(self, name)

    monkeypatch.setattr(Checkpoint, "read", recorded)
    Tower(oracle.directory)
    assert read and all(".visual." in name for name in read)


def test_a_model_without_a_tower_is_refused(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path)
    with pytest.raises(UnsupportedModelError, match="has no image tower"):
        Tower(tmp_path)
