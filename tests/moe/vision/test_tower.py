"""The device and the type of the image tower: on a GPU it may compute in bfloat16. The CPU takes the GPU's place.

With a GPU, `python -m pytest -m gpu tests/moe/vision/test_tower.py` compares both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe.vision.tower import Tower
from tests.support.models.seeing import draw_picture, write_seeing_checkpoint

FAMILIES = (
    "qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "mistral3", "mistral_large4", "llama4", "gemma4", "ernie4_5_vl_moe", "kimi_k25",
)  # fmt: skip


@pytest.mark.crossed("family", every=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_in_bfloat16_has_almost_the_rows_of_float32(family: str, tmp_path: Path) -> None:
    config = write_seeing_checkpoint(family, tmp_path).config
    picture = draw_picture(8, 8, 0, config)
    exact, tower = Tower(tmp_path), Tower(tmp_path, dtype=torch.bfloat16)
    assert exact.dtype is torch.float32, "on a CPU"
    model = _module_of(tower)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    buffers = [each for each in model.buffers() if each.is_floating_point()]
    assert all(each.dtype is torch.float32 for each in buffers), "rotary frequencies stay exact"
    wanted, found = (each.encode(picture.inputs) for each in (exact, tower))
    assert found.rows_LND.dtype is torch.float32 and found.rows_LND.device.type == "cpu"
    assert found[1:] == wanted[1:]
    error = (found.rows_LND - wanted.rows_LND).norm() / wanted.rows_LND.norm()
    assert 1e-5 < error < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_on_a_gpu_has_almost_the_rows_of_a_cpu(family: str, tmp_path: Path) -> None:
    config = write_seeing_checkpoint(family, tmp_path).config
    picture = draw_picture(8, 8, 0, config)
    wanted = Tower(tmp_path).encode(picture.inputs)
    for dtype, most in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        tower = Tower(tmp_path, "cuda:0", dtype=dtype)
        found, again = (tower.encode(picture.inputs) for _ in range(2))
        assert found.rows_LND.device.type == "cpu" and found[1:] == wanted[1:]
        error = (found.rows_LND - wanted.rows_LND).norm() / wanted.rows_LND.norm()
        assert error < most
        assert torch.equal(found.rows_LND, again.rows_LND), "an image has the same bits each time"


class FakeDevice:
    """Takes the place of `torch.device`: a GPU that keeps its tensors on the CPU."""

    type = "cuda"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, torch.bfloat16),
        ({"visual.merger.linear_fc1.weight": torch.float32}, torch.float32),
        ({"visual.merger.linear_fc1.weight": torch.float16}, torch.float32),
        ({"visual.merger.linear_fc1.bias": torch.float32}, torch.bfloat16),
        ({"language_model.norm.weight": torch.float32}, torch.bfloat16),
    ],
    ids=["all", "a matrix", "a matrix of halves", "a vector", "the decoder"],
)
def test_a_gpu_computes_in_bfloat16_if_the_tower_is_stored_so(
    changes: Mapping[str, torch.dtype], wanted: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_seeing_checkpoint("qwen3_vl_moe", tmp_path)
    picture = draw_picture(4, 4, 0, model.config)
    [path] = tmp_path.glob("*.safetensors")
    stored = {name: value.bfloat16() for name, value in load_file(path).items()}
    for end, dtype in changes.items():
        [name] = [name for name in stored if name.endswith(end)]
        stored[name] = stored[name].to(dtype)
    save_file(stored, path, metadata={"format": "pt"})
    assert Tower(tmp_path).dtype is torch.float32
    placed: list[Any] = []

    def to(tensor: torch.Tensor, device: Any, *more: Any) -> torch.Tensor:
        placed.append(device)
        return own(tensor, *more) if more else tensor

    own = torch.Tensor.to
    gpu = FakeDevice()
    with monkeypatch.context() as patch:
        patch.setattr(
            "moe.vision.tower.torch.device", lambda name: gpu if name == "cuda:0" else _device(name)
        )
        patch.setattr(
            torch.Tensor,
            "to",
            lambda tensor, *more, **named: (
                to(tensor, *more) if more and more[0] is gpu else own(tensor, *more, **named)
            ),
        )
        tower = Tower(tmp_path, "cuda:0")
        assert tower.dtype is wanted
        num_loaded = len(placed)
        assert num_loaded >= len([*_module_of(tower).parameters()]), "weights and buffers are on the device"
        assert tower.encode(picture.inputs).rows_LND.dtype is torch.float32
        assert len(placed) == num_loaded + 2, "and the inputs"


_device = torch.device


def _module_of(tower: Tower) -> Any:
    """Return the module with the tower's weights."""
    return tower._joining
