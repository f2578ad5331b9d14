"""Kimi's image processor on Pillow takes the steps of `transformers`' own, which needs torchvision."""

import ast
import inspect
import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")
from PIL import Image

from server.front.images.encoder_process import read_processor
from server.front.images.kimi_processor import KimiImageProcessor, sizes_of

SHAPES = [
    (28, 28),
    (1, 1),
    (13, 500),
    (500, 13),
    (448, 448),
    (1344, 1344),
    (3000, 5000),
    (14, 9000),
    (29, 57),
]


def theirs(name: str) -> Callable[..., Any]:
    """Return a function or method of transformers' module, which cannot be imported without torchvision."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "models" / "kimi_k25" / "image_processing_kimi_k25.py"
    tree = ast.parse(path.read_text())
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    scope: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([found], []), str(path), "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("most_patches", "most_per_side"), [(16384, 512), (256, 512), (16384, 8)])
def test_sizes_are_those_of_transformers(
    shape: tuple[int, int], most_patches: int, most_per_side: int
) -> None:
    wanted = theirs("navit_resize")(*shape, 14, 2, most_patches, most_per_side)
    assert sizes_of(shape, 14, 2, most_patches, most_per_side) == wanted


def test_pixels_become_the_patches_of_transformers() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 57, 3), dtype=np.uint8)
    made = KimiImageProcessor()(images=[Image.fromarray(pixels)], return_tensors="pt")
    padded = np.zeros((56, 84, 3), np.float32)
    padded[:30, :57] = pixels
    normal = torch.from_numpy((padded / 255 - 0.5) / 0.5).permute(2, 0, 1)
    patches, lines, columns = theirs("patchify")(None, normal[None], 14)
    assert made["image_grid_thw"].tolist() == [[1, lines, columns]] == [[1, 4, 6]]
    torch.testing.assert_close(made["pixel_values"], patches[0], rtol=0, atol=1e-6)


def test_a_large_image_is_reduced_and_not_turned() -> None:
    pixels = np.zeros((280, 560, 3), np.uint8)
    pixels[:140, 280:] = 255  # above, on the right
    made = KimiImageProcessor(max_patches=50)(images=[Image.fromarray(pixels)], return_tensors="pt")
    [[_, lines, columns]] = made["image_grid_thw"].tolist()
    assert (lines, columns) == (6, 10)
    mean_HW = made["pixel_values"].mean((1, 2, 3)).reshape(lines, columns)
    assert mean_HW[0, 8] > 0.9 and mean_HW[0, 0] < -0.9 and mean_HW[4, 8] < -0.9


def test_settings_are_read_under_both_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25"}))
    path = tmp_path / "preprocessor_config.json"
    published = {
        "in_patch_limit": 99, "patch_size": 7, "merge_kernel_size": 3, "image_mean": [0.1] * 3,
        "image_std": [0.2] * 3, "fixed_output_tokens": None, "patch_limit_on_one_side": 64, "sample_fps": 2.0,
    }  # fmt: skip
    path.write_text(json.dumps({"auto_map": {}, "media_proc_cfg": published}))
    found = read_processor(tmp_path)
    assert (found.max_patches, found.patch_size, found.merge_size) == (99, 7, 3)
    assert found.size["max_height"] == 64
    assert (list(found.image_mean), list(found.image_std)) == ([0.1] * 3, [0.2] * 3)
    path.write_text(json.dumps({"max_patches": 5, "merge_size": 4}))
    found = read_processor(tmp_path)
    assert (found.max_patches, found.patch_size, found.merge_size) == (5, 14, 4)
    path.write_text(json.dumps({"media_proc_cfg": {**published, "fixed_output_tokens": 64}}))
    with pytest.raises(ValueError, match="fixed_output_tokens"):
        read_processor(tmp_path)


def test_the_defaults_are_those_of_transformers() -> None:
    own = inspect.getmembers(KimiImageProcessor)
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "models" / "kimi_k25" / "image_processing_kimi_k25.py"
    [their_class] = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Kimi_K25ImageProcessor"
    ]
    values = {}
    for node in their_class.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if isinstance(node.value, ast.Constant | ast.Dict | ast.List):
                values[name] = ast.literal_eval(node.value)
    assert {"size", "max_patches", "patch_size", "merge_size"} <= values.keys()
    for name, value in values.items():
        assert dict(own)[name] == value, name
