"""New base weights may have the image tower of the checkpoint, but no other one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from server.front.weights.files import WeightFilesError, read_folder
from server.front.weights.towers import check_tower

TOWER, TEXT = "model.visual.blocks.0.attn.qkv.weight", "model.language_model.norm.weight"
VALUES = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()


def written(folder: Path, **tensors: Tensor) -> Path:
    folder.mkdir()
    named = {"tower": TOWER, "text": TEXT, "other": "model.visual.other"}
    save_file({named[name]: value for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return written(tmp_path / "checkpoint", tower=VALUES, text=torch.ones(3))


@pytest.mark.parametrize("part_bytes", [16 << 20, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_equal_tower_is_accepted_in_any_type(
    dtype: torch.dtype, part_bytes: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.front.weights.towers._PART_BYTES", part_bytes)
    check_tower(
        read_folder(str(written(tmp_path / "new", tower=VALUES.to(dtype), text=torch.zeros(3)))), checkpoint
    )
    changed = VALUES.to(dtype, copy=True)
    changed[4, 6] += 1
    with pytest.raises(
        WeightFilesError, match=f"changes {TOWER}, a tensor of the image tower; .*--language-model-only"
    ):
        check_tower(read_folder(str(written(tmp_path / "changed", tower=changed))), checkpoint)


@pytest.mark.parametrize(
    "tensors", [{"tower": VALUES.T.contiguous()}, {"tower": VALUES.view(torch.int16)}, {"other": VALUES}],
    ids=["shape", "type", "name"],
)  # fmt: skip
def test_another_tower_is_refused_by_name(
    tensors: dict[str, Tensor], checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(WeightFilesError, match=r"changes model\.visual\..*, a tensor of the image tower"):
        check_tower(read_folder(str(written(tmp_path / "new", **tensors))), checkpoint)


def test_weights_without_a_tower_are_not_compared(tmp_path: Path) -> None:
    check_tower(read_folder(str(written(tmp_path / "new", text=torch.ones(3)))), tmp_path / "nowhere")
