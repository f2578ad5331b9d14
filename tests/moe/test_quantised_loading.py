"""Quantised checkpoints load without expanding and answer as transformers does on the weights they stand for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from moe.checkpoint import CheckpointError
from moe.families import UnsupportedModelError
from moe.model import Skeleton
from moe.packed_weight import PackedWeight
from tests.conftest import PoolOf
from tests.moe.test_loading import SEQUENCES, Loaded, assert_equal_bits, headers, load, refused
from tests.support.quantise import Tensors, change_file, fp8_config, write_quantised
from tests.support.serving import build

TOLERANCE = 1e-4
# Blocks of DeepSeek's size, which end short in both directions and do not stay whole where gate and up are merged.
UNEVEN = {"hidden_size": 192, "moe_intermediate_size": 160, "num_hidden_layers": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mxfp4": ("gpt_oss", {}),
    "fp8, latent attention and shared experts": ("deepseek_v3", {"block": (32, 32)}),
    "fp8, blocks of 128": ("qwen3_moe", {"block": (128, 128), **UNEVEN}),
}
MXFP4, FP8 = "mxfp4", "fp8, blocks of 128"


class Case(NamedTuple):
    """A quantised checkpoint on disk, and the oracle's logits of SEQUENCES."""

    directory: Path
    logits: list[np.ndarray]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """`case(name)`: written once."""
    made: dict[str, Case] = {}

    def written(name: str) -> Case:
        if name not in made:
            directory = tmp_path_factory.mktemp("quantised")
            family, settings = CASES[name]
            oracle = write_quantised(family, directory, **settings)
            with torch.inference_mode():
                logits = [oracle(torch.tensor([tokens])).logits[0].numpy() for tokens in SEQUENCES]
            made[name] = Case(directory, logits)
        return made[name]

    return written


def worst(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest difference of any logit."""
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def file_bytes(directory: Path, own: Callable[[int], bool] = lambda _: True) -> tuple[int, int]:
    """Bytes of the tensors that are no experts', and of some of 8 experts."""
    shared = experts = 0
    for name, header in headers(directory).items():
        _, is_expert, rest = name.partition(".experts.")
        first = rest.partition(".")[0]
        if not is_expert:
            shared += header.num_bytes
        elif first.isdigit():
            experts += header.num_bytes * own(int(first))
        else:
            experts += sum(header.num_bytes // 8 for expert in range(8) if own(expert))
    return shared, experts


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_on_the_weights_that_are_meant(
    name: str, case: Callable[[str], Case], tmp_path: Path
) -> None:
    directory, logits = case(name)
    loaded = load(directory)
    assert worst(loaded.logits, logits) < TOLERANCE
    shared, experts = file_bytes(directory)
    assert loaded.bytes_read == shared + experts
    assert abs(loaded.expert_bytes / experts - 1) < 0.01, "experts stay in memory as they are in the file"
    swapped = shutil.copytree(directory, tmp_path / "swapped")
    change_file(swapped, swap_two_scales)
    assert worst(load(swapped).logits, logits) > 100 * TOLERANCE, "the control did not fail"


def swap_two_scales(tensors: Tensors) -> None:
    """Let two blocks of rows of every expert have each other's scales."""
    for name, tensor in tensors.items():
        if ".experts." in name and name.endswith(("_scales", "_scale_inv")):
            axis = -2 if tensor.shape[-2] > 1 else -1
            tensors[name] = tensor.roll(1, dims=axis)


@pytest.mark.parametrize("name", [MXFP4, FP8])
def test_two_ranks_read_their_own_experts_and_answer_as_one_does(
    name: str, case: Callable[[str], Case], pool_of: PoolOf
) -> None:
    directory, logits = case(name)
    ranks: list[Loaded] = pool_of(2).run(load, directory)
    alone = load(directory)
    for rank, loaded in enumerate(ranks):
        shared, experts = file_bytes(directory, lambda expert, rank=rank: expert // 4 == rank)
        assert loaded.bytes_read == shared + experts
        assert abs(loaded.expert_bytes / experts - 1) < 0.01
        assert_equal_bits(loaded.logits, alone.logits[rank::2])
        assert worst(loaded.logits, logits[rank::2]) < TOLERANCE


def test_plain_linears_stay_fp8_in_memory(case: Callable[[str], Case]) -> None:
    model = build(case(FP8).directory, max_model_len=64).model
    attention = model._net.model.layers[0].self_attn
    for module in (attention.q_proj, attention.o_proj):
        weight = module.weight
        assert isinstance(weight, PackedWeight) and weight.panels.dtype == torch.float8_e4m3fn
        ids = torch.tensor([3, 0])
        assert torch.equal(torch.nn.functional.embedding(ids, weight), weight.unpacked()[ids])
    head = model.lm_head
    assert isinstance(head, PackedWeight) and head.panels.dtype == torch.float32


def test_the_option_dtype_leaves_quantised_weights_as_they_are(case: Callable[[str], Case]) -> None:
    directory, logits = case(MXFP4)
    for dtype in ("float32", "bfloat16"):
        loaded = load(directory, dtype)
        assert abs(loaded.expert_bytes / file_bytes(directory)[1] - 1) < 0.01
    assert worst(load(directory, "float32").logits, logits) < TOLERANCE


def test_scales_in_other_types_give_the_same_bits(tmp_path: Path) -> None:
    """float32, bfloat16 and e8m0 hold powers of two alike."""
    write_quantised("qwen3_moe", tmp_path / "f32", block=(32, 32), num_hidden_layers=1)
    change_file(
        tmp_path / "f32",
        lambda tensors: tensors.update({name: power_of_two(t) for name, t in scales_of(tensors).items()}),
    )
    wanted = load(tmp_path / "f32").logits
    for dtype in (torch.bfloat16, torch.float8_e8m0fnu):
        other = shutil.copytree(tmp_path / "f32", tmp_path / str(dtype))
        tensors = load_file(other / "model.safetensors")
        tensors |= {name: scales.to(dtype) for name, scales in scales_of(tensors).items()}
        save_file(tensors, other / "model.safetensors")
        assert_equal_bits(load(other).logits, wanted)


def power_of_two(tensor: Tensor) -> Tensor:
    """The nearest by exponent."""
    return torch.ldexp(torch.ones_like(tensor), tensor.log2().round().int())


def scales_of(tensors: Tensors) -> Tensors:
    """All FP8 scales."""
    return {name: tensor for name, tensor in tensors.items() if name.endswith("_scale_inv")}


def test_fused_and_per_expert_fp8_layouts_give_the_same_bits(tmp_path: Path) -> None:
    """transformers can write experts fused, scales likewise; blocks stay whole where gate and up are merged."""
    directory = tmp_path / "each"
    write_quantised("qwen3_moe", directory, block=(32, 32), num_hidden_layers=1)
    fused = shutil.copytree(directory, tmp_path / "fused")

    def fuse(tensors: Tensors) -> None:
        prefix = "model.layers.0.mlp.experts"
        for suffix in ("", "_scale_inv"):
            parts = [
                {name: _bytes(tensors.pop(f"{prefix}.{e}.{name}.weight{suffix}")) for name in ("gate_proj", "up_proj", "down_proj")}
                for e in range(8)
            ]  # fmt: skip
            up = torch.stack([torch.cat((part["gate_proj"], part["up_proj"])) for part in parts])
            down = torch.stack([part["down_proj"] for part in parts])
            kind = torch.float32 if suffix else torch.float8_e4m3fn
            tensors[f"{prefix}.gate_up_proj{suffix}"] = up.view(kind)
            tensors[f"{prefix}.down_proj{suffix}"] = down.view(kind)

    change_file(fused, fuse)
    assert_equal_bits(load(fused).logits, load(directory).logits)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@pytest.mark.parametrize(("name", "block"), [("gpt_oss", None), ("qwen3_moe", (32, 32))])
def test_transformers_itself_reads_the_same_weights_from_these_files(
    name: str, block: tuple[int, int] | None, tmp_path: Path
) -> None:
    """Expanded by its own code they are the oracle's weights."""
    oracle = write_quantised(name, tmp_path, block=block)
    expand = (
        FineGrainedFP8Config(weight_block_size=block, dequantize=True)
        if block
        else Mxfp4Config(dequantize=True)
    )
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=expand)
    theirs = dict(read.state_dict())
    for parameter, tensor in oracle.state_dict().items():
        assert torch.equal(theirs[parameter].float(), tensor), parameter


def drop(name: str) -> Callable[[Tensors], None]:
    """Take a tensor away."""
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, make: Callable[[Tensor], Tensor], source: str = "") -> Callable[[Tensors], None]:
    """Replace a tensor by what is made of it, or of another."""
    return lambda tensors: tensors.update({name: make(tensors[source or name])})


UP = "model.layers.0.mlp.experts.1.up_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
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
    "a matrix of the wrong shape": (FP8, put(QUERY, lambda codes: _bytes(codes)[:, :64].view(codes.dtype)), "takes"),
    "no MXFP4 scales": (
        MXFP4, drop(BLOCKS.replace("blocks", "scales")), f"{BLOCKS} has no {BLOCKS.replace('blocks', 'scales')}",
    ),
    "no MXFP4 blocks": (MXFP4, drop(BLOCKS), "down_proj_scales has no blocks beside it"),
    "MXFP4 blocks of another size": (MXFP4, put(BLOCKS, lambda blocks: blocks[..., :8]), "outputs, blocks, 16"),
    "MXFP4 in another type": (MXFP4, put(BLOCKS, lambda blocks: blocks.to(torch.int8)), "are I8 and U8, not U8"),
    "MXFP4 for fewer experts": (
        MXFP4,
        lambda tensors: [put(n, lambda t: t[:7])(tensors) for n in (BLOCKS, BLOCKS.replace("blocks", "scales"))] and None,
        "down_proj: [7, 32, 64] instead of [8, 32, 64]",
    ),
    "other quantised tensors": (MXFP4, put("model.norm.weight", lambda t: t.to(torch.int8)), "1 of type I8"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_what_does_not_go_together_is_named_before_anything_is_read(
    how: str, case: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change, message = BROKEN[how]
    broken = shutil.copytree(case(name).directory, tmp_path / "broken")
    change_file(broken, change)
    assert message in refused(broken, monkeypatch)


def test_one_expert_quantised_in_part_is_refused(
    case: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(case(FP8).directory, tmp_path / "broken")

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
    suffix: str, value: float, message: str, case: Callable[[str], Case], tmp_path: Path
) -> None:
    broken = shutil.copytree(case(FP8).directory, tmp_path / "broken")

    def poison(tensors: Tensors) -> None:
        _bytes(tensors[f"{QUERY}{suffix}"])[0, 0] = value

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
    case: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = case(FP8).directory
    listed = {**fp8_config(), "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}
    broken = configured(directory, tmp_path / "listed", listed)
    shutil.copy(directory / "model.safetensors", broken)
    assert "q_proj.weight is FP8, and modules_to_not_convert says that it is not" in refused(
        broken, monkeypatch
    )


def test_unserved_quantisations_are_refused_before_the_model_is_built(
    case: Callable[[str], Case], tmp_path: Path
) -> None:
    awq = configured(case(FP8).directory, tmp_path / "awq", {"quant_method": "awq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match=r"qwen3_moe: the checkpoint is quantised with AWQ"):
        Skeleton(awq)


@pytest.mark.parametrize(
    ("name", "quantisation"), [(MXFP4, fp8_config()), (FP8, {"quant_method": "mxfp4"})], ids=["fp8", "mxfp4"]
)
def test_a_format_that_the_familys_experts_do_not_lie_in_is_refused(
    name: str, quantisation: dict[str, Any], case: Callable[[str], Case], tmp_path: Path
) -> None:
    odd = configured(case(name).directory, tmp_path / "odd", quantisation)
    with pytest.raises(UnsupportedModelError, match=r"keeps weights as \[.*\], which checkpoints in"):
        Skeleton(odd)
