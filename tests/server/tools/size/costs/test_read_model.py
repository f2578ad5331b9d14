"""A configuration's facts about weights: unquantised modules, in every place and format of their list."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moe.families import UnsupportedModelError
from moe.model import Skeleton
from scheduler.step.sizing import attention_bytes
from server.serve.preflight.memory import value_dims
from server.tools.size.costs.read_model import ReadModel, read_model
from server.tools.size.published import MODELS

NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
_PLAIN = ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "q_b_proj")
_SMALL = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "vocab_size": 1024}


def _model(
    directory: Path, *, quantised: Mapping[str, Any] | None, beside: Mapping[str, Any] | None = None, **sizes: Any
) -> ReadModel:  # fmt: skip
    config = {**MODELS["deepseek-v3"], **sizes, "quantization_config": quantised}
    path = directory / "config.json"
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    if beside is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    return read_model(path, on_gpu=True, float_bytes=2)


def _listed(num_layers: int, stem: str = "model.") -> list[str]:
    """List attention layer by layer, as nvidia/DeepSeek-V3.1-NVFP4 does."""
    return [
        "lm_head",
        *(f"{stem}layers.{layer}.self_attn.{name}" for layer in range(num_layers) for name in _PLAIN),
    ]


def test_deepseek_v3_1_nvfp4_has_the_shared_bytes_of_its_plain_attention(tmp_path: Path) -> None:
    """The list is only in hf_quant_config.json. Without it, the result would be 13.9 GB."""
    model = _model(tmp_path, quantised=None, beside={**NVFP4, "exclude_modules": _listed(61)})
    assert model.weights.shared / 1e9 == pytest.approx(18.6, abs=0.05)
    assert model.costs.expert_kind == "nvfp4"


_ATTENTION = [f"layers.{layer}.self_attn*" for layer in range(3)]
LISTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "in config.json": (
        {"quant_method": "modelopt", **NVFP4, "ignore": [f"model.{each}" for each in _ATTENTION]}, None,
    ),
    "in hf_quant_config.json": (None, {**NVFP4, "exclude_modules": [f"model.{each}" for each in _ATTENTION]}),
    "as Kimi-K2.5 names them": (
        None, {**NVFP4, "exclude_modules": [f"language_model.model.{each}" for each in _ATTENTION]},
    ),
    "as Nemotron names them": (None, {**NVFP4, "exclude_modules": [f"backbone.{each}" for each in _ATTENTION]}),
    "with wildcards in front": (None, {**NVFP4, "exclude_modules": ["*self_attn*"]}),
    "one by one": (
        None, {**NVFP4, "exclude_modules": [*_listed(3), *(f"model.layers.{layer}.self_attn.o_proj" for layer in range(3))]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ReadModel:
    return _model(tmp_path_factory.mktemp("plain"), quantised=None, **_SMALL)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> ReadModel:
    """The model with every product in NVFP4."""
    return _model(tmp_path_factory.mktemp("all"), quantised=None, beside=NVFP4, **_SMALL)


@pytest.mark.parametrize("how", LISTS)
def test_attention_is_plain_wherever_its_list_is_and_however_it_names_it(
    how: str, plain: ReadModel, everything: ReadModel, tmp_path: Path
) -> None:
    quantised, beside = LISTS[how]
    listed = _model(tmp_path, quantised=quantised, beside=beside, **_SMALL)
    assert listed.weights.experts == everything.weights.experts < plain.weights.experts
    assert everything.weights.shared < listed.weights.shared < plain.weights.shared
    # q_a, q_b, kv_a and o_proj in bfloat16 instead of half a byte plus a scale per 16. kv_b_proj is never kept quantised.
    numbers = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 128 * 128 * 7168
    assert listed.weights.shared - everything.weights.shared == 3 * numbers * (2 - 0.5 - 1 / 16)


def test_parts_of_names_leave_awq_s_layers_plain(tmp_path: Path) -> None:
    """As QuantTrio/DeepSeek-V3.2-Exp-AWQ lists its last layers."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
    both = [
        _model(tmp_path, quantised={**awq, "modules_to_not_convert": names}, **_SMALL)
        for names in ([], ["model.layers.2."])
    ]
    # Experts of an excluded layer are as large as those in bfloat16.
    assert both[1].weights.shared > both[0].weights.shared
    assert both[1].weights.experts > 1.5 * both[0].weights.experts


_WIDE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts": 8, "num_experts_per_tok": 2, "dtype": "bfloat16",
}  # fmt: skip
BLOCKS_OF_48 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({**_WIDE, "head_dim": 640}, "heads of 640 values; the GPU kernels support 16 to 512"),
        ({**_WIDE, "head_dim": 32, "quantization_config": BLOCKS_OF_48}, "weights with unsupported scales: scales are for 48 inputs"),
    ],
)  # fmt: skip
def test_size_refuses_for_a_gpu_what_a_start_there_refuses(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"qwen3_moe has {problem}") as of_size:
        read_model(path, on_gpu=True, float_bytes=2)
    assert str(of_size.value).endswith("; serve it with --device cpu")
    assert read_model(path, on_gpu=False, float_bytes=2).costs.num_experts == 8
    gpu = pytest.importorskip("moe.gpu.backend", reason="needs triton: pip install -r requirements-dev.txt")
    backend = gpu.open_backend("interpreter", "auto")
    with pytest.raises(UnsupportedModelError) as of_start:
        Skeleton(tmp_path, backend)
    assert str(of_start.value) == str(of_size.value)


def test_attention_of_two_widths_counts_buffers_of_both() -> None:
    """Gemma 4: sliding windows with heads of 256 values, full attention with 512."""
    gemma = {"text_config": {"num_attention_heads": 16, "head_dim": 256, "global_head_dim": 512}}
    assert value_dims(gemma) == (256, 512)
    assert value_dims({"num_attention_heads": 64, "v_head_dim": 128, "kv_lora_rank": 512}) == (512,)
    sizes = {"is_latent": False, "has_index": False, "max_num_seqs": 64, "max_model_len": 8192}
    assert attention_bytes(16, (256, 512), **sizes) == sum(
        attention_bytes(16, (dim,), **sizes) for dim in (256, 512)
    )
