"""Quantised checkpoints load without expansion and answer like transformers on the dequantised weights."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from moe.cpu.weights.packed_weight import PackedWeight
from tests.fixtures import PoolOf
from tests.moe.loaded import Loaded, assert_equal_bits, file_bytes, load
from tests.moe.quantised_cases import CASES, FP8, MXFP4, Case, bytes_of
from tests.support.engines.serving import build
from tests.support.models.quantise import Tensors, change_file, write_quantised

TOLERANCE = 1e-4


def worst(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Return the largest difference of any logit."""
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.crossed("name", every=2)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_on_the_weights_that_are_meant(
    name: str, quantised: Callable[[str], Case], tmp_path: Path
) -> None:
    directory, logits = quantised(name)
    loaded = load(directory)
    assert worst(loaded.logits, logits) < TOLERANCE
    shared, experts = file_bytes(directory)
    assert loaded.bytes_read == shared + experts
    assert abs(loaded.expert_bytes / experts - 1) < 0.01, "experts in memory must have the size of the file's"
    swapped = shutil.copytree(directory, tmp_path / "swapped")
    change_file(swapped, swap_two_scales)
    assert worst(load(swapped).logits, logits) > 100 * TOLERANCE, "the control did not fail"


def swap_two_scales(tensors: Tensors) -> None:
    """Swap the scales of two blocks of rows in every expert."""
    for name, tensor in tensors.items():
        if ".experts." in name and name.endswith(("_scales", "_scale_inv")):
            axis = -2 if tensor.shape[-2] > 1 else -1
            tensors[name] = tensor.roll(1, dims=axis)


@pytest.mark.crossed("name", every=2)
@pytest.mark.parametrize("name", [MXFP4, FP8])
def test_two_ranks_read_their_own_experts_and_answer_as_one_does(
    name: str, quantised: Callable[[str], Case], pool_of: PoolOf
) -> None:
    directory, logits = quantised(name)
    ranks: list[Loaded] = pool_of(2).run(load, directory)
    alone = load(directory)
    for rank, loaded in enumerate(ranks):
        shared, experts = file_bytes(directory, own=lambda expert, rank=rank: expert // 4 == rank)
        assert loaded.bytes_read == shared + experts
        assert abs(loaded.expert_bytes / experts - 1) < 0.01
        assert_equal_bits(loaded.logits, alone.logits[rank::2])
        assert worst(loaded.logits, logits[rank::2]) < TOLERANCE


def test_plain_linears_stay_fp8_in_memory(quantised: Callable[[str], Case]) -> None:
    model = build(quantised(FP8).directory, max_model_len=64).model
    attention = model.net.model.layers[0].self_attn
    for module in (attention.q_proj, attention.o_proj):
        weight = module.weight
        assert isinstance(weight, PackedWeight) and weight.panels.dtype == torch.float8_e4m3fn
        ids = torch.tensor([3, 0])
        assert torch.equal(torch.nn.functional.embedding(ids, weight), weight.plain()[ids])
    head = model.lm_head
    assert isinstance(head, PackedWeight) and head.panels.dtype == torch.float32


def test_the_option_dtype_leaves_quantised_weights_as_they_are(quantised: Callable[[str], Case]) -> None:
    directory, logits = quantised(MXFP4)
    loaded = {dtype: load(directory, dtype) for dtype in ("float32", "bfloat16")}
    for each in loaded.values():
        assert abs(each.expert_bytes / file_bytes(directory)[1] - 1) < 0.01
    assert worst(loaded["float32"].logits, logits) < TOLERANCE


def test_scales_in_other_types_give_the_same_bits(tmp_path: Path) -> None:
    """float32, bfloat16 and e8m0 all represent powers of two exactly."""
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
    """Return the nearest power of two by exponent."""
    return torch.ldexp(torch.ones_like(tensor), tensor.log2().round().int())


def scales_of(tensors: Tensors) -> Tensors:
    """Return all FP8 scales."""
    return {name: tensor for name, tensor in tensors.items() if name.endswith("_scale_inv")}


def test_fused_and_per_expert_fp8_layouts_give_the_same_bits(tmp_path: Path) -> None:
    """transformers can write fused experts and scales. Blocks stay whole when gate and up are merged."""
    directory = tmp_path / "each"
    write_quantised("qwen3_moe", directory, block=(32, 32), num_hidden_layers=1)
    fused = shutil.copytree(directory, tmp_path / "fused")

    def fuse(tensors: Tensors) -> None:
        prefix = "model.layers.0.mlp.experts"
        for suffix in ("", "_scale_inv"):
            parts = [
                {name: bytes_of(tensors.pop(f"{prefix}.{e}.{name}.weight{suffix}")) for name in ("gate_proj", "up_proj", "down_proj")}
                for e in range(8)
            ]  # fmt: skip
            up = torch.stack([torch.cat((part["gate_proj"], part["up_proj"])) for part in parts])
            down = torch.stack([part["down_proj"] for part in parts])
            kind = torch.float32 if suffix else torch.float8_e4m3fn
            tensors[f"{prefix}.gate_up_proj{suffix}"] = up.view(kind)
            tensors[f"{prefix}.down_proj{suffix}"] = down.view(kind)

    change_file(fused, fuse)
    assert_equal_bits(load(fused).logits, load(directory).logits)


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
