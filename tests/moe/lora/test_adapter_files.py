"""Adapter directories: what each layout means, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe.lora.adapter_config import AdapterError
from moe.lora.adapter_files import AdapterFiles, FactorLayout, LowRank, read_adapter

LAYER = "base_model.model.model.layers.0"
QUERY = {f"{LAYER}.self_attn.q_proj.lora_A.weight": (4, 8), f"{LAYER}.self_attn.q_proj.lora_B.weight": (6, 4)}
EXPERTS = f"{LAYER}.mlp.experts"


def write(directory: Path, shapes: dict[str, tuple[int, ...]], **fields: Any) -> Path:
    """Write an adapter of rank 4 and alpha 8 with tensors of these shapes."""
    directory.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: torch.ones(shape) for name, shape in shapes.items()}, directory / "adapter_model.safetensors"
    )
    return directory


def by_name(files: AdapterFiles) -> dict[str, LowRank]:
    return {each.name: each for each in files.products}


def test_a_linear_layer_has_the_configured_scale(tmp_path: Path) -> None:
    [product] = read_adapter(write(tmp_path, QUERY)).products
    assert (product.module, product.layout) == ("model.layers.0.self_attn.q_proj", FactorLayout.LINEAR)
    assert (product.rank, product.scale) == (4, 2.0)
    stabilised = read_adapter(write(tmp_path, QUERY, use_rslora=True)).products[0]
    assert stabilised.scale == 4.0


def test_patterns_match_the_end_of_a_name_at_a_dot_and_the_first_one_wins(tmp_path: Path) -> None:
    shapes = {
        f"{LAYER}.self_attn.{name}_proj.lora_{side}.weight": shape
        for name in "qk"
        for side, shape in (("A", (2, 8)), ("B", (6, 2)))
    }
    fields: dict[str, Any] = {
        "rank_pattern": {"proj": 9, r".*\.q_proj": 2, "self_attn.k_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.k_proj": 3, "k_proj": 5},
    }
    found = by_name(read_adapter(write(tmp_path, shapes, **fields)))
    assert found["model.layers.0.self_attn.q_proj"].scale == 4.0
    assert found["model.layers.0.self_attn.k_proj"].scale == 1.5


def test_fused_experts_are_named_by_their_wrappers(tmp_path: Path) -> None:
    shapes = {
        f"{EXPERTS}.base_layer.lora_A.weight": (32, 16), f"{EXPERTS}.base_layer.lora_B.weight": (24, 32),
        f"{EXPERTS}.lora_A.weight": (32, 12), f"{EXPERTS}.lora_B.weight": (16, 32),
    }  # fmt: skip
    both = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    found = by_name(read_adapter(write(tmp_path, shapes, target_parameters=both)))
    assert found["model.layers.0.mlp.experts.gate_up_proj"].a.shape == (32, 16)
    assert found["model.layers.0.mlp.experts.down_proj"].a.shape == (32, 12)
    assert {each.layout for each in found.values()} == {FactorLayout.FUSED}


@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj"])
def test_one_adapted_parameter_is_the_targeted_one(tmp_path: Path, leaf: str) -> None:
    shapes = {f"{EXPERTS}.lora_A.weight": (32, 16), f"{EXPERTS}.lora_B.weight": (24, 32)}
    [product] = read_adapter(write(tmp_path, shapes, target_parameters=[f"experts.{leaf}"])).products
    assert product.leaf == leaf


def test_a_configuration_with_gate_and_up_apart_has_twice_their_rank_and_alpha(tmp_path: Path) -> None:
    shapes = {
        f"{EXPERTS}.base_layer.lora_A.weight": (64, 16), f"{EXPERTS}.base_layer.lora_B.weight": (24, 64),
        f"{EXPERTS}.lora_A.weight": (32, 12), f"{EXPERTS}.lora_B.weight": (16, 32),
    }  # fmt: skip
    old = {"target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True}
    found = by_name(read_adapter(write(tmp_path, shapes, **old)))
    up, down = (found[f"model.layers.0.mlp.experts.{leaf}"] for leaf in ("gate_up_proj", "down_proj"))
    assert (up.rank, down.rank) == (8, 4)
    assert up.scale == pytest.approx(16 / 8**0.5) and down.scale == 4.0
    rewritten = {"rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {r".*\.gate_up_proj": 16}}
    again = by_name(read_adapter(write(tmp_path, shapes, **old, **rewritten)))
    assert again["model.layers.0.mlp.experts.gate_up_proj"].scale == up.scale


@pytest.mark.parametrize("name, leaf", [("gate_proj", "gate"), ("w1", "gate"), ("w3", "up"), ("w2", "down")])
def test_single_and_stacked_experts_have_either_set_of_names(tmp_path: Path, name: str, leaf: str) -> None:
    single = {f"{EXPERTS}.7.{name}.lora_A.weight": (4, 8), f"{EXPERTS}.7.{name}.lora_B.weight": (6, 4)}
    [product] = read_adapter(write(tmp_path, single)).products
    assert (product.layout, product.leaf, product.expert) == (FactorLayout.SINGLE, leaf, 7)
    stacked = {f"{EXPERTS}.{name}.lora_A.weight": (1, 4, 8), f"{EXPERTS}.{name}.lora_B.weight": (8, 6, 4)}
    [product] = read_adapter(write(tmp_path, stacked)).products
    assert (product.layout, product.leaf, product.expert) == (FactorLayout.STACKED, leaf, -1)


def test_embeddings_have_tensors_of_their_own(tmp_path: Path) -> None:
    path = "base_model.model.model.embed_tokens"
    shapes = {
        f"{path}.lora_embedding_A": (4, 99),
        f"{path}.lora_embedding_B": (8, 4),
        f"{path}.base_layer.weight": (99, 8),
    }
    found = read_adapter(write(tmp_path, shapes))
    assert found.products[0].layout is FactorLayout.EMBEDDING and len(found.base_copies) == 1


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    first = read_adapter(write(tmp_path / "a", QUERY, base_model_name_or_path="x")).digest
    assert read_adapter(write(tmp_path / "b", QUERY, base_model_name_or_path="y")).digest == first
    assert read_adapter(write(tmp_path / "c", QUERY, lora_alpha=9)).digest != first
    other = {name: torch.zeros(shape) for name, shape in QUERY.items()}
    save_file(other, tmp_path / "b" / "adapter_model.safetensors")
    assert read_adapter(tmp_path / "b").digest != first


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"use_qalora": True}, "QALoRA"),
        ({"lora_bias": True}, "its own biases"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head", "score"]}, "modules_to_save is ['lm_head']"),
        ({"layer_replication": [[0, 2]]}, "repeated layers"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"fan_in_fan_out": True}, "transposed weights"),
        ({"trainable_token_indices": [3]}, "rows of the embedding"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16', which changes the base"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
        ({"loftq_config": {"bits": 4}}, "LoftQ"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"use_new_trick": True}, "use_new_trick is True, a field that is not known here"),
        ({"r": 0}, "r is 0; it must be an integer"),
        ({"lora_alpha": "many"}, "lora_alpha is 'many'"),
        ({"rank_pattern": {"(": 2}}, "'(' is not a regular expression"),
        ({"rank_pattern": [2]}, "rank_pattern is [2]; it must be an object"),
        ({"target_modules": 5}, "target_modules is 5; it must be a list"),
        ({"r": 3}, "has rank 4; its configuration has 3"),
    ],
)  # fmt: skip
def test_other_methods_and_wrong_values_are_named(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(AdapterError) as caught:
        read_adapter(write(tmp_path, QUERY, **fields))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({}, "holds no LoRA tensors"),
        ({f"{LAYER}.self_attn.q_proj.lora_A.weight": (4, 8)}, "q_proj has no lora_B; the adapter is incomplete"),
        ({**QUERY, f"{LAYER}.mlp.gate.weight": (2, 2)}, "mlp.gate.weight is not a LoRA tensor"),
        ({**QUERY, f"{LAYER}.self_attn.q_proj.lora_magnitude_vector": (2,)}, "lora_magnitude_vector is not a LoRA tensor"),
        ({f"{LAYER}.x.lora_A.weight": (4, 8), f"{LAYER}.x.lora_B.weight": (6, 5)}, "have no common rank"),
        ({f"{LAYER}.x.lora_A.weight": (4, 8, 1), f"{LAYER}.x.lora_B.weight": (6, 4)}, "2 dimensions are expected"),
        ({f"{EXPERTS}.0.w9.lora_A.weight": (4, 8), f"{EXPERTS}.0.w9.lora_B.weight": (6, 4)}, "is not a weight of an expert"),
        ({f"{EXPERTS}.lora_A.weight": (32, 8), f"{EXPERTS}.lora_B.weight": (6, 32)}, "target_parameters names none"),
    ],
)  # fmt: skip
def test_missing_misshapen_and_unknown_tensors_are_named(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], says: str
) -> None:
    with pytest.raises(AdapterError) as caught:
        read_adapter(write(tmp_path, shapes))
    assert says in str(caught.value)


def test_a_rank_above_the_limit_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"the rank of .*q_proj is 4, above the limit of 3"):
        read_adapter(write(tmp_path, QUERY), max_rank=3)


def test_an_adapter_on_other_modules_than_the_allowed_ones_is_refused(tmp_path: Path) -> None:
    query = write(tmp_path / "query", QUERY)
    assert read_adapter(query, modules=("q_proj", "experts")).products
    with pytest.raises(
        AdapterError,
        match=r"adapts model\.layers\.0\.self_attn\.q_proj; --lora-target-modules allows only o_proj",
    ):
        read_adapter(query, modules=("o_proj",))
    single = {f"{EXPERTS}.3.up_proj.lora_A.weight": (4, 16), f"{EXPERTS}.3.up_proj.lora_B.weight": (12, 4)}
    expert = write(tmp_path / "expert", single)
    assert read_adapter(expert, modules=("experts",)).products
    with pytest.raises(AdapterError, match=r"adapts model\.layers\.0\.mlp\.experts\.3\.up"):
        read_adapter(expert, modules=("up_proj",))


def write_header(directory: Path, header: Any) -> None:
    """Write a file of tensors with this header and no values."""
    text = json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda at: (at / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda at: (at / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda at: (at / "adapter_config.json").write_text("{"), "cannot be read"),
        (lambda at: (at / "adapter_config.json").write_text("[]"), "holds no object"),
        (
            lambda at: (at / "adapter_model.safetensors").write_bytes(b"\xff" * 20),
            "is not a safetensors file",
        ),
        (
            lambda at: (at / "adapter_model.safetensors").write_bytes(b""),
            "is not a safetensors file",
        ),
        (lambda at: write_header(at, []), "is not a safetensors file"),
        (lambda at: write_header(at, {f"{LAYER}.x": {"shape": [2]}}), "is not a safetensors file"),
    ],
)
def test_broken_directories_are_named(tmp_path: Path, damage: Any, says: str) -> None:
    damage(write(tmp_path, QUERY))
    with pytest.raises(AdapterError, match=says):
        read_adapter(tmp_path)


def test_a_cut_off_file_and_integers_are_named(tmp_path: Path) -> None:
    file = write(tmp_path, QUERY) / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    with pytest.raises(AdapterError, match="is cut off"):
        read_adapter(tmp_path)
    save_file({name: torch.ones(shape, dtype=torch.int32) for name, shape in QUERY.items()}, file)
    with pytest.raises(AdapterError, match="is of type I32; only F32, F16, BF16"):
        read_adapter(tmp_path)
