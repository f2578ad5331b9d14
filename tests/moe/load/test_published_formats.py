"""Every published format is read without expansion and has the bits of its decoded model."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from tests.fixtures import PoolOf
from tests.moe.loaded import Loaded, assert_equal_bits, file_bytes, load
from tests.moe.quantised_cases import bytes_of
from tests.support.models.families import make_model
from tests.support.models.published import MODELOPT_NVFP4, PUBLISHED, Encoder, fp8_tensor, write_published
from tests.support.models.quantise import Quantised, Tensors, change_file, fp8_config, quantise_fp8

# So large that second scales, one per row here and one per matrix in files, take a small share.
SIZES = {"hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return `published(name)`: a checkpoint, and its decoded values in float32."""
    root, made = tmp_path_factory.mktemp("published"), dict[str, Path]()

    def written(name: str) -> tuple[Path, Path]:
        directory = root / name.replace("'", "")
        if name not in made:
            made[name] = write_published(name, directory, **SIZES)
        return directory, made[name]

    return written


@pytest.fixture(scope="module")
def decoded(published: Callable[[str], tuple[Path, Path]]) -> Callable[[str], Loaded]:
    """Return `decoded(name)`: the model of a checkpoint's decoded values, loaded once."""
    return cache(lambda name: load(published(name)[1]))


FEW = (
    "compressed-tensors int4 around zeros",
    "compressed-tensors NVFP4",
    "ModelOpt FP8 in blocks",
    "AWQ",
    "GPTQ",
    "MXFP8",
)


EACH = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED if name not in FEW)]


@pytest.mark.crossed("name", every=2)
@pytest.mark.parametrize("name", EACH)
def test_logits_have_the_bits_of_the_model_that_is_meant(
    name: str, published: Callable[[str], tuple[Path, Path]], decoded: Callable[[str], Loaded]
) -> None:
    directory, _ = published(name)
    loaded, wanted = load(directory), decoded(name)
    assert_equal_bits(loaded.logits, wanted.logits)
    experts = file_bytes(directory)[1]
    assert abs(loaded.expert_bytes / experts - 1) < 0.02, "experts in memory must have the size of the file's"
    assert wanted.expert_bytes > 3 * loaded.expert_bytes


@pytest.mark.crossed("name", every=2)
@pytest.mark.parametrize("name", EACH)
def test_another_scale_gives_other_logits(
    name: str, published: Callable[[str], tuple[Path, Path]], decoded: Callable[[str], Loaded]
) -> None:
    """The control."""
    directory, _ = published(name)

    def change(tensors: Tensors) -> None:
        scales = [each for each in sorted(tensors) if ".experts." in each and each.endswith(ENDS)]
        for each in scales:
            if tensors[each].element_size() == 1:
                bits = tensors[each].view(torch.uint8)
                bits -= (bits > 0).to(torch.uint8)
            else:
                tensors[each].mul_(1.5)

    before = (directory / "model.safetensors").read_bytes()
    change_file(directory, change)
    found = load(directory).logits
    (directory / "model.safetensors").write_bytes(before)
    assert not np.array_equal(found[0], decoded(name).logits[0])


ENDS = (".weight_scale", ".weight_scale_inv", ".scales", ".scale")
LATENT = ["compressed-tensors NVFP4", "compressed-tensors int8", "GPTQ's second format, symmetric"]


@pytest.mark.crossed("name", every=2)
@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_and_shared_experts_have_the_bits_that_are_meant(name: str, tmp_path: Path) -> None:
    """`kv_b_proj` is used in halves, which are kept as float32."""
    meant = write_published(name, tmp_path / "published", family="deepseek_v3")
    assert_equal_bits(load(tmp_path / "published").logits, load(meant).logits)


AT_TWO_RANKS = ["compressed-tensors int4 around zeros", "ModelOpt, NVFP4 experts and FP8", "AWQ"]


@pytest.mark.crossed("name", every=3)
@pytest.mark.parametrize("name", AT_TWO_RANKS)
def test_two_ranks_read_their_own_experts_and_answer_as_one_does(
    name: str,
    published: Callable[[str], tuple[Path, Path]],
    decoded: Callable[[str], Loaded],
    pool_of: PoolOf,
) -> None:
    directory, _ = published(name)
    ranks: list[Loaded] = pool_of(2).run(load, directory)
    wanted = decoded(name).logits
    for rank, loaded in enumerate(ranks):
        assert abs(loaded.expert_bytes / (file_bytes(directory)[1] / 2) - 1) < 0.02
        assert_equal_bits(loaded.logits, wanted[rank::2])


@pytest.mark.parametrize("name", ["MXFP8", "FP8, a scale per matrix", "FP4 experts and FP8 in blocks"])
def test_transformers_itself_reads_the_same_weights_from_these_files(name: str, tmp_path: Path) -> None:
    """The second oracle, for formats that it reads without further packages: weights expanded by its own code."""
    meant = write_published(name, tmp_path / "published", num_hidden_layers=1)
    config = json.loads((tmp_path / "published" / "config.json").read_text())["quantization_config"]
    expand = FineGrainedFP8Config(**{**config, "dequantize": True, "activation_scheme": "dynamic"})
    theirs, wanted = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32, **more)
        for each, more in ((tmp_path / "published", {"quantization_config": expand}), (meant, {}))
    )
    read = dict(theirs.state_dict())
    for parameter, tensor in wanted.state_dict().items():
        assert torch.equal(read[parameter].float(), tensor), parameter


def fp8_blocks(weight: Tensor) -> Quantised:
    """Encode in blocks of 32 x 64, which distinguish rows from inputs."""
    made = quantise_fp8(weight, (32, 64))
    return Quantised({"weight": made.stored[""], "scale_inv": made.stored["_scale_inv"]}, made.meaning)


FUSED: dict[str, tuple[dict[str, Any], Encoder]] = {
    "ModelOpt FP8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor()),
    "ModelOpt NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, MODELOPT_NVFP4),
    "FP8 in blocks": (fp8_config((32, 64)), fp8_blocks),
}


# gpt-oss' modules keep [K, N], others [N, K] (transformers transposes Qwen3-VL's published weights); scales follow the module.
@pytest.mark.crossed("name", "family", every=2)
@pytest.mark.parametrize(
    ("name", "family", "is_turned"),
    [
        ("ModelOpt FP8", "gpt_oss", True),
        ("ModelOpt FP8", "qwen3_moe", False),
        ("ModelOpt NVFP4", "gpt_oss", True),
        ("ModelOpt NVFP4", "gpt_oss", False),
        ("ModelOpt NVFP4", "qwen3_moe", True),
        ("ModelOpt NVFP4", "qwen3_moe", False),
        ("ModelOpt NVFP4", "qwen3_vl_moe", True),
        ("ModelOpt NVFP4", "qwen3_vl_moe", False),
        ("FP8 in blocks", "qwen3_vl_moe", True),
        ("FP8 in blocks", "qwen3_vl_moe", False),
        ("FP8 in blocks", "gpt_oss", True),
    ],
)
def test_fused_experts_are_read_however_they_lie(
    name: str, family: str, is_turned: bool, tmp_path: Path
) -> None:
    """Square matrices too."""
    configured, encode = FUSED[name]
    model = make_model(family, moe_intermediate_size=64, intermediate_size=64)
    is_transposed, meant, directory = family == "gpt_oss", tmp_path / "meant", tmp_path / "fused"
    meant.mkdir()
    tensors, meanings = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for full, tensor in model.state_dict().items():
        if not full.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[full] = meanings[full] = tensor
            continue
        each = [encode(expert.T if is_transposed else expert) for expert in tensor]
        meanings[full] = torch.stack([made.meaning.T if is_transposed else made.meaning for made in each])
        for end in each[0].stored:
            parts = [made.stored[end] for made in each]
            if parts[0].dim() == 2 and is_turned:
                parts = [bytes_of(part).T.contiguous().view(part.dtype) for part in parts]
            if end == "weight_scale_2" and "gate_up" in full and not is_transposed:
                parts = [part.expand(2) for part in parts]  # one for gate, one for up
            stacked = torch.stack(
                [part.view(torch.uint8) if part.element_size() == 1 else part for part in parts]
            )
            tensors[full if end == "weight" else f"{full}_{end}"] = stacked.view(parts[0].dtype)
    config = model.config.to_dict()
    for place, content in ((meant, meanings), (directory, tensors)):
        place.mkdir(exist_ok=True)
        save_file({key: value.contiguous() for key, value in content.items()}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config, default=str))
        config["quantization_config"] = configured
    found, wanted = load(directory), load(meant)
    assert_equal_bits(found.logits, wanted.logits)
    assert found.expert_bytes < wanted.expert_bytes / 3
