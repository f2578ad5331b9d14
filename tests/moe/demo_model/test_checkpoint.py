"""The written checkpoint, judged by plain transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from moe.demo_model.build import layer_mlp
from moe.demo_model.checkpoint import SAMPLING, write_checkpoint
from moe.demo_model.conversion import MoeMlp, Recipe, convert_mlp
from tests.moe.demo_model import tiny

IDS = torch.arange(40)[None] + 3


def write(out: Path, recipe: Recipe) -> list[MoeMlp]:
    weights = tiny.weights()
    x, is_code = tiny.calibration_inputs()
    layers = [convert_mlp(layer_mlp(weights, layer), x, is_code, recipe) for layer in range(1, tiny.LAYERS)]
    write_checkpoint(out, tiny.config(), weights, layers, recipe)
    return layers


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(IDS).logits


def test_with_all_experts_chosen_the_moe_answers_as_the_dense_model(tmp_path: Path) -> None:
    """Up to the few per cent of the scales: attention, rotary embedding, norms and tied embedding are all right."""
    write(tmp_path, tiny.EVERYTHING)
    dense = LlamaForCausalLM.from_pretrained(None, config=tiny.config(), state_dict=tiny.weights()).eval()
    moe = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = logits_of(dense)
    difference = (logits_of(moe) - expected).norm() / expected.norm()
    assert difference < 0.05
    for layer in moe.model.layers:  # the control: another rotation must show
        layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.roll(1, dims=0)
    assert (logits_of(moe) - expected).norm() / expected.norm() > 0.3


def test_transformers_misses_nothing_and_ignores_nothing(tmp_path: Path) -> None:
    write(tmp_path, tiny.RECIPE)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model).__name__ == "Glm4MoeForCausalLM"
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_each_expert_is_written_as_it_was_converted(tmp_path: Path) -> None:
    layers = write(tmp_path, tiny.RECIPE)
    with safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        router = tensors.get_tensor("model.layers.1.mlp.gate.weight")
        assert router.dtype == torch.float32 and torch.equal(router, layers[0].router)
        for expert, mlp in enumerate(layers[1].experts):
            down = tensors.get_tensor(f"model.layers.2.mlp.experts.{expert}.down_proj.weight")
            assert torch.equal(down, mlp.down.bfloat16())
        assert "model.layers.0.mlp.gate_proj.weight" in tensors.keys()  # noqa: SIM118  (not a dict)
        assert "model.layers.1.mlp.gate_proj.weight" not in tensors.keys()  # noqa: SIM118


def test_two_writes_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, tiny.RECIPE)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_stop_token_and_origin_are_stated(tmp_path: Path) -> None:
    write(tmp_path, tiny.RECIPE)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, **SAMPLING}
    readme = (tmp_path / "README.md").read_text()
    assert "converted, not trained" in readme and "SmolLM2-135M-Instruct" in readme and "Apache-2.0" in readme


def test_a_shared_expert_that_the_class_cannot_state_is_our_bug(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="multiples of a routed one"):
        write(tmp_path, Recipe(num_experts=4, experts_per_token=2, shared_neurons=13, expert_neurons=4))
