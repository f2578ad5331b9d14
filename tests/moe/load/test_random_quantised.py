"""Random quantised weights are found by the loader as published ones, repeat, and have the size of plain ones."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig

from moe.families import build_on_meta
from moe.load.quantisation import UnservedQuantisationError, read_quantisation
from moe.load.random_quantised import RandomQuantised
from moe.load.stored_tensors import StoredTensors
from tests.support.engines.serving import build, request, serve

CPU = torch.device("cpu")
CONFIGS: dict[str, Any] = {
    "mxfp4": GptOssConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, max_position_embeddings=64, eos_token_id=None,
    ),
    "fp8": DeepseekV3Config(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, first_k_dense_replace=1, num_attention_heads=4, num_key_value_heads=4,
        n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=128, intermediate_size=128,
        q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, num_nextn_predict_layers=0,
        max_position_embeddings=64, eos_token_id=None,
    ),
}  # fmt: skip
FORMATS: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}
EXPERTS = "model.layers.1.mlp.experts.down_proj"


def open_stored(name: str, seed: int = 0) -> StoredTensors:
    quantisation = read_quantisation(FORMATS[name])
    assert quantisation is not None
    checkpoint = RandomQuantised(
        Path("nowhere"),
        build_on_meta(CONFIGS[name]),
        quantisation,
        device=CPU,
        dtype=torch.float32,
        seed=seed,
    )
    return StoredTensors(checkpoint, quantisation)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_quantised_and_repeat_row_by_row(name: str) -> None:
    stored, again, other = open_stored(name), open_stored(name), open_stored(name, seed=1)
    assert stored.is_quantised(EXPERTS)
    assert not stored.is_quantised("model.embed_tokens.weight")
    assert not stored.is_quantised("lm_head.weight")
    whole = stored.read_part(EXPERTS, "codes").view(torch.uint8)
    assert torch.equal(again.read_part(EXPERTS, "codes", 2).view(torch.uint8)[0], whole[2])
    assert not torch.equal(whole[1], whole[2])
    assert not torch.equal(other.read_part(EXPERTS, "codes").view(torch.uint8), whole)


def test_fp8_weights_have_the_spread_of_plain_ones() -> None:
    stored = open_stored("fp8")
    codes, scales = (stored.read_part(EXPERTS, part) for part in ("codes", "scales"))
    spread = (codes.float().std() * scales.float().mean()).item()
    assert spread == pytest.approx(1 / math.sqrt(128), rel=0.05)
    assert stored.is_quantised("model.layers.0.self_attn.kv_a_proj_with_mqa.weight")
    assert not stored.is_quantised("model.layers.1.mlp.gate.weight")


def test_other_formats_are_refused_by_name() -> None:
    quantisation = read_quantisation({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True})
    assert quantisation is not None
    with pytest.raises(
        UnservedQuantisationError, match="can be mxfp4 or fp8 in blocks; this configuration is int4"
    ):
        RandomQuantised(
            Path("nowhere"), build_on_meta(CONFIGS["fp8"]), quantisation, device=CPU, dtype=torch.float32
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_an_engine_serves_them(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    config.quantization_config = FORMATS[name]
    config.save_pretrained(tmp_path)
    built = build(tmp_path, load_format="dummy", max_num_seqs=2)
    assert len(serve(built, [request("a", [1, 2, 3], max_tokens=6)]).token_ids["a"]) == 6
