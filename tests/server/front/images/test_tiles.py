"""Llama 4's tiles and their tokens equal those of `transformers`' processor. Two functions replace torchvision's."""

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import image_processing_backends
from transformers.image_utils import SizeDict
from transformers.models.llama4.processing_llama4 import Llama4Processor

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")
from PIL import Image

from server.front.images.encoder import EncodedImage
from server.front.images.seeing import image_support_of
from server.front.images.tiles import Canvas, TileProcessor, best_canvas, fitting
from tests.support.requests.pictures import png

TILE = 28
SIZES = (
    (20, 20),
    (28, 28),
    (29, 28),
    (27, 60),
    (100, 30),
    (30, 100),
    (90, 140),
    (5, 90),
    (300, 300),
    (1, 60),
    (113, 112),
)
NAME = "transformers.models.llama4.image_processing_llama4"
SPECIAL = {
    "<|image|>": 2,
    "<|image_start|>": 3,
    "<|image_end|>": 4,
    "<|patch|>": 5,
    "<|tile_x_separator|>": 6,
    "<|tile_y_separator|>": 7,
}


def _resize(image: Tensor, size: tuple[int, int], **_how: Any) -> Tensor:
    return functional.interpolate(image.float(), size, mode="bilinear", antialias=True).round().byte()


def _pad(image: Tensor, padding: list[int], **_fill: Any) -> Tensor:
    return functional.pad(image, (padding[0], padding[2], padding[1], padding[3]))


def _normalize(image: Tensor, mean: list[float], std: list[float], **_options: Any) -> Tensor:
    means, stds = (torch.tensor(each, dtype=image.dtype)[:, None, None] for each in (mean, std))
    return (image - means) / stds


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return `transformers`' module."""
    stand_in: Any = ModuleType("torchvision.transforms.v2.functional")
    stand_in.resize, stand_in.pad, stand_in.normalize = _resize, _pad, _normalize
    stand_in.InterpolationMode = SimpleNamespace(LANCZOS="lanczos")
    package: Any = ModuleType("torchvision.transforms.v2")
    package.functional = stand_in
    for name in ("torchvision", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(image_processing_backends, "tvF", stand_in, raising=False)
    monkeypatch.setattr(image_processing_backends, "pil_torch_interpolation_mapping", {2: "bilinear"})
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


@pytest.mark.parametrize("is_largest", [False, True])
def test_the_canvas_of_every_size_is_transformers(theirs: Any, is_largest: bool) -> None:
    possible = torch.tensor(
        theirs.find_supported_resolutions(max_num_chunks=6, patch_size=SizeDict(height=TILE, width=TILE))
    )
    for height in range(1, 200, 7):
        for width in range(1, 260, 11):
            wanted = theirs.get_best_fit((height, width), possible, resize_to_max_canvas=is_largest).tolist()
            canvas = best_canvas(height, width, TILE, 6, is_largest=is_largest)
            assert [canvas.lines * TILE, canvas.columns * TILE] == wanted
            if is_largest:
                target = tuple(wanted)
                inner = theirs.get_max_res_without_distortion((height, width), target)
                assert fitting(height, width, canvas, TILE, is_largest=True) == tuple(
                    max(1, each) for each in inner
                )


@pytest.mark.parametrize("is_largest", [False, True])
def test_tiles_are_transformers(theirs: Any, is_largest: bool) -> None:
    """Pillow and torch round a resized pixel differently, by one of 255 steps, and bfloat16 has eight bits."""
    settings = {"size": {"height": TILE, "width": TILE}, "max_patches": 6, "resize_to_max_canvas": is_largest}
    ours, whole = TileProcessor(**settings), theirs.Llama4ImageProcessor()
    canvases = set()
    for height, width in SIZES:
        picture = Image.open(BytesIO(png(width, height, height)))
        found = ours(images=[picture], return_tensors="pt")
        bytes_3HW = torch.from_numpy(ours.process_image(picture, do_convert_rgb=True).copy())
        wanted = whole._preprocess(
            images=[bytes_3HW], do_resize=True, size=SizeDict(height=TILE, width=TILE), resample=2, do_rescale=True,
            rescale_factor=1 / 255, do_normalize=True, image_mean=[0.5] * 3, image_std=[0.5] * 3, max_patches=6,
            resize_to_max_canvas=is_largest, disable_grouping=False, return_tensors="pt",
        )  # fmt: skip
        values = wanted["pixel_values"].flatten(0, -4)
        assert found["aspect_ratios"].tolist() == wanted["aspect_ratios"].tolist()
        assert found["pixel_values"].shape == values.shape and found["pixel_values"].dtype == torch.float32
        assert (found["pixel_values"] - values.float()).abs().max() < 2 / 255 + 2**-7
        canvases.add(tuple(found["aspect_ratios"][0].tolist()))
    assert len(canvases) >= 4, "the pictures do not cover several canvases"


def test_settings_come_from_the_checkpoint(tmp_path: Path) -> None:
    given = {
        "image_processor_type": "Llama4ImageProcessorFast",
        "size": {"height": 14, "width": 14},
        "max_patches": 2,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    processor = TileProcessor.from_pretrained(tmp_path, local_files_only=True)
    found = processor(images=[Image.new("RGB", (90, 30), (255, 0, 0))], return_tensors="pt")
    assert found["pixel_values"].shape == (3, 3, 14, 14) and found["aspect_ratios"].tolist() == [[1, 2]]
    assert found["pixel_values"][2].amax((1, 2)).tolist() == [1, -1, -1]


@pytest.mark.parametrize("settings", [{"size": {"height": 28, "width": 14}}, {"do_resize": False}])
def test_settings_that_cannot_give_tiles_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tiles that are not square, or do_resize is false"):
        TileProcessor(**settings)


@pytest.mark.parametrize("canvas", [Canvas(1, 1), Canvas(1, 3), Canvas(3, 1), Canvas(2, 3)])
def test_tokens_around_tiles_are_those_of_transformers(canvas: Canvas, tmp_path: Path) -> None:
    config = {"model_type": "llama4", "vision_config": {}, "image_token_index": SPECIAL["<|patch|>"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    support = image_support_of(tmp_path, SPECIAL)
    assert not support.why_not and support.tokens.shown == SPECIAL["<|image|>"]
    num_tiles = canvas.lines * canvas.columns
    num_tiles += num_tiles > 1
    answer = {"num_rows": 4 * num_tiles, "part": 4, "columns": canvas.columns}
    others = dict.fromkeys(("num_bytes", "height", "width", "decode_s", "process_s", "tower_s"), 0)
    image = EncodedImage(os.memfd_create("rows"), "ab" * 32, {**answer, **others})
    ids, ranges = image.placed(7, support.tokens)
    text = Llama4Processor._prompt_split_image(None, canvas, 4)
    assert ids == [SPECIAL[name] for name in re.findall(r"<\|\w+\|>", text)]
    rows = [each.start + row - 7 for each in ranges for row in range(each.length)]
    assert rows == [place for place, token in enumerate(ids) if token == SPECIAL["<|patch|>"]]
    assert [each.first for each in ranges] == [4 * number for number in range(num_tiles)]
