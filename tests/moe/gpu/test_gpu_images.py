"""The GPU path in Triton's interpreter returns the logits of `transformers`' whole model for prompts with images."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kvcache.images import Image
from moe.vision.tower import Tower
from scheduler.step.graphs import StepGraphs
from tests.support.engines.serving import request, serve
from tests.support.gpu.interpreted import needs_triton
from tests.support.gpu.path import Part, build_interpreted, mixed_steps, run_steps
from tests.support.gpu.recorded import FakeGraphs
from tests.support.models.seeing import draw_picture, prompt_of, write_seeing_checkpoint
from tests.support.ranks import RankPool

TOLERANCE = 1e-4
NUM_SERVED = 4  # tokens of an answer
NUM_AFTER = 6  # tokens of text after a prompt; the last ones are decoded
NOISY = {"gemma4": 1e-3}  # see tests/moe/vision/test_images.py
# Images of mistral3 and mistral_large4 are rows with one position each, as those of kimi_k25.
FAMILIES = (
    "qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "llama4", "kimi_k25", "gemma4", "ernie4_5_vl_moe",
)  # fmt: skip
REPLAYED = (
    "qwen3_vl_moe",
    "kimi_k25",
    "ernie4_5_vl_moe",
)  # positions on several axes and on one, experts for images
SERVED = (*REPLAYED, "gemma4")  # by the engine; images of the last stay whole

pytestmark = [pytest.mark.slow, needs_triton]


class Oracle(NamedTuple):
    """Results of `transformers`' whole model in eager float32."""

    directory: Path
    sequences: list[list[int]]
    images: list[list[Image]]
    logits: list[np.ndarray]  # [tokens, V] each
    num_prompt: list[int]  # tokens of each sequence's prompt
    greedy: list[list[int]]  # tokens after each prompt


class Found(NamedTuple):
    """Results of the GPU path."""

    plain: list[np.ndarray]
    swapped: list[np.ndarray]  # the control: rows of the two images of a sequence are exchanged
    # Of the last token of each part in steps of fixed sizes, unless `replays` is false: without graphs, and with them.
    of_parts: list[list[np.ndarray]]
    num_replays: int
    served: list[list[int]]  # greedy answers of the engine, if it serves


def make_oracle(family: str, directory: Path) -> Oracle:
    """Write a checkpoint, and compute logits of one prompt with two images and one with an image."""
    model = write_seeing_checkpoint(family, directory)
    tall, wide = (draw_picture(*size, seed, model.config) for seed, size in enumerate(((8, 4), (4, 8))))
    prompts = [prompt_of([3, tall, 2, wide, 4], 1), prompt_of([2, wide, 3], 0)]
    tower, generator = Tower(directory), np.random.default_rng(0)
    sequences = [[*prompt.token_ids, *generator.integers(3, 240, NUM_AFTER).tolist()] for prompt in prompts]
    greedy: list[list[int]] = [[] for _ in prompts]
    with torch.inference_mode():
        logits = [
            model(**prompt.inputs(sequence)).logits[0].numpy()
            for prompt, sequence in zip(prompts, sequences, strict=True)
        ]
        for prompt, tokens in zip(prompts, greedy, strict=True):
            for _ in range(NUM_SERVED):
                seen = model(**prompt.inputs([*prompt.token_ids, *tokens]))
                tokens.append(int(seen.logits[0, -1].argmax()))
    images = [prompt.images(tower) for prompt in prompts]
    return Oracle(directory, sequences, images, logits, [len(each.token_ids) for each in prompts], greedy)


def swapped(images: list[Image]) -> list[Image]:
    """Exchange the rows of the first and of the last image."""
    first, last = images[0].digest, images[-1].digest
    rows = {image.digest: image.rows for image in images}
    rows[first], rows[last] = rows[last], rows[first]
    return [image._replace(rows=rows[image.digest]) for image in images]


def steps_of_whole_images(first: int, second: int) -> list[list[Part]]:
    """Return the second sequence's prompt, the first one's next to decodes, and decodes of both. A step runs whole images."""
    steps = [[Part(1, 0, second - 4)], [Part(1, second - 4, second - 3), Part(0, 0, first - 3)]]
    steps += [
        [Part(0, first - left, first - left + 1), Part(1, second - left, second - left + 1)]
        for left in (3, 2, 1)
    ]
    return steps


def answer(oracle: Oracle, stays_whole: bool, replays: bool, serves: bool) -> Found:
    """Run the sequences in mixed steps: without graphs, and with graphs of decodes and of short steps with prompts if
    `replays`. Then let the engine serve the prompts if `serves`."""
    built = build_interpreted(oracle.directory, max_model_len=128, max_num_batched_tokens=96)
    (first, second), images = oracle.sequences, oracle.images
    lengths = len(first), len(second)
    steps = steps_of_whole_images(*lengths) if stays_whole else mixed_steps(lengths)
    plain = run_steps(built, oracle.sequences, steps, images=images)
    wrong = run_steps(built, [first], [[Part(0, 0, len(first))]], images=[swapped(images[0])])
    graphs = StepGraphs(built.model.forward, built.runner.step, built.runner.cache)  # type: ignore[arg-type]
    if replays:
        graphs.capture((1, 2), FakeGraphs(), prompt_sizes=(16, 96))
    of_parts = [
        run_steps(built, oracle.sequences, steps, forward=forward, only_last=True, images=images)
        for forward in ((built.model.forward, graphs) if replays else ())
    ]
    asked = [
        request(
            str(at),
            oracle.sequences[at][:length],
            images=images[at],
            max_tokens=NUM_SERVED,
            stop_token_ids=(),
        )
        for at, length in enumerate(oracle.num_prompt if serves else ())
    ]
    answers = serve(built, asked).token_ids
    served = [answers[str(at)] for at in range(len(asked))]
    return Found(plain, wrong, of_parts, graphs.num_replays, served)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_the_whole_model(family: str, interpreter: RankPool, tmp_path: Path) -> None:
    oracle = make_oracle(family, tmp_path)
    stays_whole, replays, serves = family == "gemma4", family in REPLAYED, family in SERVED
    (found,) = interpreter.run(answer, oracle, stays_whole, replays, serves, timeout_s=400.0)
    for ours, theirs in zip(found.plain, oracle.logits, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=NOISY.get(family, TOLERANCE), rtol=0)
    assert np.abs(found.swapped[0] - oracle.logits[0]).max() > 100 * TOLERANCE, "the control did not fail"
    assert found.served == (oracle.greedy if serves else [])
    for unreplayed, replayed in zip(*found.of_parts, strict=True):
        np.testing.assert_array_equal(replayed, unreplayed)
    assert found.num_replays == 2 * replays, "decodes after images are replayed, prompts with images are not"
