"""Errors in checkpoints of published formats are reported before any weight is read; errors in codes, when these are read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe.expert_weights import SpareSlots
from moe.families import UnsupportedModelError
from moe.load.checkpoint import Checkpoint, CheckpointError
from moe.load.loader import Loader
from moe.load.plan import EXPERT_INDEX, LoadPlan
from moe.load.stored_tensors import StoredTensors
from moe.model import Skeleton
from tests.moe.loaded import Tensors, record_reads, refused
from tests.support.engines.serving import build
from tests.support.models.published import in_words, write_published
from tests.support.models.quantise import change_file, write_quantised

EXPERT = "model.layers.0.mlp.experts.1"
UP, GATE, DOWN = f"{EXPERT}.up_proj", f"{EXPERT}.gate_proj", f"{EXPERT}.down_proj"
CT_FP8, INT4, CT_NVFP4 = (
    "compressed-tensors FP8, a scale per output", "compressed-tensors int4, groups of 32", "compressed-tensors NVFP4",
)  # fmt: skip
GROUPS_OF_128 = ("AWQ", "GPTQ", "compressed-tensors int4 around zeros")
WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
OSS = "gpt-oss"  # its experts are one tensor
NVFP4, GPTQ = "ModelOpt NVFP4", "GPTQ's second format, symmetric"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return `published(name)`: a checkpoint, written once."""
    root = tmp_path_factory.mktemp("published")

    def written(name: str) -> Path:
        directory = root / name.replace("'", "")
        if not directory.is_dir() and name == OSS:
            write_quantised("gpt_oss", directory, block=None)
        elif not directory.is_dir():
            write_published(name, directory, num_hidden_layers=1, **(WIDE if name in GROUPS_OF_128 else {}))
        return directory

    return written


def drop(name: str) -> Callable[[Tensors], None]:
    """Remove a tensor."""

    def change(tensors: Tensors) -> None:
        tensors.pop(name)

    return change


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    """Replace a tensor by a function of it."""
    return lambda tensors: tensors.update({name: make(tensors[name])})


def make_one_plain(tensors: Tensors) -> None:
    """Leave gate plain, so that only up is quantised."""
    tensors[f"{GATE}.weight"] = torch.zeros(32, 64)
    for end in ("weight_packed", "weight_scale", "weight_shape"):
        tensors.pop(f"{GATE}.{end}")


def make_one_wide(tensors: Tensors) -> None:
    """Use float32 scales for gate and up of one expert."""
    for each in (UP, GATE):
        tensors[f"{each}.weight_scale"] = tensors[f"{each}.weight_scale"].float()


def make_one_fp8(tensors: Tensors) -> None:
    """Use FP8 for the down projection of one expert only."""
    tensors[f"{EXPERT}.down_proj.weight"] = torch.zeros(64, 32).to(torch.float8_e4m3fn)
    tensors[f"{EXPERT}.down_proj.weight_scale"] = torch.ones(64, 1).half()
    tensors.pop(f"{EXPERT}.down_proj.weight_scale_2")


HEADERS: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "no scales": (CT_FP8, drop(f"{UP}.weight_scale"), f"{UP}.weight is FP8 and has no {UP}.weight_scale"),
    "no codes": (INT4, drop(f"{UP}.weight_packed"), f"has no matching {UP}.weight"),
    "scales of int4 that are codes": (
        INT4, put(f"{UP}.weight_scale", lambda t: t.to(torch.int8)), f"{UP}.weight_scale is I8, not one of F32, BF16, F16",
    ),
    "scales of other blocks": (
        INT4, put(f"{UP}.weight_scale", lambda t: t[:, :1]),
        f"{UP}.weight_scale is [32, 1]; {UP}.weight_packed [32, 8] needs [32, 2]",
    ),
    "no second scale": (NVFP4, drop(f"{UP}.weight_scale_2"), f"{UP}.weight has no second scale"),
    "no zeros": (GPTQ, drop(f"{UP}.qzeros"), f"{UP}.qweight has no matching zeros (weight_zero_point, qzeros)"),
    "a second scale for every output": (
        NVFP4, put(f"{UP}.weight_scale_2", lambda t: t.expand(32).clone()), f"{UP}.weight_scale_2 has 32 values; {UP}.weight needs",
    ),
    "zeros of another shape": (GPTQ, put(f"{UP}.qzeros", lambda t: t[:1]), f"{UP}.qzeros is [1, 4]; {UP}.qweight needs [2, 4]"),
    "gate and up in different formats": (
        INT4, make_one_plain, f"{GATE}.weight (not quantised) for model.layers.0.mlp.experts.gate_up_proj",
    ),
    "an expert in scales of another type": (
        CT_FP8, make_one_wide,
        "(in different formats) for model.layers.0.mlp.experts.gate_up_proj",
    ),
    "gate and up in scales of different types": (
        CT_FP8, put(f"{UP}.weight_scale", Tensor.float), f"{GATE}.weight and {UP}.weight (in different formats)",
    ),
    "a format that the configuration does not name": (
        NVFP4, make_one_fp8, f"{EXPERT}.down_proj.weight is F8_E4M3 with scales of F16, a format that quantization_config does not",
    ),
    "weights that are smoothed": (
        NVFP4, lambda tensors: tensors.update({f"{UP}.pre_quant_scale": torch.ones(64)}), f"unexpected: {UP}.pre_quant_scale",
    ),
    "a tensor of a layer that the type has not": (
        INT4, lambda tensors: tensors.update({"model.layers.7.mlp.gate.weight": torch.ones(8, 64)}),
        "unexpected: model.layers.7.mlp.gate.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", HEADERS)
def test_what_does_not_go_together_is_named_before_anything_is_read(
    how: str, published: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change, message = HEADERS[how]
    broken = shutil.copytree(published(name), tmp_path / "broken")
    change_file(broken, change)
    assert message in refused(broken, monkeypatch)


def bits(index: int, value: int) -> Callable[[Tensor], Tensor]:
    """Change one byte."""

    def change(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8).view(-1)[index] = value
        return tensor

    return change


def times(factor: float) -> Callable[[Tensor], Tensor]:
    """Multiply all scales by a number."""
    return lambda tensor: tensor * factor


INF, NAN = float("inf"), float("nan")
OUT, LAST = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.experts.7.down_proj"
FUSED = "model.layers.1.mlp.experts.down_proj_scales"
SCALES: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "FP8 in blocks": ("compressed-tensors FP8 in blocks", f"{UP}.weight_scale", times(INF), "has a scale of inf"),
    "FP8 in blocks under powers of two": (
        "FP4 experts and FP8 in blocks", f"{OUT}.scale", bits(0, 0xFF), "has a scale of nan",
    ),
    "FP8, a scale per output of a plain weight": (CT_FP8, f"{OUT}.weight_scale", bits(7, 0x7F), "has a scale of "),
    "FP8, a scale per output": (CT_FP8, f"{LAST}.weight_scale", times(NAN), "has a scale of nan; scales must be numbers below 256"),
    "FP8, a scale per matrix": (
        "FP8, a scale per matrix", f"{LAST}.weight_scale_inv", lambda t: torch.full_like(t, 256), "has a scale of 256.0",
    ),
    "MXFP8": ("MXFP8", f"{UP}.weight_scale_inv", bits(3, 0xFF), "has a scale of nan"),
    "int8": ("compressed-tensors int8", f"{UP}.weight_scale", times(-INF), "has a scale of inf"),
    "MXFP4": ("compressed-tensors MXFP4", f"{UP}.weight_scale", bits(5, 0xFF), "has a scale of nan"),
    "MXFP4, too large": ("compressed-tensors MXFP4", f"{UP}.weight_scale", bits(5, 135), "has a scale of 256.0"),
    "MXFP4 of DeepSeek": ("FP4 experts and FP8 in blocks", f"{LAST}.scale", bits(1, 0xFF), "has a scale of nan"),
    "MXFP4 of gpt-oss": (OSS, FUSED, bits(3 * 64 + 2, 0xFF), "of expert 3 has a scale of nan"),
    "NVFP4, a NaN of e4m3": (NVFP4, f"{UP}.weight_scale", bits(3, 0x7F), "has a scale of nan"),
    "NVFP4, a negative NaN of e4m3": (CT_NVFP4, f"{UP}.weight_scale", bits(4, 0xFF), "has a scale of nan"),
    "NVFP4, a second scale of 0": (
        NVFP4, f"{UP}.weight_scale_2", torch.zeros_like, "gives a second scale of 0.0; it must be a finite number, not 0",
    ),
    "NVFP4, an infinite second scale": (NVFP4, f"{LAST}.weight_scale_2", times(INF), "gives a second scale of inf"),
    "NVFP4, an infinite divisor": (CT_NVFP4, f"{UP}.weight_global_scale", times(INF), "gives a second scale of 0.0"),
    "NVFP4, a divisor of 0": (CT_NVFP4, f"{UP}.weight_global_scale", torch.zeros_like, "gives a second scale of inf"),
    "int4": (INT4, f"{UP}.weight_scale", times(NAN), "has a scale of nan; scales must be numbers below 256"),
    "int4 around zeros": ("compressed-tensors int4 around zeros", f"{LAST}.weight_scale", times(INF), "has a scale of inf"),
    "AWQ": ("AWQ", f"{UP}.scales", times(INF), "has a scale of inf"),
    "GPTQ": ("GPTQ", f"{UP}.scales", times(NAN), "has a scale of nan"),
    "GPTQ, inputs in another order": (GPTQ, "model.layers.0.mlp.experts.5.up_proj.g_idx", lambda t: t.flip(0), "reorders inputs (desc_act"),
}  # fmt: skip
# Tensors that may be read before a start is rejected: no codes, and none of the weights without quantisation.
BESIDE = ("_scale", "_scale_inv", "_scale_2", "_scales", ".scale", ".scales", ".g_idx", ".qzeros")


@pytest.mark.crossed("how", every=2)
@pytest.mark.parametrize("how", SCALES)
def test_a_damaged_scale_is_named_before_any_weight_is_read(
    how: str, published: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, tensor, change, message = SCALES[how]
    broken = shutil.copytree(published(name), tmp_path / "broken")
    change_file(broken, put(tensor, change))
    read = record_reads(monkeypatch)
    with pytest.raises(CheckpointError) as caught:
        build(broken, max_model_len=64)
    assert str(caught.value).startswith(f"{tensor} {message}")
    assert "\n" not in str(caught.value)
    assert tensor in read and all(each.endswith(BESIDE) for each in read)


def test_two_scales_that_are_too_large_together_are_named_before_any_weight_is_read(
    published: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(published(NVFP4), tmp_path / "broken")
    change_file(broken, put(f"{UP}.weight_scale_2", torch.ones_like))
    read = record_reads(monkeypatch)
    with pytest.raises(
        CheckpointError,
        match=f"{UP}.weight_scale has a scale of .* once multiplied with {UP}.weight_scale_2;",
    ):
        build(broken, max_model_len=64)
    assert all(each.endswith(BESIDE) for each in read)


def test_eight_bits_that_are_not_symmetric_are_named_before_any_weight_is_read(
    published: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(published("GPTQ of eight bits"), tmp_path / "broken")
    change_file(broken, put(f"{UP}.qzeros", lambda t: in_words(torch.full((1, t.shape[1] * 4), 100), 8)))
    read = record_reads(monkeypatch)
    with pytest.raises(CheckpointError, match=f"{UP}.weight has eight bits and zeros that are not 128"):
        build(broken, max_model_len=64)
    assert all(each.endswith(BESIDE) for each in read)


def test_a_code_that_is_not_a_number_is_found_when_it_is_read(
    published: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(published(CT_FP8), tmp_path / "broken")
    change_file(broken, put(f"{UP}.weight", bits(9, 0xFF)))
    read = record_reads(monkeypatch)
    with pytest.raises(
        CheckpointError, match=r"experts\.gate_up_proj holds FP8 weights that are not a number"
    ):
        build(broken, max_model_len=64)
    assert f"{UP}.weight" in read and "model.embed_tokens.weight" in read


@pytest.mark.parametrize("name", [NVFP4, "GPTQ", OSS])
def test_a_rank_reads_and_checks_the_scales_of_its_own_experts(
    name: str, published: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not look at the experts of other ranks."""
    broken, scale = shutil.copytree(published(name), tmp_path / "broken"), damage_of(name)
    change_file(broken, put(*scale))
    read, (loader, target) = record_reads(monkeypatch), open_loader(broken)
    loader.check_scales({target: np.array([2, -1, 7])})
    fused = {each for each in read if ".experts." in each and not EXPERT_INDEX.search(each)}
    own = {int(found.group(1)) for each in read if (found := EXPERT_INDEX.search(each))}
    assert fused == ({scale[0]} if name == OSS else set())
    assert own == (set() if name == OSS else {2, 7})
    with pytest.raises(CheckpointError, match=scale[0]):
        loader.check_scales({target: np.array([2, 1])})


@pytest.mark.parametrize("name", [NVFP4, "GPTQ", OSS])
def test_an_expert_that_is_read_later_never_serves_with_a_damaged_scale(
    name: str, published: Callable[[str], Path], tmp_path: Path
) -> None:
    """As after the loss of the rank that held it: the file was whole at the start."""
    directory, damaged = (shutil.copytree(published(name), tmp_path / each) for each in ("whole", "damaged"))
    change_file(damaged, put(*damage_of(name)))
    built = build(directory, max_model_len=64)
    held = [list(row) for row in built.relocation.placement.local(0).tolist()]
    built.model.hold([[0, 2]] * len(held), held, SpareSlots(), 0)
    with (directory / "model.safetensors").open("r+b") as file:
        file.write((damaged / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=damage_of(name)[0]):
        built.model.hold([[0, 1]] * len(held), held, SpareSlots(), 0)
    assert all(1 not in row for row in held)
    built.model.hold([[0, 3]] * len(held), held, SpareSlots(), 0)
    assert held == [[0, 3]] * len(held)


def damage_of(name: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Return a scale of the second expert of the first layer, and a change to it."""
    if name == OSS:
        return "model.layers.0.mlp.experts.down_proj_scales", bits(64 + 5, 0xFF)
    return (f"{DOWN}.weight_scale", bits(3, 0x7F)) if name == NVFP4 else (f"{DOWN}.scales", times(NAN))


def open_loader(directory: Path) -> tuple[Loader, str]:
    """Return a loader that has read headers only, and the name of the first layer's down projections."""
    skeleton = Skeleton(directory)
    parameters = {
        f"{name}.{leaf}": int(module.num_experts)
        for name, module in skeleton.experts.items()
        for leaf in dict(module.named_parameters(recurse=False))
    }
    stored = StoredTensors(Checkpoint(directory), skeleton.quantisation)
    plan = LoadPlan(skeleton.model, stored, parameters)
    return Loader(skeleton.model, stored, plan, "auto"), "model.layers.0.mlp.experts.down_proj"


UNSERVED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "hqq", "bits": 4}, "quantised with HQQ (hqq: its zeros"),
    "other bits": ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq with bits = 3"),
    "gemv": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version = 'gemv'"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "fmt = 'e5m2'"),
    "an unknown word": ({"quant_method": "brand-new"}, "quantised with 'brand-new'; supported: fp8"),
}  # fmt: skip


@pytest.mark.parametrize("how", UNSERVED)
def test_a_format_that_is_not_served_is_named_before_any_weight_is_read(
    how: str, published: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantisation, message = UNSERVED[how]
    broken = shutil.copytree(published(CT_FP8), tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    read = record_reads(monkeypatch)
    with pytest.raises(UnsupportedModelError) as caught:
        build(broken, max_model_len=64)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not read


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not a ModelOpt file"), ('{"quantization": {"quant_algo": "W4A8"}}', "'W4A8'")]
)  # fmt: skip
def test_modelopts_own_file_is_read_where_the_configuration_says_nothing(
    content: str, message: str, published: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = shutil.copytree(published("ModelOpt FP8"), tmp_path / "broken")
    (broken / "hf_quant_config.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=message):
        Skeleton(broken)
    config = json.loads((broken / "config.json").read_text())
    assert "quantization_config" not in config
