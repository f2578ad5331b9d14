"""Rows of images in a text decoder, with the plain oracle for attention: logits equal `transformers`' whole model.

No kernel is compiled, so these tests are fast. `test_images` repeats them with engines.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMultimodalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention import reference
from attention.transformers_names import CACHE
from kvcache.images import Image, rows_in, whole_chunk
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Span, Step
from moe.model import Skeleton
from moe.text_part import keep_text, use_attention
from moe.vision.places import ImagePlaces
from moe.vision.tower import Tower
from tests.support.models.seeing import draw_picture, prompt_of, write_seeing_checkpoint

NAME = "wideep_oracle"
TOLERANCE = 1e-4
Chunks = Callable[[list[Image], int, int], int]  # takes images, the first token and the tokens that are left


def attend(
    module: Any,
    query: Tensor,
    _key: Tensor,
    value: Tensor,
    _mask: Any = None,
    *,
    scaling: float,
    pages: Any,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend to the pages as the organ does."""
    shape = pages.shapes[module.layer_idx]
    layer = module.layer_idx if shape.source is None else shape.source
    out_THV = reference.paged_attention(
        query[0].contiguous(), pages.keys[layer], pages.values[layer], pages.step, scale=scaling, window=shape.window,
        chunk=shape.chunk, sees_images=shape.sees_images,
    )  # fmt: skip
    return out_THV[None, ..., : value.shape[-1]], None


class Seeing:
    """A family's text decoder, a prompt with three pictures, and the logits of the whole model."""

    def __init__(self, family: str, directory: Path) -> None:
        oracle = write_seeing_checkpoint(family, directory)
        tall, wide, large = (
            draw_picture(*size, seed, oracle.config) for seed, size in enumerate(((8, 4), (4, 8), (8, 8)))
        )
        prompt = prompt_of([3, tall, 4, large, 9, wide, 20], 1)
        with torch.inference_mode():
            self._wanted = oracle(**prompt.inputs()).logits[0]
        self._token_ids, self.images = prompt.token_ids, prompt.images(Tower(directory))
        self.shapes = Skeleton(directory).cache_shapes
        self._net = AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._net.set_experts_implementation("eager")
        assert keep_text(self._net)
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
        use_attention(self._net, NAME)
        self._places = ImagePlaces(self._net)

    def error(
        self, chunks: Chunks, images: list[Image] | None = None, shapes: list[LayerShape] | None = None
    ) -> float:
        """Run the prompt in chunks. Return the largest difference of any logit."""
        images = self.images if images is None else images
        cache = PagedCache(self.shapes if shapes is None else shapes, 20)
        cache.step = step = Step(max_tokens=256, max_sequences=1, max_blocks=16, block_tokens=16)
        found, start, length = [], 0, len(self._token_ids)
        while start < length:
            count = chunks(images, start, length - start)
            blocks = list(range(2, 2 + -(-(start + count) // 16)))
            step.fill([Span(start, count, blocks, images=rows_in(images, start, count))])
            token_T, row_R = step.inputs(self._token_ids[start : start + count], range(count))
            with torch.inference_mode(), self._places.filled(step.images):
                output = self._net(
                    input_ids=token_T[None], position_ids=step.model_positions, use_cache=True, logits_to_keep=row_R,
                    pages=cache, **{CACHE: cache},
                )  # fmt: skip
            found.append(output.logits[0])
            start += count
        return float((torch.cat(found) - self._wanted).abs().max())


def at_once(_images: list[Image], _start: int, left: int) -> int:
    return left


def in_fives(_images: list[Image], _start: int, left: int) -> int:
    return min(5, left)


def with_whole_images(images: list[Image], start: int, left: int) -> int:
    return whole_chunk(images, start, min(5, left), min(16, left))


def swapped(images: list[Image]) -> list[Image]:
    """Exchange the rows of the first and the last picture, which have equally many."""
    first, last = images[0], images[-1]
    rows = {first.digest: last.rows, last.digest: first.rows}
    return [image._replace(rows=rows.get(image.digest, image.rows)) for image in images]


def test_llama_equals_transformers_in_any_chunks(tmp_path: Path) -> None:
    seeing = Seeing("llama4", tmp_path)
    assert seeing.error(at_once) < TOLERANCE and seeing.error(in_fives) < TOLERANCE
    assert seeing.error(at_once, swapped(seeing.images)) > 100 * TOLERANCE, "the control did not fail"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing("gemma4", tmp_path_factory.mktemp("gemma4"))


def test_gemma_equals_transformers_if_images_stay_whole(gemma: Seeing) -> None:
    own = gemma.shapes
    assert [shape.sees_images for shape in own] == [True, False, True, True, False]
    assert gemma.error(at_once) < TOLERANCE and gemma.error(with_whole_images) < TOLERANCE
    wrong = {
        "swapped": gemma.error(at_once, swapped(gemma.images)),
        "cut": gemma.error(in_fives),
        "causal": gemma.error(at_once, shapes=[replace(shape, sees_images=False) for shape in own]),
        "both ways everywhere": gemma.error(
            at_once, shapes=[replace(shape, sees_images=True) for shape in own]
        ),
    }
    assert min(wrong.values()) > 100 * TOLERANCE, f"a control did not fail: {wrong}"


def test_gemmas_second_embedding_takes_the_padding_token(
    gemma: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemma._places, "_more_embeddings", None)
    assert gemma.error(at_once) > 100 * TOLERANCE
