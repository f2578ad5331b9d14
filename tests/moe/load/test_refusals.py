"""Checkpoints that are inconsistent, damaged or unsupported: one error lists all problems before any tensor is read."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.load.checkpoint import CheckpointError
from moe.load.quantisation import Quantisation, UnservedQuantisationError, WeightFormat, read_quantisation
from tests.fixtures import PoolOf
from tests.moe.loaded import Tensors, headers, refused, rewrite
from tests.moe.quantised_cases import FP8, MXFP4, Case, bytes_of
from tests.support.engines.serving import build
from tests.support.models.quantise import MXFP4_CONFIG, change_file, fp8_config

EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
UP = "model.layers.0.mlp.experts.1.up_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


@pytest.fixture
def files(checkpoint: Callable[[str], Path], quantised: Callable[[str], Case]) -> Callable[[str], Path]:
    """Return `files(name)`: a family's checkpoint, or a quantised one."""
    return lambda name: quantised(name).directory if name in (FP8, MXFP4) else checkpoint(name)


def drop(*names: str) -> Callable[[Tensors], None]:
    """Remove tensors."""

    def change(tensors: Tensors) -> None:
        for name in names:
            tensors.pop(name)

    return change


def put(name: str, make: Callable[[Tensor], Tensor], source: str = "") -> Callable[[Tensors], None]:
    """Replace a tensor by a function of it, or of another one."""
    return lambda tensors: tensors.update({name: make(tensors[source or name])})


def of_experts(dtype: torch.dtype) -> Callable[[Tensors], None]:
    """Change the type of all experts."""
    return lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items() if ".experts." in n})


def take_an_expert_away(tensors: Tensors) -> None:
    """Remove the last expert from blocks and scales."""
    for name in (BLOCKS, BLOCKS.replace("blocks", "scales")):
        tensors[name] = tensors[name][:7]


def quantise_in_part(tensors: Tensors) -> None:
    """Leave one matrix of an expert unquantised."""
    tensors[UP] = tensors[UP].float()
    del tensors[f"{UP}_scale_inv"]


def give_experts_twice(tensors: Tensors) -> None:
    """Store experts both fused and one by one."""
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(8, 64, 32)
    tensors["model.layers.1.mlp.experts.0.w1.weight"] = torch.zeros(32, 64)


BROKEN: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "a fused tensor of the wrong shape": (
        "gpt_oss", put("model.layers.1.mlp.experts.down_proj", lambda t: t[:7]),
        "model.layers.1.mlp.experts.down_proj: [7, 32, 64] instead of [8, 32, 64]",
    ),
    "experts given twice": ("mixtral", give_experts_twice, EXPERT.format(0, 0, "w2")),
    "experts in a type without scales": ("mixtral", of_experts(torch.float8_e4m3fn), "72 of type F8_E4M3"),
    "experts in bytes": ("mixtral", of_experts(torch.uint8), "72 of type U8"),
    "experts in whole numbers": ("mixtral", of_experts(torch.int8), "72 of type I8"),
    "an expert quantised in part": (
        FP8, quantise_in_part, f"{UP} (not quantised) for model.layers.0.mlp.experts.gate_up_proj",
    ),
    "no scales": (FP8, drop(f"{UP}_scale_inv"), f"{UP} is FP8 and has no {UP}_scale_inv"),
    "no weight": (FP8, drop(UP), f"{UP}_scale_inv has no matching {UP}"),
    "other blocks": (
        FP8,
        put(f"{UP}_scale_inv", lambda scales: scales[:1]),
        f"{UP}_scale_inv is [1, 2]; {UP} [160, 192] needs [2, 2]",
    ),
    "scales of another type": (FP8, put(f"{UP}_scale_inv", Tensor.double), "is F64, not one of F32"),
    "a weight that is not FP8": (FP8, put(UP, Tensor.float), f"{UP} has scales and is F32, not F8_E4M3"),
    "scales of a plain weight": (
        FP8,
        put("model.layers.0.mlp.gate.weight_scale_inv", lambda _: torch.ones(1, 2), UP),
        "model.layers.0.mlp.gate.weight has scales and is F32",
    ),
    "a matrix of the wrong shape": (FP8, put(QUERY, lambda codes: bytes_of(codes)[:, :64].view(codes.dtype)), "needs"),
    "no MXFP4 scales": (
        MXFP4, drop(BLOCKS.replace("blocks", "scales")), f"{BLOCKS} has no matching {BLOCKS.replace('blocks', 'scales')}",
    ),
    "no MXFP4 blocks": (MXFP4, drop(BLOCKS), "down_proj_scales has no matching blocks"),
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
    how: str, files: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change, message = BROKEN[how]
    broken = shutil.copytree(files(name), tmp_path / "broken")
    change_file(broken, change)
    assert message in refused(broken, monkeypatch)


def test_one_error_lists_all_that_does_not_fit(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared tensors and experts, in all layers."""

    def break_everything(tensors: Tensors) -> None:
        drop("model.norm.weight", EXPERT.format(0, 7, "w3"), EXPERT.format(2, 5, "w2"))(tensors)
        for matrix in ("w1", "w2", "w3"):
            tensors[EXPERT.format(1, 8, matrix)] = torch.zeros(32, 64)
        tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(64)
        tensors["lm_head.weight"] = torch.zeros(255, 64)
        tensors[EXPERT.format(0, 6, "w2")] = torch.zeros(64, 31)
        tensors[EXPERT.format(1, 2, "w1")] = torch.zeros(33, 64)
        tensors[EXPERT.format(1, 4, "w1")] = torch.zeros(32, 65)

    message = refused(rewrite(mixtral, tmp_path / "broken", break_everything), monkeypatch)
    missing, unexpected, wrong = message.split("\n")[1:]
    assert missing.startswith("  missing: ")
    assert "model.norm.weight" in missing
    assert "w3.weight for model.layers.0.mlp.experts.gate_up_proj of expert 7" in missing
    assert "model.layers.2.mlp.experts.down_proj of expert 5" in missing
    assert missing.count(",") == 2
    assert unexpected.startswith("  unexpected: ")
    for matrix in ("w1", "w2", "w3"):
        assert EXPERT.format(1, 8, matrix) in unexpected
    assert "model.layers.3.input_layernorm.weight" in unexpected
    assert wrong.startswith("  of the wrong shape: ")
    assert "lm_head.weight: [255, 64] instead of [256, 64]" in wrong
    assert (
        f"{EXPERT.format(0, 6, 'w2')} [64, 31], to make model.layers.0.mlp.experts.down_proj [64, 32]"
        in wrong
    )
    assert (
        f"{EXPERT.format(1, 2, 'w1')} [33, 64]" in wrong and f"{EXPERT.format(1, 4, 'w1')} [32, 65]" in wrong
    )


def assemble_fails(directory: Path) -> str:
    """Return the error of assembling this rank's engine."""
    with pytest.raises(CheckpointError) as caught:
        build(directory, max_model_len=64)
    return str(caught.value)


def test_every_rank_refuses_an_expert_that_only_another_holds(
    mixtral: Path, tmp_path: Path, pool_of: PoolOf
) -> None:
    broken = rewrite(
        mixtral, tmp_path / "broken", drop(*(EXPERT.format(0, 7, w) for w in ("w1", "w2", "w3")))
    )
    messages = set(pool_of(2).run(assemble_fails, broken))
    assert len(messages) == 1
    assert "model.layers.0.mlp.experts.gate_up_proj of expert 7" in messages.pop()


def test_long_lists_are_cut_and_counted(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(tensors: Tensors) -> Tensors:
        return {f"other.{name}": tensor for name, tensor in tensors.items()}

    message = refused(rewrite(mixtral, tmp_path / "other", rename), monkeypatch)
    assert len(message) < 20_000
    assert re.search(r"missing: .* and \d+ more\n  unexpected: .* and \d+ more$", message)


def cut(directory: Path) -> None:
    """Truncate the file."""
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def no_tensors(directory: Path) -> None:
    """Leave only a file in another format."""
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def index(content: str) -> Callable[[Path], None]:
    """Add an index to the file."""

    def change(directory: Path) -> None:
        (directory / "model.safetensors.index.json").write_text(content)

    return change


DAMAGES = {
    "cut short": (cut, "model.safetensors is not a readable safetensors file"),
    "a pointer of git-lfs": (
        lambda directory: (directory / "model.safetensors").write_text("version https://git-lfs") and None,
        "model.safetensors is not a readable safetensors file",
    ),
    "none": (no_tensors, "has no .safetensors files"),
    "index without its shard": (
        index('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        "names missing files: model-00001-of-00002.safetensors",
    ),
    "index not JSON": (index("{"), "model.safetensors.index.json is not a safetensors index"),
    "index of another form": (
        index('{"weight_map": 3}'),
        "model.safetensors.index.json is not a safetensors index",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(
    damage: str, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(mixtral, tmp_path / "broken")
    hurt, message = DAMAGES[damage]
    hurt(broken)
    assert message in refused(broken, monkeypatch)


@pytest.mark.parametrize("has_tensor", [True, False], ids=["with it", "without it"])
def test_an_index_that_names_a_tensor_that_the_type_has_not_is_refused(
    has_tensor: bool, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With or without the tensor in its file."""
    broken, name = shutil.copytree(mixtral, tmp_path / "broken"), "model.layers.9.self_attn.q_proj.weight"
    if has_tensor:
        change_file(broken, lambda tensors: tensors.update({name: torch.zeros(64, 64)}))
    files = dict.fromkeys([*headers(broken), name], "model.safetensors")
    index(json.dumps({"weight_map": files}))(broken)
    message = refused(broken, monkeypatch)
    wanted = (
        f"unexpected: {name}"
        if has_tensor
        else f"index.json lists 1 tensors that are not in their files, such as {name} ("
    )
    assert wanted in message


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
    assert "q_proj.weight is FP8, but modules_to_not_convert lists its module" in refused(broken, monkeypatch)


@pytest.mark.parametrize(
    ("name", "quantisation"), [(MXFP4, fp8_config()), (FP8, {"quant_method": "mxfp4"})], ids=["fp8", "mxfp4"]
)
def test_tensors_of_a_format_that_the_configuration_does_not_speak_of_are_refused(
    name: str,
    quantisation: dict[str, Any],
    quantised: Callable[[str], Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = configured(quantised(name).directory, tmp_path / "odd", quantisation)
    shutil.copy(quantised(name).directory / "model.safetensors", odd)
    assert re.search("that its config.json does not explain|cannot be read", refused(odd, monkeypatch))


DEEPSEEK_V3 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip
DEEPSEEK_V31 = {**DEEPSEEK_V3, "scale_fmt": "ue8m0"}
MINIMAX_M2 = {
    **DEEPSEEK_V3, "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}  # fmt: skip
FINE_GRAINED = {  # as transformers' FineGrainedFP8Config writes itself
    "activation_scheme": "dynamic", "dequantize": False, "expert_dtype": "fp8", "modules_to_convert": None,
    "modules_to_not_convert": None, "quant_method": "fp8", "scale_fmt": "float", "weight_block_size": (128, 128),
}  # fmt: skip


@pytest.mark.parametrize("config", [DEEPSEEK_V3, DEEPSEEK_V31, MINIMAX_M2, FINE_GRAINED, fp8_config()])
def test_the_fp8_configurations_of_real_checkpoints_are_read(config: dict[str, Any]) -> None:
    found = read_quantisation(config)
    assert found is not None
    blocks = WeightFormat(name="fp8", block_rows=128, block=128, fp8_rows=True)
    assert (found.method, found.formats) == ("fp8", (blocks,))
    assert found.plain_modules == tuple(config.get("modules_to_not_convert") or ())


NVFP4_WEIGHTS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MIXED_GROUPS = {  # as ModelOpt writes config.json since 0.44
    "config_groups": {
        "group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}, "targets": ["a.in_proj"]},
        "group_1": {"weights": NVFP4_WEIGHTS, "targets": ["a.experts"]},
    },
    "quant_algo": "MIXED_PRECISION", "quant_method": "modelopt",
}  # fmt: skip
MINIMAX_M3 = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["mtp*"],
    "quantized_layers": {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "MXFP8"}, "model.layers.3.mlp.gate": {"quant_algo": "UNQUANTIZED"},
        "model.layers.3.block_sparse_moe.experts": {"quant_algo": "NVFP4", "group_size": 16},
    },
}  # fmt: skip
KIMI_K2: dict[str, Any] = {
    "config_groups": {"group_0": {
        "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": {
            "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4, "observer": "minmax",
            "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
        },
    }},
    "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"], "kv_cache_scheme": None,
    "quant_method": "compressed-tensors", "quantization_status": "compressed",
}  # fmt: skip
QUARK_FP4 = {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
QUARK = {
    "quant_method": "quark", "global_quant_config": {"weight": QUARK_FP4, "input_tensors": QUARK_FP4},
    "layer_quant_config": {"*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}}, "exclude": ["lm_head"],
}  # fmt: skip
FP8_TENSOR, NVFP4 = WeightFormat(name="fp8", block_rows=0), WeightFormat(name="nvfp4", block=16)
MXFP4_FORMAT, MXFP8 = WeightFormat(name="mxfp4", block=32), WeightFormat(name="mxfp8", block=32)


@pytest.mark.parametrize(
    ("config", "formats"),
    [
        (MIXED_GROUPS, (FP8_TENSOR, NVFP4)),
        (MINIMAX_M3, (MXFP8, NVFP4)),
        (KIMI_K2, (WeightFormat(name="int4", block=32),)),
        (QUARK, (MXFP4_FORMAT, WeightFormat(name="fp8"))),
        (
            {**DEEPSEEK_V31, "expert_dtype": "fp4"},
            (WeightFormat(name="fp8", block_rows=128, block=128, fp8_rows=True), MXFP4_FORMAT),
        ),
        ({**DEEPSEEK_V3, "weight_block_size": [1, 32]}, (MXFP8,)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, (FP8_TENSOR, WeightFormat(name="fp8"))),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, (WeightFormat(name="int4", has_zeros=True),)),
    ],
    ids=["mixed groups", "MiniMax-M3", "Kimi K2", "Quark", "DeepSeek-V4", "[1, 32]", "static", "awq"],
)
def test_published_configurations_name_their_formats(
    config: dict[str, Any], formats: tuple[WeightFormat, ...]
) -> None:
    found = read_quantisation(config)
    assert found is not None and found.formats == formats


def test_a_pattern_names_whole_modules() -> None:
    plain = Quantisation(method="fp8", formats=(), plain_modules=("model.layers.*.mlp.gate", "fc1"))
    named = ("model.layers.3.mlp.gate", "model.layers.3.mlp.gate.inner", "model.decoder.fc1")
    assert all(plain.leaves_plain(name) for name in named)
    assert not any(plain.leaves_plain(name) for name in ("model.layers.3.mlp.gate_proj", "lm_head"))


def test_the_configuration_of_gpt_oss_is_read() -> None:
    patterns = tuple(MXFP4_CONFIG["modules_to_not_convert"])
    assert read_quantisation(MXFP4_CONFIG) == Quantisation(
        method="mxfp4", formats=(WeightFormat(name="mxfp4", block=32),), plain_modules=patterns
    )


def test_what_is_left_unread_is_said() -> None:
    static = read_quantisation({**DEEPSEEK_V3, "activation_scheme": "static"})
    dynamic = read_quantisation(DEEPSEEK_V3)
    assert static is not None and dynamic is not None
    assert static.in_words.startswith("fp8, kept as stored; activations, keys and values are not quantised: ")
    assert dynamic.in_words == "fp8, kept as stored"
    assert static.described(fp8_rows=True) == static.in_words
    assert dynamic.described(fp8_rows=False) == dynamic.in_words
    assert "rows of FP8 weights are quantised to FP8 per token and 128 inputs" in dynamic.described(
        fp8_rows=True
    )
    other = read_quantisation({**DEEPSEEK_V3, "weight_block_size": [64, 64]})
    assert other is not None and "activations, keys and values are not quantised" in other.described(
        fp8_rows=True
    )


TOKENS = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}
GROUPS = {**TOKENS, "group_size": 128, "strategy": "group"}
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel"}
IN_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


@pytest.mark.parametrize(
    ("weights", "rows", "fp8_rows"),
    [
        (CHANNELS, TOKENS, True),
        (CHANNELS, {**TOKENS, "dynamic": False}, False),
        (CHANNELS, {**TOKENS, "type": "int"}, False),
        (CHANNELS, GROUPS, False),
        (CHANNELS, None, False),
        (IN_BLOCKS, GROUPS, True),
        (IN_BLOCKS, {**GROUPS, "group_size": 64}, False),
        (IN_BLOCKS, TOKENS, False),
    ],
)
def test_the_rows_of_fp8_weights_are_quantised_if_their_group_says_so(
    weights: dict[str, Any], rows: dict[str, Any] | None, fp8_rows: bool
) -> None:
    found = read_quantisation(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": rows}
            },
        }
    )
    assert found is not None and [each.fp8_rows for each in found.formats] == [fp8_rows]


def test_no_configuration_is_no_quantisation() -> None:
    assert read_quantisation(None) is None
    assert read_quantisation({}) is None


def grouped(**weights: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def rotated(*locations: str) -> dict[str, Any]:
    """Return a transform_config with one transform at some places."""
    listed = [{"ignore": [], "inverse": False, "location": each, "targets": ["Linear"]} for each in locations]
    return {"config_groups": {"R1": {"apply": listed, "type": "hadamard", "head_dim": 128}}}


def test_rotations_that_are_in_the_stored_weights_are_nothing_to_do() -> None:
    """As in poolside/Laguna-XS.2-FP8: vLLM transforms activations at "input" and "output" only."""
    config = {
        **grouped(num_bits=4, type="int", group_size=32),
        "transform_config": rotated("weight_output", "weight_input"),
    }
    found = read_quantisation(config)
    assert found is not None and found.formats == (WeightFormat(name="int4", block=32),)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "hqq", "bits": 4},
            r"quantised with HQQ \(hqq: its zeros .*\); supported: fp8 .*mxfp4.* awq and gptq",
        ),
        ({"quant_method": "gptq"}, "as gptq with bits = None; supported: 4 or 8"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits = 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size = 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin"}, "'marlin'"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"+:.*down.*": {"bits": 8}}},
            "different bits for some modules",
        ),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "as awq with bits = 8; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version = 'gemv'"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
            "quant_algo = 'W4A16_AWQ'; supported: one of FP8",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "no quant_algo for any layer"),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group"}},
            },
            "weights of dtype 'int4'",
        ),
        (
            grouped(num_bits=8, type="float", strategy="group", group_size=128),
            "group_0: weights of 8 bits, type 'float'",
        ),
        (grouped(num_bits=2, type="int", strategy="group", group_size=32), "weights of 2 bits"),
        (grouped(num_bits=8, type="int", strategy="channel", symmetric=False), "groups of 0, not symmetric"),
        ({**grouped(num_bits=4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (
            {**grouped(num_bits=4), "transform_config": rotated("input")},
            "transform_config: R1 transforms activations at 'input'",
        ),
        (
            {**grouped(num_bits=4), "transform_config": rotated("weight_output", "output")},
            "R1 transforms activations at 'output'",
        ),
        (
            {**grouped(num_bits=4), "transform_config": rotated("weight_input", "q_attn")},
            "R1 transforms activations at 'q_attn'",
        ),
        (
            {**grouped(num_bits=4), "transform_config": {"config_groups": {"R1": {}}}},
            "transform_config: R1 = {}",
        ),
        (
            {"quant_method": "bitsandbytes"},
            r"with bitsandbytes \(bitsandbytes: its codes index a table of values",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
            "as auto-round with packing_format = 'auto_round:auto_awq'",
        ),
        ({"quant_method": "auto-round", "data_type": "mx_fp"}, "as auto-round with data_type = 'mx_fp'"),
        (
            {"quant_method": "auto-round", "bits": 4, "act_bits": 8},
            "act_bits = 8; supported: 'int' with act_bits = 16",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 32, "extra_config": {"a.b": {"bits": 8}}},
            r"extra_config of a.b \(different bits\)",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]},
            },
            r"as quark with weights quantised 2 times \(fp8_e4m3, int4\); supported: once",
        ),
        ({**grouped(num_bits=4), "transform_config": "yes"}, "transform_config = 'yes'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "config_groups = None"),
        ({"quant_method": "brand-new"}, "'brand-new'"),
        ({"bits": 4}, "'unknown'"),
        (
            {**DEEPSEEK_V3, "modules_to_not_convert": ["(gate"]},
            r"modules_to_not_convert = \['\(gate'\], which is not a list",
        ),
        ({**DEEPSEEK_V3, "fmt": "e5m2"}, "fmt = 'e5m2'; supported: 'e4m3'"),
        ({**DEEPSEEK_V3, "expert_dtype": "fp6"}, "expert_dtype = 'fp6'"),
        ({**DEEPSEEK_V3, "modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
        ({**DEEPSEEK_V3, "weight_block_size": [1, 128]}, r"weight_block_size = \[1, 128\]"),
        ({**DEEPSEEK_V3, "weight_block_size": 128}, "weight_block_size = 128"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnservedQuantisationError, match=message):
        read_quantisation(config)
