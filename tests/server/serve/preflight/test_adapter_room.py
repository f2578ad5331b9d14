"""The room for adapters is that of real adapters of the largest rank, and a service without it is refused with the numbers."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe.lora.adapter_files import read_adapter
from server.serve.preflight.adapter_room import AdaptedFeatures, adapted_features, rank_adapter_bytes
from server.serve.preflight.checks import check_choices, check_files, check_room
from server.serve.preflight.memory import ExpertMemory, WeightBytes, check_memory
from server.serve.preflight.model import read_config
from server.tools.size.costs.read_model import read_model
from tests.support.engines.serving import build
from tests.support.models import families
from tests.support.models.adapters import SINGLE, write_adapter
from tests.support.models.fake_checkpoint import CONFIG, write_checkpoint, write_safetensors
from tests.support.service.starts import complaint_of, options_for

HIDDEN, INNER = 64, 24
_CONFIG = {**CONFIG, "hidden_size": HIDDEN}
_EXPERTS = "model.layers.0.mlp.experts"
_SLOT = 2 * (HIDDEN + 2 * INNER) + HIDDEN + INNER  # gate and up as one product of twice the rank, and down


def test_adapters_are_counted_up_to_the_largest_rank_and_number(tmp_path: Path) -> None:
    features, options = AdaptedFeatures(1000, 10), options_for(tmp_path)
    assert features.rank_bytes(options.engine, 4) == 0
    engine = options.with_engine(enable_lora=True, max_loras=3, max_lora_rank=17).engine
    assert features.rank_bytes(engine, 4) == 2 * 3 * 32 * (1000 + 4 * 10) * 4
    assert features.rank_bytes(options.with_engine(enable_lora=True, max_cpu_loras=9).engine, 0) == (
        9 * 64 * 1000 * 4
    )
    assert features.rank_bytes(engine, 4, on_gpu=True) == 3 * 32 * (1000 + 4 * 10) * 4
    engine = options.with_engine(
        enable_lora=True, max_loras=3, max_lora_rank=17, max_num_batched_tokens=100
    ).engine
    wide = features._replace(pairs=8 * 768)
    assert wide.rank_bytes(engine, 4) == features.rank_bytes(engine, 4)
    step_bytes = wide.rank_bytes(engine, 4, on_gpu=True) - features.rank_bytes(engine, 4, on_gpu=True)
    assert step_bytes == 100 * 8 * 768 * 26


@pytest.mark.parametrize(
    ("shapes", "dtype", "element_bytes"),
    [
        ({f"{_EXPERTS}.gate_up_proj": [4, 2 * INNER, HIDDEN], f"{_EXPERTS}.down_proj": [4, HIDDEN, INNER]}, "BF16", 2),
        ({f"{_EXPERTS}.gate_up_proj": [4, HIDDEN, 2 * INNER], f"{_EXPERTS}.down_proj": [4, INNER, HIDDEN]}, "BF16", 2),
        (
            {
                f"{_EXPERTS}.{expert}.{leaf}.weight": [HIDDEN, INNER] if leaf == "w2" else [INNER, HIDDEN]
                for expert in range(4) for leaf in ("w1", "w2", "w3")
            },
            "F8_E4M3", 1,
        ),
        (
            {
                f"{_EXPERTS}.{expert}.{leaf}.qweight": [INNER, HIDDEN // 8] if leaf == "down_proj" else [HIDDEN, INNER // 8]
                for expert in range(4) for leaf in ("gate_proj", "up_proj", "down_proj")
            },
            "I32", 4,
        ),
        ({f"{_EXPERTS}.gate_up_proj_blocks": [4, 2 * INNER, 2, 16], f"{_EXPERTS}.down_proj_blocks": [4, HIDDEN, 1, 12]}, "U8", 1),
    ],
    ids=["fused", "transposed", "apart", "words of four bits", "blocks"],
)  # fmt: skip
def test_experts_of_every_layout_are_counted_alike(
    tmp_path: Path, shapes: dict[str, list[int]], dtype: str, element_bytes: int
) -> None:
    write_safetensors(tmp_path / "model.safetensors", shapes, dtype=dtype, element_bytes=element_bytes)
    small = {f"{_EXPERTS}.gate_up_proj_bias": [4, 2 * INNER], f"{_EXPERTS}.down_proj_scales": [4, HIDDEN, 1]}
    write_safetensors(tmp_path / "small.safetensors", small)
    assert adapted_features(tmp_path, _CONFIG) == AdaptedFeatures(0, _SLOT)


def test_only_matrices_that_adapters_may_change_are_counted(tmp_path: Path) -> None:
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": [32, HIDDEN],
        "model.layers.0.self_attn.q_proj.weight_scale_inv": [1, 1],
        "model.layers.0.self_attn.q_norm.weight": [8],
        "model.layers.0.mlp.shared_experts.up_proj.weight": [INNER, HIDDEN],
        "model.layers.0.linear_attn.conv1d.weight": [16, 1, 4],
        "model.layers.3.self_attn.q_proj.weight": [32, HIDDEN],  # for multi-token prediction
        "model.layers.3.eh_proj.weight": [HIDDEN, 2 * HIDDEN],
        "visual.blocks.0.q_proj.weight": [32, HIDDEN],
        f"{_EXPERTS}.gate_up_proj": [4, 2 * INNER, HIDDEN],
        f"{_EXPERTS}.down_proj": [4, HIDDEN, INNER],
    }
    write_safetensors(tmp_path / "model.safetensors", shapes)
    config = {**_CONFIG, "num_hidden_layers": 3}
    query, up = 32 + HIDDEN, INNER + HIDDEN
    config |= {"moe_intermediate_size": INNER, "num_experts_per_tok": 2}
    assert adapted_features(tmp_path, config) == (query + up, _SLOT, 2 * INNER)
    assert adapted_features(tmp_path, config, ["q_proj"]) == (query, 0, 0)
    assert adapted_features(tmp_path, config, ["experts"]) == (0, _SLOT, 2 * INNER)


def test_adapters_that_do_not_fit_are_refused_with_the_numbers(tmp_path: Path) -> None:
    weights, experts = WeightBytes(shared=2 << 30, experts=8 << 30), ExpertMemory(4, 2 << 30, 0)
    options = options_for(tmp_path).with_engine(enable_lora=True, max_loras=4)
    complaint = complaint_of(
        lambda: check_memory(weights, [experts] * 2, options, free_bytes=12 << 30, adapters=[3 << 30] * 2)
    )
    for part in (
        "would need about 14.6 GiB, but only 12.0 GiB is free", "+ 3.0 GiB for up to 8 adapters of rank 64",
        "Use a smaller --max-lora-rank, --max-loras or --max-cpu-loras, fewer --lora-target-modules, fewer ranks",
    ):  # fmt: skip
        assert part in complaint
    plain = complaint_of(lambda: check_memory(weights, [experts] * 2, options, free_bytes=1))
    assert "adapters" not in plain and "--lora" not in plain


def test_a_start_counts_the_room_for_its_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.serve.preflight.checks.available_bytes", lambda: 1 << 29)
    options = options_for(write_checkpoint(tmp_path)).with_engine(enable_lora=True)
    weights = check_files(options, [1])
    check_room(options, weights, pool_sizes=[1], gpu_bytes=None)
    many = options.with_engine(max_loras=128, max_lora_rank=4096)
    complaint = complaint_of(lambda: check_room(many, weights, pool_sizes=[1], gpu_bytes=None))
    assert "for up to 256 adapters of rank 4096" in complaint
    check_room(many.with_engine(enable_lora=False), weights, pool_sizes=[1], gpu_bytes=None)


def test_gpus_that_use_deepep_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.serve.preflight.checks.check_backend", lambda *_names, **_on_gpus: None)
    options = replace(options_for(write_checkpoint(tmp_path)), device="cuda").with_engine(enable_lora=True)
    check_choices(options, [1, 4])
    deep_ep = options.with_engine(all2all_backend="deep_ep")
    assert "with 4 GPUs and --all2all-backend deep_ep" in complaint_of(lambda: check_choices(deep_ep, [1, 4]))


@pytest.mark.slow  # builds engines
@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("qwen3_moe", ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "lm_head", "embed_tokens")),
        (
            "deepseek_v3",
            (
                "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate",
                "lm_head", "embed_tokens",
            ),
        ),
    ],
)  # fmt: skip
def test_the_room_is_that_of_an_adapter_on_everything(
    family: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    model = families.write_checkpoint(family, directory)
    path = write_adapter(tmp_path / "adapter", model, modules=modules, experts=SINGLE, rank=16).directory
    built = build(directory, max_model_len=64, enable_lora=True, max_loras=1, max_lora_rank=16)
    try:
        bank = built.model.adapters
        assert bank is not None
        found = bank.load(path, read_adapter(path).digest, max_rank=16).num_bytes
    finally:
        built.engine.close()
    options = options_for(directory).with_engine(
        enable_lora=True, max_loras=1, max_cpu_loras=1, max_lora_rank=16
    )
    assert found <= rank_adapter_bytes(options, 1) <= 1.1 * found
    config = read_config(directory)
    for names in ((), ("experts",), ("q_proj", "up_proj")):
        counted = adapted_features(directory, config, names)
        for source in (directory, directory / "config.json"):
            read = read_model(source, on_gpu=False, float_bytes=4, adapted_modules=names)
            assert read.adapted == counted
