"""A device name selects how models are built for it. Unknown names raise an error that lists the supported ones."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from dispatch.errors import WireUnavailable
from moe.cpu.backend import CPU
from scheduler.assembly import check_compiler
from scheduler.policy.config import ConfigError, EngineConfig
from scheduler.step.parts import backend_of, open_device_dispatcher
from tests.support.engines.serving import build, request, serve


@pytest.mark.parametrize("name", ["tpu", "", "gpu:0"])
def test_other_devices_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the device is {name!r}; it must be cpu, cuda, cuda:0"):
        backend_of(EngineConfig(directory=Path(), kv_cache_bytes=0, device=name))


def test_nodes_of_gpus_are_refused_with_what_to_give() -> None:
    config = EngineConfig(directory=Path(), kv_cache_bytes=0, device="cuda", dispatch_node_size=2)
    with pytest.raises(WireUnavailable, match="--dispatch-node-size is 2; between GPUs"):
        open_device_dispatcher(config, CPU, None, 4)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"device": "cpu"}, "for GPUs; the CPU's kernels are compiled already"),
        ({"device": "interpreter", "batch_invariant": True}, "cannot be combined with --batch-invariant"),
    ],
)
def test_a_compiler_is_refused_beside_what_it_does_not_go_with(
    settings: dict[str, Any], problem: str
) -> None:
    asked = {"world_size": 2, "enforce_eager": True, "enable_torch_compile": True, **settings}
    config = EngineConfig(directory=Path(), kv_cache_bytes=0, **asked)
    with pytest.raises(ConfigError, match=f"--enable-torch-compile .*{problem}"):
        check_compiler(config)


def test_a_cpu_refuses_to_quantise_the_rows_of_fp8_weights() -> None:
    config = EngineConfig(directory=Path(), kv_cache_bytes=0, activation_dtype="fp8")
    with pytest.raises(ConfigError, match="--activation-dtype fp8 is for GPUs"):
        backend_of(config)


CONFIG = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, max_position_embeddings=64, eos_token_id=None,
)  # fmt: skip


@pytest.mark.slow
def test_an_engine_serves_drawn_weights_from_a_folder_that_has_none(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    answers = []
    for _ in range(2):
        built = build(tmp_path, load_format="dummy", max_num_seqs=2)
        answers.append(serve(built, [request("a", [1, 2, 3], max_tokens=6)]).token_ids["a"])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6
    assert built.model.checkpoint.bytes_read > 0


def test_a_format_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="load_format is 'gguf'; it must be auto or dummy"):
        build(tmp_path, load_format="gguf")
