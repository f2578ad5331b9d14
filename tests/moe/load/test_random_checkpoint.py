"""A random checkpoint: its names fit a model, its tensors repeat, its rows are independent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig

from moe.families import build_on_meta, experts_modules
from moe.load.plan import LoadPlan
from moe.load.random_checkpoint import RandomCheckpoint, spread
from moe.load.stored_tensors import StoredTensors

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
CONFIGS = {
    "qwen3": Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, **COMMON),
    "gpt-oss": GptOssConfig(num_local_experts=4, num_experts_per_tok=2, intermediate_size=24, **COMMON),
}


def open_checkpoint(name: str, **options: Any) -> tuple[Any, RandomCheckpoint]:
    model = build_on_meta(CONFIGS[name])
    about: dict[str, Any] = {"device": CPU, "dtype": torch.float32, **options}
    return model, RandomCheckpoint(Path("nowhere"), model, **about)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_finds_everything_that_a_model_needs(name: str) -> None:
    model, checkpoint = open_checkpoint(name)
    parameters = {
        f"{path}.{leaf}": int(module.num_experts)
        for path, module in experts_modules(model).items()
        for leaf in dict(module.named_parameters(recurse=False))
    }
    plan = LoadPlan(model, StoredTensors(checkpoint, None), parameters)
    assert set(plan.fused) == set(parameters), "experts must be read row by row"


def test_tensors_repeat_and_rows_are_drawn_alone() -> None:
    _, checkpoint = open_checkpoint("gpt-oss", seed=3)
    _, again = open_checkpoint("gpt-oss", seed=3)
    _, other = open_checkpoint("gpt-oss", seed=4)
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    whole = checkpoint.read(experts)
    assert whole.shape == checkpoint.shape(experts) == (4, 32, 48)
    assert torch.equal(again.read_row(experts, 2)[0], whole[2])
    biases = f"{experts}_bias"
    assert torch.equal(again.read_row(biases, 2)[0], checkpoint.read(biases)[2])
    assert not torch.equal(whole[1], whole[2])
    assert not torch.equal(other.read(experts), whole)
    assert checkpoint.bytes_read == (whole.numel() + 4 * 48) * 4
    assert checkpoint.dtype(experts) == "F32"


def test_outputs_have_the_size_of_their_inputs() -> None:
    _, checkpoint = open_checkpoint("gpt-oss")
    experts = checkpoint.read("model.layers.0.mlp.experts.gate_up_proj")
    outputs = torch.randn(1000, 32) @ experts[0]
    assert 0.8 < outputs.std().item() < 1.25, "the inputs of a transposed weight must be its rows"
    assert (checkpoint.read("model.norm.weight") == 1).all()
    assert checkpoint.read("model.layers.0.self_attn.q_proj.bias").std().item() < 0.2
    assert spread("model.embed_tokens.weight", 32) == 1.0
    assert spread("model.layers.0.mlp.gate.weight", 4) == 1.0
    assert spread("lm_head.weight", 16) == 1.0


def test_bfloat16_is_drawn_as_such() -> None:
    _, checkpoint = open_checkpoint("qwen3", dtype=torch.bfloat16)
    assert checkpoint.read("lm_head.weight").dtype is torch.bfloat16
    assert checkpoint.dtype("lm_head.weight") == "BF16"
