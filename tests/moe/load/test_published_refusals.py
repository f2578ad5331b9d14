"""What is wrong in checkpoints of published formats is said in a sentence: before any weight is read, or of a value, then."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe.families import UnsupportedModelError
from moe.load.checkpoint import CheckpointError
from moe.model import Skeleton
from tests.moe.loaded import Tensors, load, refused
from tests.support.models.published import in_words, write_published
from tests.support.models.quantise import change_file

EXPERT = "model.layers.0.mlp.experts.1"
UP, GATE = f"{EXPERT}.up_proj", f"{EXPERT}.gate_proj"
CT_FP8, INT4, CT_NVFP4 = (
    "compressed-tensors FP8, a scale per output", "compressed-tensors int4, groups of 32", "compressed-tensors NVFP4",
)  # fmt: skip
NVFP4, GPTQ = "ModelOpt NVFP4", "GPTQ's second format, symmetric"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`published(name)`: a checkpoint, written once."""
    root = tmp_path_factory.mktemp("published")

    def written(name: str) -> Path:
        directory = root / name.replace("'", "")
        if not directory.is_dir():
            write_published(name, directory, num_hidden_layers=1)
        return directory

    return written


def drop(name: str) -> Callable[[Tensors], None]:
    """Take a tensor away."""

    def change(tensors: Tensors) -> None:
        tensors.pop(name)

    return change


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    """Replace a tensor by what is made of it."""
    return lambda tensors: tensors.update({name: make(tensors[name])})


def make_one_plain(tensors: Tensors) -> None:
    """Gate stays as it was before, up is quantised."""
    tensors[f"{GATE}.weight"] = torch.zeros(32, 64)
    for end in ("weight_packed", "weight_scale", "weight_shape"):
        tensors.pop(f"{GATE}.{end}")


def make_one_wide(tensors: Tensors) -> None:
    """Gate and up of one expert have float32 scales."""
    for each in (UP, GATE):
        tensors[f"{each}.weight_scale"] = tensors[f"{each}.weight_scale"].float()


def make_one_fp8(tensors: Tensors) -> None:
    """The down projection of one expert only."""
    tensors[f"{EXPERT}.down_proj.weight"] = torch.zeros(64, 32).to(torch.float8_e4m3fn)
    tensors[f"{EXPERT}.down_proj.weight_scale"] = torch.ones(64, 1).half()
    tensors.pop(f"{EXPERT}.down_proj.weight_scale_2")


HEADERS: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "no scales": (CT_FP8, drop(f"{UP}.weight_scale"), f"{UP}.weight is FP8 and has no {UP}.weight_scale"),
    "no codes": (INT4, drop(f"{UP}.weight_packed"), f"has no {UP}.weight beside it"),
    "scales of int4 that are codes": (
        INT4, put(f"{UP}.weight_scale", lambda t: t.to(torch.int8)), f"{UP}.weight_scale is I8, not one of F32, BF16, F16",
    ),
    "scales of other blocks": (
        INT4, put(f"{UP}.weight_scale", lambda t: t[:, :1]),
        f"{UP}.weight_scale is [32, 1]; {UP}.weight_packed [32, 8] takes [32, 2]",
    ),
    "no second scale": (NVFP4, drop(f"{UP}.weight_scale_2"), f"{UP}.weight has no second scale"),
    "no zeros": (GPTQ, drop(f"{UP}.qzeros"), f"{UP}.qweight has no zeros beside it (weight_zero_point, qzeros)"),
    "a second scale for every output": (
        NVFP4, put(f"{UP}.weight_scale_2", lambda t: t.expand(32).clone()), f"{UP}.weight_scale_2 has 32 numbers; {UP}.weight takes",
    ),
    "zeros of another shape": (GPTQ, put(f"{UP}.qzeros", lambda t: t[:1]), f"{UP}.qzeros is [1, 4]; {UP}.qweight takes [2, 4]"),
    "inputs in another order": (
        GPTQ, lambda tensors: tensors.update({n: t.flip(0) for n, t in tensors.items() if n.endswith("g_idx")}),
        "puts inputs into another order than they have (desc_act, actorder: group)",
    ),
    "gate and up in different formats": (
        INT4, make_one_plain, f"{GATE}.weight (not quantised) for model.layers.0.mlp.experts.gate_up_proj",
    ),
    "an expert in scales of another type": (
        CT_FP8, make_one_wide,
        "(in formats that differ) for model.layers.0.mlp.experts.gate_up_proj",
    ),
    "gate and up in scales of different types": (
        CT_FP8, put(f"{UP}.weight_scale", Tensor.float), f"{GATE}.weight and {UP}.weight (in formats that differ)",
    ),
    "a format that the configuration does not name": (
        NVFP4, make_one_fp8, f"{EXPERT}.down_proj.weight is F8_E4M3 under scales of F16, of which quantization_config does not",
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
    if how == "inputs in another order":  # which takes a look at one order
        with pytest.raises(CheckpointError) as caught:
            load(broken)
        assert message in str(caught.value)
    else:
        assert message in refused(broken, monkeypatch)


def bits(index: int, value: int) -> Callable[[Tensor], Tensor]:
    """Change one byte."""

    def change(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8).view(-1)[index] = value
        return tensor

    return change


VALUES: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "a NaN of e4m3 as a scale": (NVFP4, f"{UP}.weight_scale", bits(3, 0x7F), "has a scale of nan"),
    "a global scale of 0": (NVFP4, f"{UP}.weight_scale_2", torch.zeros_like, "has a second scale of 0.0"),
    "an infinite global scale": (
        CT_NVFP4, f"{UP}.weight_global_scale", lambda t: t * float("inf"), "has a second scale of 0.0",
    ),
    "a global scale that divides by 0": (CT_NVFP4, f"{UP}.weight_global_scale", torch.zeros_like, "has a second scale of inf"),
    "a scale that is no number": (
        INT4, f"{UP}.weight_scale", lambda t: t * float("nan"), "has a scale of nan; scales are numbers below 256",
    ),
    "a weight that is no number": (CT_FP8, f"{UP}.weight", bits(9, 0xFF), "holds FP8 weights that are not a number"),
    "eight bits that are not symmetric": (
        "GPTQ of eight bits", f"{UP}.qzeros", lambda t: in_words(torch.full((1, t.shape[1] * 4), 100), 8),
        "has eight bits and zeros that are not 128",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", VALUES)
def test_values_that_cannot_be_computed_with_are_refused_before_serving(
    how: str, published: Callable[[str], Path], tmp_path: Path
) -> None:
    name, tensor, change, message = VALUES[how]
    broken = shutil.copytree(published(name), tmp_path / "broken")
    change_file(broken, put(tensor, change))
    with pytest.raises(CheckpointError, match=message.replace("(", r"\(")):
        load(broken)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not what ModelOpt writes"), ('{"quantization": {"quant_algo": "W4A8"}}', "'W4A8'")]
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
