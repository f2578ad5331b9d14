"""`wideep size` from the command line: its output, and one-sentence errors for bad input."""

import functools
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from server.serve.preflight.device import Gpu, GpuFacts
from server.tools.gpu_rates import GpuRates
from server.tools.size.costs import devices
from server.tools.size.costs.device_table import DEVICES, sheet_of
from server.tools.size.costs.read_model import read_model
from server.tools.size.costs.roofline import RateShares
from server.tools.size.published import MODELS

_DENSE = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}


@pytest.fixture(autouse=True, scope="module")
def reads_once() -> Iterator[None]:
    """Read a model once for all commands that ask for it in the same way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.tools.size.size.read_model", functools.cache(read_model))
        yield


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of gpt-oss-120b with four layers, and no other file."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    config = {**MODELS["gpt-oss-120b"], "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    path.write_text(json.dumps(config))
    return path


def _said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["size", *words]) == status
    out, err = capsys.readouterr()
    return err if status == 2 else out


def test_a_config_alone_gives_memory_times_flags_and_assumptions(
    gpt_oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _said(
        capsys, str(gpt_oss), "--device", "h100", "--ranks", "2", "--users", "16", "--context", "8192"
    )
    for part in (
        "experts in mxfp4", "without weight files", "KV cache:", "time per output token", "does expert parallelism pay",
        "wideep serve MODEL -dp 2 --device cuda --max-model-len 8192", "assumed", "have not been compared with WideEP on GPUs",
    ):  # fmt: skip
        assert part in said
    assert "https://www.nvidia.com" in said, "a device's figures have a source"


def test_json_has_the_same_figures(gpt_oss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(gpt_oss), "--device", "h200", "-dp", "4", "--max-concurrency", "64", "--json")
    found: dict[str, Any] = json.loads(_said(capsys, *words))
    memory, expected = found["memory_per_rank"], found["expected"]
    assert memory["slots_per_rank"] == 32 and (found["ranks"], found["nodes"]) == (4, 1)
    assert found["output_per_node"] == 4 * expected["output_per_rank"]
    assert f"--max-num-batched-tokens {found['max_num_batched_tokens']}" in found["command"]
    assert found["misses"] is None and any("log-normal" in line for line in found["assumed"])
    assert expected["output_per_rank"] * 4 == pytest.approx(64 / expected["tpot_s"], rel=0.01)
    parts = [expected["step"][f"{name}_s"] for name in ("attention", "experts", "dispatch", "other")]
    assert sum(parts) == pytest.approx(expected["step"]["total_s"])


def test_the_fewest_ranks_for_a_target_are_found(gpt_oss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(gpt_oss), "--device", "h100", "--users", "64", "--context", "4096", "--json")
    slow = json.loads(_said(capsys, *words, "--tpot-ms", "100"))
    fast = json.loads(_said(capsys, *words, "--tpot-ms", "2.7"))
    assert slow["ranks_for_target"] < fast["ranks_for_target"] == 7, "the result need not be a power of two"
    assert fast["expected"]["tpot_s"] <= 0.0027
    one_less = json.loads(_said(capsys, *words, "--tpot-ms", "2.7", "-dp", "6", status=1))
    assert one_less["expected"]["tpot_s"] > 0.0027 and one_less["ranks_for_target"] == 7


def test_the_fewest_ranks_keep_a_first_token_s_target_too(
    gpt_oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(gpt_oss), "--device", "h100", "--users", "64", "--context", "4096", "--json")
    found = json.loads(_said(capsys, *words, "--ttft-ms", "5"))
    assert found["expected"]["ttft_s"] <= 0.005 and found["ranks_for_target"] == 6
    fewer = json.loads(_said(capsys, *words, "--ttft-ms", "5", "-dp", "2", status=1))
    assert fewer["misses"] == "time to the first token"


def test_every_share_of_the_roofline_is_told(gpt_oss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = _said(capsys, str(gpt_oss), "--device", "h100", "--ranks", "16").partition("assumed\n")[2]
    for part in (
        "80% of memory", "70% of products", "65% in attention", "80% of links", "86% of the network", "75% of all",
        "20 us by links", "40 us by the network", "32 rows of padding", "2 passes over the rows per product", "40 us per layer", "1 ms per step",
        "90% of the memory is for weights",
    ):  # fmt: skip
        assert part in said
    assert len(RateShares._fields) == 12, "the list above is complete"


def test_the_command_line_starts_what_was_sized(gpt_oss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"num_redundant_experts": 4, "step_interval": 100}
    words = ["--device", "h100", "-dp", "12", "--mamba-cache-mode", "none", "--quantization", "mxfp4"]
    said = _said(capsys, str(gpt_oss), *words, "--eplb-config", json.dumps(given))
    assert "torchrun --nnodes 2 --nproc-per-node 6" in said
    line = next(line for line in said.splitlines() if "wideep worker" in line)
    words = shlex.split(line)
    assert words[words.index("--mamba-cache-mode") + 1] == "none"
    assert words[words.index("--quantization") + 1] == "mxfp4"
    assert json.loads(words[words.index("--eplb-config") + 1]) == given | {"num_redundant_experts": 4}


def test_tiers_are_counted_in_tokens_and_in_multiples_of_the_kv_cache(
    gpt_oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = ("--kv-offloading-size", "20", "--kv-offloading-dir", "/kv", "--kv-offloading-disk-size", "1.5T")
    words = (str(gpt_oss), "--device", "h100", "-dp", "16", "--kv-cache-memory", "1G", *tiers)
    found = json.loads(_said(capsys, *words, "--json"))
    memory, (host, disk) = found["memory_per_rank"], found["tiers_per_node"]
    assert (host["name"], host["num_bytes"], disk["num_bytes"]) == ("host memory", 20 << 30, 3 << 39)
    assert (
        host["tokens"] == pytest.approx(host["num_bytes"] / memory["token_bytes"], abs=16)
        and host["tokens"] % 16 == 0
    )
    assert memory["host_tier"] == 0, "a GPU's memory has none of it"
    said = _said(capsys, *words)
    assert f"a node's tier, host memory: 20.0 GiB, {host['tokens']:,} tokens; 2.5 times the KV cache" in said
    assert "a node's tier, disk: 1536.0 GiB" in said
    assert "--kv-offloading-size 20G --kv-offloading-dir /kv --kv-offloading-disk-size 1536G" in said
    assert "a node's tier" not in _said(capsys, *words[:5])


def test_the_tier_of_a_cpu_is_part_of_its_memory(gpt_oss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(gpt_oss), "--device", "cpu", "-dp", "2")
    plain = json.loads(_said(capsys, *words, "--json"))["memory_per_rank"]
    less = json.loads(_said(capsys, *words, "--kv-offloading-size", "64G", "--json"))["memory_per_rank"]
    assert less["host_tier"] == 32 << 30
    assert plain["kv_cache"] - less["kv_cache"] == pytest.approx((64 << 30) * 0.25 / 2, rel=1e-3)
    assert "tier in host memory" in _said(capsys, *words, "--kv-offloading-size", "64G")
    for given in ((), ("--kv-cache-memory", "4G")):
        said = _said(capsys, *words, *given, "--kv-offloading-size", "100T", status=2)
        assert "51200.0 of its node's tier in host memory), but cpu has" in said


def test_adapters_are_part_of_the_memory_and_of_the_command(
    gpt_oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(gpt_oss), "--device", "cpu", "-dp", "2", "--enable-lora", "--max-lora-rank", "16")
    everywhere: dict[str, Any] = json.loads(_said(capsys, *words, "--json"))
    hidden = inner = 2880
    experts = 64 * (2 * (hidden + 2 * inner) + hidden + inner) * 4  # of 4 layers, half of the 128 experts
    per_adapter = everywhere["memory_per_rank"]["adapters"] / 16 / 16 / 4
    assert 1.0 < per_adapter / experts < 1.1, "and attention, routers, embedding and output projection"
    dense = (*words, "--max-loras", "4", "--lora-target-modules", "q_proj", "o_proj")
    said = _said(capsys, *dense)
    assert "LoRA adapters, at most" in said and "8 of rank 16 on q_proj, o_proj" in said
    assert "--enable-lora --max-loras 4 --max-lora-rank 16 --lora-target-modules q_proj o_proj" in said
    assert "LoRA" not in _said(capsys, *words[:5])
    many = _said(
        capsys, *words[:5], "--enable-lora", "--max-loras", "128", "--max-lora-rank", "4096", status=2
    )
    assert "of weights, adapters and buffers" in many


def test_replicas_are_cut_over_any_part_of_the_ranks_and_have_their_share(
    gpt_oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(gpt_oss), "--users", "512", "--context", "4096", "--json")
    twelve = json.loads(_said(capsys, *words, "--device", "h100", "-dp", "12"))
    assert [each["ways"] for each in twelve["replicas"]] == [1, 2, 4], "the cut divides 64 heads evenly"
    kept_small = (*words, "--device", "h100", "-dp", "12", "--kv-cache-memory", "40M")
    few = json.loads(_said(capsys, *kept_small))
    assert (
        few["replicas"][0]["expected"]["running_per_rank"]
        < twelve["replicas"][0]["expected"]["running_per_rank"]
    )


def test_a_kv_cache_in_8_bits_holds_more_tokens_and_is_part_of_the_command(
    gpt_oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        str(gpt_oss),
        "--device",
        "h100",
        "-dp",
        "4",
        "--kv-cache-memory",
        "1G",
        "--context",
        "4096",
        "--json",
    )
    plain, coded = (
        json.loads(_said(capsys, *words, *flags)) for flags in ((), ("--kv-cache-dtype", "fp8_e4m3"))
    )
    of_heads = 8 * 64 * 2  # 8 KV heads of 64 values
    bytes_of = [each["memory_per_rank"]["token_bytes"] for each in (plain, coded)]
    assert bytes_of[0] * (of_heads + 8 * 8) == bytes_of[1] * 2 * of_heads, "numbers and two scales per head"
    tokens = [each["memory_per_rank"]["kv_tokens"] for each in (plain, coded)]
    assert tokens[1] == pytest.approx(tokens[0] * bytes_of[0] / bytes_of[1], rel=0.01)
    assert "--kv-cache-dtype fp8" in coded["command"] and "--kv-cache-dtype" not in plain["command"]


def test_given_ranks_that_miss_a_target_are_status_1(
    gpt_oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(gpt_oss), "--device", "h100", "--users", "64", "--context", "4096", "-dp", "1")
    said = _said(capsys, *words, "--tpot-ms", "2.5", status=1)
    assert "target TPOT 2.5 ms: missed (time per token) on 1 rank" in said


@pytest.mark.crossed("flags", every=2)
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--device", "h10"], "--device is 'h10' (did you mean h100?); known devices are a100, h100,"),
        (["--device", "h100", "--tpot-ms", "0.1"], "reaches a time per token of 0.1 ms; the best is"),
        (["--device", "h100", "--users", "64", "--ttft-ms", "1"], "reaches a time to the first token of 1 ms; the best is 4."),
        (["--device", "h100", "--users", "10000000", "--tpot-ms", "1e6"], "meets all targets at once for 10000000 users; 512 ranks have room"),
        (["--device", "h100", "--tpot-ms", "soon"], "--tpot-ms is 'soon'; it must be a number"),
        (["--device", "h100", "--users", "0"], "--users is 0; it must be at least 1"),
        (["--device", "l40s", "-dp", "1", "--gpu-memory-utilization", "0.1"], "leaves nothing for the KV cache; use more ranks"),
        (["--device", "h100", "--input", "200k"], "a sequence may have at most 131072"),
        (["--device", "h100", "--context", "200k"], "--max-model-len is 200000; this model has 131072 positions"),
        (["--device", "h100", "-dp", "9"], "9 ranks cannot be divided equally between 2 nodes of 8; give 8 or 10"),
        (["--device", "h100", "--tpot-ms", "inf"], "--tpot-ms is inf; it must be above 0"),
        (["--device", "h100", "-dp", "1", "--eplb-config", '{"num_redundant_experts": 4}'], "1 rank has use for at most 0 in addition"),
        (["--device", "h100", "--quantization", "fp8"], "are quantised as mxfp4"),
        (["--device", "h100", "--quantization", "int4"], "are already quantised (mxfp4)"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_one_sentence(
    gpt_oss: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _said(capsys, str(gpt_oss), *flags, status=2)
    assert said.startswith("wideep size: ") and says in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "does not exist; use a model directory, its config.json, a name on the hub"),
        (_DENSE, "is not a Mixture-of-Experts model"),
        ({"model_type": "no_such", "num_experts": 4}, "transformers cannot use"),
        (
            {**MODELS["gpt-oss-120b"], "quantization_config": "fp8"},
            "quantization_config is 'fp8'; it must be",
        ),
        (
            {**MODELS["gpt-oss-120b"], "num_attention_heads": 0},
            "gpt_oss cannot be built from its config.json: ZeroDivisionError",
        ),
        ("{oh", "config.json is not valid JSON"),
    ],
)
def test_what_is_no_model_is_one_sentence(
    tmp_path: Path, config: dict[str, Any] | str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    if config is not None:
        path.write_text(config if isinstance(config, str) else json.dumps(config))
    said = _said(capsys, str(path), "--device", "h100", status=2)
    assert "wideep_size_" not in said, "the file is named as the user wrote it"
    assert said.startswith("wideep size: ") and says in said and said.count("\n") == 1


def test_no_model_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "MODEL is missing" in _said(capsys, status=2)


def test_this_gpu_is_measured_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(name="NVIDIA H200", capability=(9, 0), free_bytes=10, total_bytes=20)] * 2
    monkeypatch.setattr(devices, "look", lambda: (GpuFacts(devices=tuple(gpus)), ""))
    monkeypatch.setattr(devices, "measure_gpu", lambda: GpuRates(4e12, 8e14))
    this = devices.device_named("this")
    assert (this.is_cpu, this.is_measured, this.memory_bytes) == (False, True, 10)
    assert (this.memory_bytes_per_s, this.rate_of("fp8"), this.node_ranks) == (4e12, 8e14, 2)
    assert this.link_bytes_per_s == DEVICES["h200"].link_bytes_per_s
    assert "2 x NVIDIA H200" in this.source and "measured now" in this.source


def test_links_of_an_unknown_gpu_are_those_of_pcie() -> None:
    gpu = Gpu(name="NVIDIA GeForce RTX 4090", capability=(8, 9), free_bytes=10, total_bytes=20)
    assert sheet_of(gpu.name) is None
    assert devices.gpu_of([gpu], GpuRates(1e12, 1e14)).link_bytes_per_s == 32e9


def test_this_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "look", lambda: (GpuFacts(), "this machine has no CUDA device"))
    monkeypatch.setattr(devices, "_MEASURED_BYTES", 16 << 20)
    monkeypatch.setattr(devices, "_MEASURED_ROWS", 256)
    this = devices.device_named("this")
    assert this.is_cpu and this.is_measured
    assert 1e8 < this.memory_bytes_per_s < 1e13 and 1e8 < this.rates["float32"] < 1e15
    assert this.shared_by(2).memory_bytes_per_s == this.memory_bytes_per_s / 2


def test_several_pools_are_sized_one_by_one_and_added_up(
    gpt_oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (str(gpt_oss), "--device", "h200")
    words = (*common, "--pools", "both:1,both:2", "--users", "30")
    found: dict[str, Any] = json.loads(_said(capsys, *words, "--json"))
    alone: dict[str, Any] = json.loads(_said(capsys, *common, "-dp", "2", "--users", "20", "--json"))
    second = found["pools"]["both-1"]
    for name in ("memory_per_rank", "workload", "expected"):
        assert second[name] == alone[name], "a pool is a group with its part of the users"
    pools = found["pools"].values()
    assert found["ranks"] == 3
    assert found["kv_tokens"] == sum(each["ranks"] * each["memory_per_rank"]["kv_tokens"] for each in pools)
    assert "serve MODEL --pools both:1,both:2 --device" in found["command"] and "-dp" not in found["command"]
    said = _said(capsys, *words)
    refused = _said(capsys, *words, "-dp", "3", status=2)
    assert refused == "wideep size: --pools has the number of ranks; remove --ranks (-dp)\n"
    for part in ("== pool both-0 ==", "== pool both-1 ==", "== all 2 pools ==\n3 ranks, ", found["command"]):
        assert part in said


def _sides(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Return the prefill pool, the decode pool, and the prompts per second. Check that as many answers end."""
    prefill, decode = found["pools"]["prefill"], found["pools"]["decode"]
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    rate = prefill["expected"]["input_per_rank"] * prefill["ranks"] / prefill["workload"]["input_tokens"]
    answers = decode["expected"]["output_per_rank"] * decode["ranks"] / decode["workload"]["output_tokens"]
    assert rate == pytest.approx(answers)
    return prefill, decode, rate


def test_a_decode_pool_holds_the_answers_and_a_prefill_pool_few_requests(
    gpt_oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(gpt_oss), "--device", "h200", "--users", "300", "--input", "2000", "--output", "1000")
    found = json.loads(_said(capsys, *words, "--pools", "prefill:2,decode:2", "--json"))
    prefill, decode, rate = _sides(found)
    first_s = prefill["expected"]["ttft_s"]
    assert decode["workload"]["users"] + rate * first_s == pytest.approx(300, abs=1), "every user has a place"
    assert prefill["workload"]["users"] < 30 < decode["workload"]["users"]
    assert decode["expected"]["prefill_per_step"] == 0 and prefill["expected"]["output_per_rank"] == 0
    group = json.loads(_said(capsys, *words, "-dp", "2", "--json"))["expected"]
    assert group["running_per_rank"] >= decode["expected"]["running_per_rank"] > 100
    assert decode["expected"]["tpot_s"] < group["tpot_s"], "its steps contain no prompts"
    assert found["running"] == decode["workload"]["users"]
    said = _said(capsys, *words, "--pools", "prefill:2,decode:2")
    assert (
        "== pool prefill ==" in said and "without prompts" in said and "; the prefill pools are busy " in said
    )
    assert "does expert parallelism pay" not in said, "a pool of one role cannot be compared with replicas"


def test_prompts_that_outrun_the_prefill_pool_limit_the_service(
    gpt_oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--device h200 --users 600 --input 8000 --output 20 --pools"
    words = (str(gpt_oss), *given.split())
    prefill, decode, rate = _sides(json.loads(_said(capsys, *words, "prefill:1,decode:3", "--json")))
    assert decode["workload"]["users"] < 100
    waiting = prefill["expected"]["ttft_s"] * rate
    assert waiting + decode["workload"]["users"] == pytest.approx(600, rel=0.01), (
        "the others wait for prompts"
    )
    assert "; the prefill pools limit them" in _said(capsys, *words, "prefill:1,decode:3")
    more = json.loads(_said(capsys, *words, "prefill:3,decode:1", "--json"))
    assert _sides(more)[2] > 2 * rate


def test_answers_that_do_not_fit_wait_for_room_on_the_decode_pool(
    gpt_oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--device h200 --pools prefill:1,decode:1 --users 2000 --output 2000 --max-num-seqs 100"
    words = (str(gpt_oss), *given.split())
    _, decode, _ = _sides(json.loads(_said(capsys, *words, "--json")))
    assert decode["workload"]["users"] == 100 and decode["expected"]["waiting_users"] > 1500
    assert "users wait for room" in (said := _said(capsys, *words))
    assert "; the KV cache of the decode pools limits them" in said


def test_each_target_is_that_of_one_side(gpt_oss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(gpt_oss), "--device", "h200", "--pools", "prefill:1,decode:1", "--users", "60", "--json")
    for target, side in (("--tpot-ms", "decode"), ("--ttft-ms", "prefill")):
        found = json.loads(_said(capsys, *words, target, "0.01", status=1))["pools"]
        assert [name for name, pool in found.items() if pool["misses"]] == [side]
        assert not any(
            pool["misses"] for pool in json.loads(_said(capsys, *words, target, "10000"))["pools"].values()
        )


def test_pools_on_a_cpu_share_the_machine(gpt_oss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (str(gpt_oss), "--device", "cpu", "--kv-offloading-size", "20G", "--json")
    pools: dict[str, Any] = json.loads(_said(capsys, *common, "--pools", "both:1,both:1"))
    group: dict[str, Any] = json.loads(_said(capsys, *common, "-dp", "2"))
    for pool in pools["pools"].values():
        for name in ("total", "host_tier"):
            assert pool["memory_per_rank"][name] == group["memory_per_rank"][name]
    assert "--kv-offloading-size 20G" in pools["command"]
