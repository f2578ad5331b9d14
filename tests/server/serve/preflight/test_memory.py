"""The memory that ranks need, from the headers of files, and the machine's memory, including containers' limits."""

import json
from pathlib import Path

import pytest

from attention.gpu.limits import EXPANDED_BYTES, SCORE_BYTES
from expert_placement.files import save_placement
from scheduler.policy.config import EngineSettings
from scheduler.step.sizing import KVMemoryError, attention_bytes, cache_budget
from server.options.table import Options
from server.serve.preflight.memory import (
    WeightBytes,
    attention_heads,
    available_bytes,
    check_memory,
    has_image_experts,
    rank_experts,
    spare_bytes,
    usable_cores,
    weight_bytes,
)
from tests.support.models.fake_checkpoint import CONFIG, write_checkpoint, write_safetensors
from tests.support.placement.placements import random_placement
from tests.support.service.starts import complaint_of, options_for


def test_weights_are_counted_in_the_type_they_are_kept_in(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "embed": [3, 5],
            "layers.0.mlp.experts.0.up_proj.weight": [2, 2],
            "layers.0.mlp.shared_experts.up_proj.weight": [2, 3],
            "layers.0.moe.input_linear.weight": [4, 2, 2],
        },
        dtype="BF16",
        element_bytes=2,
    )
    assert weight_bytes(tmp_path, CONFIG, 4) == WeightBytes(shared=(15 + 6) * 4, experts=(4 + 16) * 4)
    layers = {f"layers.{layer}.mlp.experts.{e}.up_proj.weight": [2, 2] for layer in (3, 5, 9) for e in (0, 1)}
    write_safetensors(tmp_path / "more.safetensors", {**layers, "experts.bias": [1]}, element_bytes=4)
    assert weight_bytes(tmp_path, CONFIG, 4).expert_layers == 4, "layer 0 and these"
    (tmp_path / "more.safetensors").unlink()
    as_stored = weight_bytes(tmp_path, CONFIG, None)
    assert (
        as_stored
        == weight_bytes(tmp_path, CONFIG, 2)
        == WeightBytes(shared=(15 + 6) * 2, experts=(4 + 16) * 2)
    )
    write_safetensors(tmp_path / "more.safetensors", {"scales": [10]}, element_bytes=4)
    assert weight_bytes(tmp_path, CONFIG, None).shared == as_stored.shared + 40, "float32 stays float32"


def test_quantised_weights_are_counted_as_they_are(tmp_path: Path) -> None:
    """FP8 and MXFP4 keep one byte and half a byte under any --dtype, plus scales."""
    codes = {"layers.0.mlp.experts.0.up_proj.weight": [32, 64], "layers.0.self_attn.q_proj.weight": [16, 64]}
    write_safetensors(tmp_path / "fp8.safetensors", codes, dtype="F8_E4M3", element_bytes=1)
    blocks = {
        "layers.1.mlp.experts.up_proj_blocks": [2, 16, 2, 16],
        "layers.1.mlp.experts.up_proj_scales": [2, 16, 2],
    }
    write_safetensors(tmp_path / "mxfp4.safetensors", blocks, dtype="U8", element_bytes=1)
    wanted = WeightBytes(shared=16 * 64, experts=32 * 64 + 2 * 16 * (32 + 2), expert_layers=2)
    assert weight_bytes(tmp_path, CONFIG, 4) == weight_bytes(tmp_path, CONFIG, 2) == wanted


@pytest.mark.parametrize(("float_bytes", "kept"), [(None, 4), (2, 2)])
def test_what_latent_attention_absorbs_is_counted_plain(
    tmp_path: Path, float_bytes: int | None, kept: int
) -> None:
    codes = {"layers.0.self_attn.kv_b_proj.weight": [16, 64]}
    write_safetensors(tmp_path / "fp8.safetensors", codes, dtype="F8_E4M3", element_bytes=1)
    assert weight_bytes(tmp_path, CONFIG, float_bytes).shared == kept * 16 * 64
    write_safetensors(tmp_path / "fp8.safetensors", codes, dtype="BF16", element_bytes=2)
    assert weight_bytes(tmp_path, CONFIG, float_bytes).shared == 2 * 16 * 64, "plain weights keep their type"


def test_words_of_four_bits_and_their_scales_are_counted_as_they_are(tmp_path: Path) -> None:
    """AWQ's and GPTQ's int32, with float16 scales under any --dtype. The order of inputs is not kept."""
    prefix = "layers.0.mlp.experts.0.up_proj"
    words = {f"{prefix}.qweight": [8, 32], f"{prefix}.qzeros": [2, 4], f"{prefix}.g_idx": [64]}
    write_safetensors(tmp_path / "words.safetensors", words, dtype="I32", element_bytes=4)
    write_safetensors(
        tmp_path / "f16.safetensors", {f"{prefix}.scales": [2, 32]}, dtype="F16", element_bytes=2
    )
    codes = {"layers.0.mlp.experts.1.up_proj.weight_packed": [32, 32]}
    write_safetensors(tmp_path / "nvfp4.safetensors", codes, dtype="U8", element_bytes=1)
    small = {"layers.0.mlp.experts.1.up_proj.weight_scale": [32, 4]}
    write_safetensors(tmp_path / "small.safetensors", small, dtype="F8_E4M3", element_bytes=1)
    int4, nvfp4 = 32 * 64 // 2 + 2 * 32 // 2 + 2 * 32 * 2, 32 * 64 // 2 + 32 * 4
    for kept in (None, 2, 4):
        assert weight_bytes(tmp_path, CONFIG, kept) == WeightBytes(shared=0, experts=int4 + nvfp4)


def test_too_many_ranks_for_the_memory_are_refused_with_the_numbers(tmp_path: Path) -> None:
    options = options_for(tmp_path).with_engine(kv_cache_bytes=1 << 30)
    weights = WeightBytes(shared=2 << 30, experts=8 << 30, expert_layers=8)
    experts = rank_experts(weights, {"num_experts": 16}, options, 4)
    assert experts == (4, 2 << 30, 1 << 28), "four of sixteen experts: of all layers, and of one of the eight"

    def check(free_gib: int) -> None:
        check_memory(weights, [experts] * 2, options, free_bytes=free_gib << 30)

    check(12)
    complaint = complaint_of(lambda: check(11))
    for number in (
        "2 ranks on this node would need about 11.1 GiB",
        "11.0 GiB is free",
        "2.0 GiB for 4 experts of each layer, out of 8.0 GiB",
        "0.2 GiB for moving experts",
        "1.0 GiB of KV",
    ):
        assert number in complaint


def test_each_rank_counts_with_the_experts_of_its_pool(tmp_path: Path) -> None:
    """A rank alone in its pool holds all experts, and each of a pair only half of them."""
    options = options_for(tmp_path)
    weights = WeightBytes(shared=1 << 30, experts=8 << 30, expert_layers=8)
    alone, one_of_two = (rank_experts(weights, {"num_experts": 16}, options, size) for size in (1, 2))
    experts = [alone, one_of_two, one_of_two]
    needed = check_memory(weights, experts, options, free_bytes=64 << 30)
    processes = needed - 3 * weights.shared - sum(each.serving + each.spare for each in experts)
    assert sum(each.serving for each in experts) == 16 << 30 and 0 < processes < 1 << 30
    complaint = complaint_of(lambda: check_memory(weights, experts, options, free_bytes=needed - 1))
    assert complaint.startswith("3 ranks on this node would need about 20.")
    assert "The largest rank, of the smallest pool, holds 9.0 GiB of weights" in complaint
    assert "8.0 GiB for 16 experts of each layer" in complaint


def test_redundant_experts_and_a_placements_slots_are_counted(tmp_path: Path) -> None:
    weights, config = WeightBytes(shared=0, experts=16 << 20, expert_layers=2), {"num_experts": 16}
    redundant = options_for(tmp_path, '--eplb-config={"num_redundant_experts": 5}')
    assert rank_experts(weights, config, redundant, 4) == (6, 6 << 20, 3 << 20)
    file = tmp_path / "placement.json"
    save_placement(random_placement(2, 16, 4, 7, seed=1), file)
    placed = options_for(tmp_path, f"--expert-placement={file}")
    assert rank_experts(weights, config, placed, 4) == (7, 7 << 20, 7 << 19)
    file.write_text("{")
    assert rank_experts(weights, config, placed, 4).slots_per_rank == 4, (
        "the engine reports the error in the file"
    )
    assert rank_experts(weights, config, options_for(tmp_path), 1).spare == 0, (
        "a single rank moves no experts"
    )


def test_what_attention_takes_beside_the_pages_is_counted(tmp_path: Path) -> None:
    options = options_for(tmp_path).with_engine(max_num_seqs=256)
    deepseek = {
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
    }
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **deepseek}))
    found = attention_heads(options)
    assert found == (128, (512,), True, False, 163840)
    sizes = {"max_num_seqs": 256, "max_model_len": 163840}
    scratch = attention_bytes(128, (512,), is_latent=False, has_index=False, **sizes)
    assert scratch == (256 + 255) * 128 * 514 * 4, "0.13 GB"
    steady = attention_bytes(128, (512,), is_latent=False, has_index=False, is_invariant=True, **sizes)
    assert steady == 256 * 128 * 32 * 514 * 4, "2.1 GB with --batch-invariant"
    both = attention_bytes(128, (512,), is_latent=True, has_index=False, **sizes)
    assert both - scratch == EXPANDED_BYTES
    assert attention_bytes(128, (512,), is_latent=True, has_index=True, **sizes) - both == SCORE_BYTES
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **deepseek, "index_topk": 2048}))
    assert attention_heads(options).has_index
    plain = {"num_attention_heads": 32, "hidden_size": 4096, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(
        json.dumps({**{k: v for k, v in CONFIG.items() if k != "head_dim"}, **plain})
    )
    assert attention_heads(options.with_engine(max_model_len=1000)) == (32, (128,), False, False, 1000)


def test_layers_past_the_models_last_are_not_counted(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp.experts.0.down_proj.weight" for layer in (1, 2, 3)]
    write_safetensors(tmp_path / "model.safetensors", {name: [8, 8] for name in names})
    assert weight_bytes(tmp_path, {**CONFIG, "num_hidden_layers": 3}, 4).expert_layers == 2


def test_layers_for_multi_token_prediction_are_counted_where_they_are_read(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp.experts.0.down_proj.weight" for layer in (1, 2, 3)]
    # The second tensor belongs to the model and is not counted again.
    beside = ["model.layers.3.eh_proj.weight", "model.layers.3.embed_tokens.weight"]
    write_safetensors(tmp_path / "model.safetensors", {name: [8, 8] for name in (*names, *beside)})
    config, one = {**CONFIG, "num_hidden_layers": 3}, 8 * 8 * 4
    assert weight_bytes(tmp_path, config, 4) == WeightBytes(shared=0, experts=2 * one, expert_layers=2)
    with_mtp = weight_bytes(tmp_path, config, 4, has_mtp=True)
    assert with_mtp == WeightBytes(shared=one, experts=3 * one, expert_layers=3)


def test_experts_for_images_are_layers_and_left_out_of_compiled_models(tmp_path: Path) -> None:
    """Experts for text are 0 to 7 of a layer's list, those for images 8 to 15."""
    sizes = {number: [8, 8] if number < 8 else [4, 8] for number in range(16)}
    names = {
        f"model.layers.{layer}.mlp.experts.{number}.up_proj.weight": shape
        for layer in (1, 2)
        for number, shape in sizes.items()
    }
    write_safetensors(tmp_path / "model.safetensors", names)
    config = {"num_hidden_layers": 3, "moe_num_experts": 8, "moe_intermediate_size": [8, 4]}
    text, image = 2 * 8 * 64 * 4, 2 * 8 * 32 * 4
    assert weight_bytes(tmp_path, config, 4) == WeightBytes(shared=0, experts=text + image, expert_layers=4)
    without = weight_bytes(tmp_path, config, 4, has_image_experts=False)
    assert without == WeightBytes(shared=0, experts=text, expert_layers=2)
    compiled = EngineSettings(enable_torch_compile=True)
    assert has_image_experts(Options(model="ernie", device="cpu", engine=compiled))
    assert has_image_experts(Options(model="ernie", device="cuda"))
    assert not has_image_experts(Options(model="ernie", device="cuda", engine=compiled))


def test_towers_for_images_are_not_counted(tmp_path: Path) -> None:
    names = ["model.language_model.norm.weight", "model.visual.blocks.0.norm1.weight", "mm_projector.weight"]
    write_safetensors(tmp_path / "model.safetensors", {name: [8, 8] for name in names})
    assert weight_bytes(tmp_path, CONFIG, 4).shared == 8 * 8 * 4


def test_what_experts_need_that_move_is_not_promised_to_the_cache(tmp_path: Path) -> None:
    options = options_for(write_checkpoint(tmp_path))
    assert spare_bytes(options, 2) == 2 * 8 * 8 * 4
    assert cache_budget(1 << 20, spare_bytes(options, 2)) == (1 << 20) - 512
    with pytest.raises(KVMemoryError, match="experts that move while serving need 2 MiB"):
        cache_budget(1 << 20, 2 << 20)


def test_a_containers_limits_cap_what_the_host_has(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable: 64 kB\n")
    assert available_bytes(meminfo, tmp_path) == 64 << 10
    for name, text in (
        ("memory.max", "9000"),
        ("memory.current", "5000"),
        ("memory.stat", "inactive_file 1000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert available_bytes(meminfo, tmp_path) == 5000
    (tmp_path / "memory.max").write_text("max")
    assert available_bytes(meminfo, tmp_path) == 64 << 10
    (tmp_path / "cpu.max").write_text("50000 100000")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000")
    assert usable_cores(tmp_path) >= 1
