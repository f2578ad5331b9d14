"""Quantised checkpoints that are not served, or whose tensors do not go together: named before anything is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.families import UnsupportedModelError
from moe.load.checkpoint import CheckpointError
from moe.model import Skeleton
from tests.moe.loaded import load, refused
from tests.moe.quantised_cases import FP8, MXFP4, Case, bytes_of
from tests.support.quantise import Tensors, change_file, fp8_config


def drop(name: str) -> Callable[[Tensors], None]:
    """Take a tensor away."""
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, make: Callable[[Tensor], Tensor], source: str = "") -> Callable[[Tensors], None]:
    """Replace a tensor by what is made of it, or of another."""
    return lambda tensors: tensors.update({name: make(tensors[source or name])})


UP = "model.layers.0.mlp.experts.1.up_proj.weight"

QUERY = "model.layers.1.self_attn.q_proj.weight"

BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


def take_an_expert_away(tensors: Tensors) -> None:
    """The last, from blocks and scales."""
    for name in (BLOCKS, BLOCKS.replace("blocks", "scales")):
        tensors[name] = tensors[name][:7]


BROKEN: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "no scales": (FP8, drop(f"{UP}_scale_inv"), f"{UP} is FP8 and has no {UP}_scale_inv"),
    "no weight": (FP8, drop(UP), f"{UP}_scale_inv has no {UP} beside it"),
    "other blocks": (
        FP8,
        put(f"{UP}_scale_inv", lambda scales: scales[:1]),
        f"{UP}_scale_inv is [1, 2]; {UP} [160, 192] takes [2, 2]",
    ),
    "scales of another type": (FP8, put(f"{UP}_scale_inv", Tensor.double), "is F64, not one of F32"),
    "a weight that is not FP8": (FP8, put(UP, Tensor.float), f"{UP} has scales and is F32, not F8_E4M3"),
    "scales of a plain weight": (
        FP8,
        put("model.layers.0.mlp.gate.weight_scale_inv", lambda _: torch.ones(1, 2), UP),
        "model.layers.0.mlp.gate.weight has scales and is F32",
    ),
    "a matrix of the wrong shape": (FP8, put(QUERY, lambda codes: bytes_of(codes)[:, :64].view(codes.dtype)), "takes"),
    "no MXFP4 scales": (
        MXFP4, drop(BLOCKS.replace("blocks", "scales")), f"{BLOCKS} has no {BLOCKS.replace('blocks', 'scales')}",
    ),
    "no MXFP4 blocks": (MXFP4, drop(BLOCKS), "down_proj_scales has no blocks beside it"),
    "MXFP4 blocks of another size": (MXFP4, put(BLOCKS, lambda blocks: blocks[..., :8]), "outputs, blocks, 16"),
    "MXFP4 in another type": (MXFP4, put(BLOCKS, lambda blocks: blocks.to(torch.int8)), "are I8 and U8, not U8"),
    "MXFP4 for fewer experts": (
        MXFP4,
        take_an_expert_away,
        "down_proj: [7, 32, 64] instead of [8, 32, 64]",
    ),
    "other quantised tensors": (MXFP4, put("model.norm.weight", lambda t: t.to(torch.int8)), "1 of type I8"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_what_does_not_go_together_is_named_before_anything_is_read(
    how: str, quantised: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change, message = BROKEN[how]
    broken = shutil.copytree(quantised(name).directory, tmp_path / "broken")
    change_file(broken, change)
    assert message in refused(broken, monkeypatch)


def test_one_expert_quantised_in_part_is_refused(
    quantised: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(quantised(FP8).directory, tmp_path / "broken")

    def widen(tensors: Tensors) -> None:
        tensors[UP] = tensors[UP].float()
        del tensors[f"{UP}_scale_inv"]

    change_file(broken, widen)
    message = refused(broken, monkeypatch)
    assert f"{UP} (not quantised) for model.layers.0.mlp.experts.gate_up_proj" in message


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [("_scale_inv", float("inf"), "has a scale of inf"), ("", 0x7F, "not a number")],
)
def test_values_that_no_kernel_computes_with_are_refused(
    suffix: str, value: float, message: str, quantised: Callable[[str], Case], tmp_path: Path
) -> None:
    broken = shutil.copytree(quantised(FP8).directory, tmp_path / "broken")

    def poison(tensors: Tensors) -> None:
        bytes_of(tensors[f"{QUERY}{suffix}"])[0, 0] = value

    change_file(broken, poison)
    with pytest.raises(CheckpointError, match=f"{QUERY}.*{message}"):
        load(broken)


def configured(source: Path, target: Path, quantisation: dict[str, Any]) -> Path:
    """Copy a checkpoint's configuration with another quantisation."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return target


def test_a_plain_module_that_is_fp8_in_the_file_is_refused(
    quantised: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = quantised(FP8).directory
    listed = {**fp8_config(), "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}
    broken = configured(directory, tmp_path / "listed", listed)
    shutil.copy(directory / "model.safetensors", broken)
    assert "q_proj.weight is FP8, and modules_to_not_convert says that it is not" in refused(
        broken, monkeypatch
    )


def test_unserved_quantisations_are_refused_before_the_model_is_built(
    quantised: Callable[[str], Case], tmp_path: Path
) -> None:
    awq = configured(quantised(FP8).directory, tmp_path / "awq", {"quant_method": "awq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match=r"qwen3_moe: the checkpoint is quantised with AWQ"):
        Skeleton(awq)


@pytest.mark.parametrize(
    ("name", "quantisation"), [(MXFP4, fp8_config()), (FP8, {"quant_method": "mxfp4"})], ids=["fp8", "mxfp4"]
)
def test_a_format_that_the_familys_experts_do_not_lie_in_is_refused(
    name: str, quantisation: dict[str, Any], quantised: Callable[[str], Case], tmp_path: Path
) -> None:
    odd = configured(quantised(name).directory, tmp_path / "odd", quantisation)
    with pytest.raises(UnsupportedModelError, match=r"keeps weights as \[.*\], which checkpoints in"):
        Skeleton(odd)
