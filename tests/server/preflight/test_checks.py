import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import moe.demo_model
import server.preflight.checks
from expert_placement.placement_file import save_placement
from scheduler.sizing import KVMemoryError, cache_budget
from server.cli import build_parser
from server.options.command_line import Options, options_from
from server.preflight.checks import (
    PreflightError,
    WeightBytes,
    check_backend,
    check_is_moe,
    check_length,
    check_memory,
    check_nodes,
    check_port,
    check_start,
    rank_experts,
    read_config,
    safetensors_files,
    spare_bytes,
    weight_bytes,
)
from server.preflight.machine import available_bytes, usable_cores
from server.preflight.model_source import resolve_model
from tests.support.fake_checkpoint import CONFIG, write_checkpoint, write_safetensors
from tests.support.placements import random_placement


def options_for(model: Path, *flags: str) -> Options:
    return options_from(build_parser().parse_args(["serve", str(model), "--port=0", *flags]), {})


def complaint_of(call: Callable[[], object]) -> str:
    with pytest.raises(PreflightError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.preflight.checks, "available_bytes", lambda: 1 << 40)


@pytest.mark.usefixtures("much_memory")
def test_a_good_model_passes(tmp_path: Path) -> None:
    check_start(options_for(write_checkpoint(tmp_path)), num_ranks=2, num_local_ranks=2, has_front=True)


@pytest.mark.usefixtures("much_memory")
def test_more_ranks_than_experts_are_allowed(tmp_path: Path) -> None:
    check_start(options_for(write_checkpoint(tmp_path)), num_ranks=7, num_local_ranks=1, has_front=False)


def test_a_wrong_path_is_named(tmp_path: Path) -> None:
    assert (
        complaint_of(lambda: read_config(tmp_path / "none"))
        == f"the model path {tmp_path}/none does not exist"
    )
    assert "does not exist" in complaint_of(lambda: resolve_model(str(tmp_path / "none")))
    file = tmp_path / "file"
    file.touch()
    assert "is a file" in complaint_of(lambda: read_config(file))


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    assert "it has no config.json" in complaint_of(lambda: read_config(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    assert "config.json is not" in complaint_of(lambda: read_config(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        {"num_local_experts": 8},
        {"num_experts": 64},
        {"n_routed_experts": 256},
        {"moe_num_experts": 64},
        {"num_experts": [4, 8]},
        {"text_config": {"num_experts": 128}},
    ],
)
def test_the_families_ways_to_count_experts_are_known(config: dict[str, object]) -> None:
    check_is_moe(config, Path("m"))


@pytest.mark.parametrize("config", [{}, {"num_experts": None}, {"num_experts": 0}, {"num_local_experts": 1}])
def test_a_dense_model_is_refused(config: dict[str, object]) -> None:
    complaint = complaint_of(lambda: check_is_moe({**config, "model_type": "llama"}, Path("m")))
    assert "m is not a Mixture-of-Experts model" in complaint
    assert "'llama'" in complaint


def test_a_length_over_the_models_is_refused() -> None:
    check_length(CONFIG, 128)
    check_length({}, 10_000)
    assert complaint_of(lambda: check_length(CONFIG, 129)) == (
        "--max-model-len is 129; the model takes at most 128 tokens"
    )


def test_missing_safetensors_say_what_is_there_instead(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    complaint = complaint_of(lambda: safetensors_files(model))
    assert (
        "has no .safetensors weights; it has pytorch_model.bin, a format that WideEP does not read"
        in complaint
    )


def test_files_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    complaint = complaint_of(lambda: safetensors_files(model))
    assert complaint.startswith("1 of the 2 weight files")
    assert "model-2.safetensors" in complaint
    index.write_text("[]")
    assert "is not a safetensors index" in complaint_of(lambda: safetensors_files(model))


def test_a_cut_download_is_named(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-4])
    assert f"has {len(content) - 4} bytes, its header says {len(content)}" in complaint_of(
        lambda: weight_bytes(tmp_path, CONFIG, 4)
    )


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x02\0\0\0\0\0\0\0{}"]
)
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    (write_checkpoint(tmp_path) / "model.safetensors").write_bytes(content)
    assert "is not a safetensors file" in complaint_of(lambda: weight_bytes(tmp_path, CONFIG, 4))


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
    assert weight_bytes(tmp_path, CONFIG, 2) == WeightBytes(shared=(15 + 6) * 2, experts=(4 + 16) * 2)


def test_quantised_weights_are_counted_as_they_are(tmp_path: Path) -> None:
    """FP8 and MXFP4 stay a byte and half a byte whatever --dtype says, scales beside them."""
    codes = {"layers.0.mlp.experts.0.up_proj.weight": [32, 64], "layers.0.self_attn.q_proj.weight": [16, 64]}
    write_safetensors(tmp_path / "fp8.safetensors", codes, dtype="F8_E4M3", element_bytes=1)
    blocks = {
        "layers.1.mlp.experts.up_proj_blocks": [2, 16, 2, 16],
        "layers.1.mlp.experts.up_proj_scales": [2, 16, 2],
    }
    write_safetensors(tmp_path / "mxfp4.safetensors", blocks, dtype="U8", element_bytes=1)
    wanted = WeightBytes(shared=16 * 64, experts=32 * 64 + 2 * 16 * (32 + 2), expert_layers=2)
    assert weight_bytes(tmp_path, CONFIG, 4) == weight_bytes(tmp_path, CONFIG, 2) == wanted


@pytest.mark.usefixtures("much_memory")
def test_quantisations_that_are_not_served_are_refused_by_name(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    for quantisation, message in (
        (
            {"quant_method": "gptq", "bits": 4},
            "cannot be served: the checkpoint is quantised with GPTQ (gptq)",
        ),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "one scale per tensor"),
    ):
        (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
        options = options_for(directory)
        assert message in complaint_of(
            lambda options=options: check_start(options, num_ranks=1, num_local_ranks=1, has_front=False)
        )


def test_too_many_ranks_for_the_memory_are_refused_with_the_numbers(tmp_path: Path) -> None:
    options = replace(options_for(tmp_path), kv_cache_bytes=1 << 30)
    weights = WeightBytes(shared=2 << 30, experts=8 << 30, expert_layers=8)
    experts = rank_experts(weights, {"num_experts": 16}, options, 4)
    assert experts == (4, 2 << 30, 1 << 28), "four of sixteen, and as many of one of eight layers"

    def check(free_gib: int) -> None:
        check_memory(weights, experts, options, num_local_ranks=2, free_bytes=free_gib << 30)

    check(12)
    complaint = complaint_of(lambda: check(11))
    for number in (
        "2 ranks on this node would take about 11.1 GiB",
        "11.0 GiB is free",
        "4 experts of each layer: 2.0 GiB where all ranks together need 8.0 GiB",
        "0.2 GiB for experts that move",
        "1.0 GiB of KV",
    ):
        assert number in complaint


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
        "the engine says what is wrong with it"
    )
    assert rank_experts(weights, config, options_for(tmp_path), 1).spare == 0, "one rank moves nothing"


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("ending", ["json", "npz"])
def test_a_placement_for_the_model_and_the_ranks_passes_and_its_slots_count(
    tmp_path: Path, ending: str
) -> None:
    model, file = write_checkpoint(tmp_path / "model"), tmp_path / f"placement.{ending}"
    save_placement(random_placement(1, 4, 2, 3, seed=1), file)
    options = options_for(model, f"--expert-placement={file}")
    check_start(options, num_ranks=2, num_local_ranks=2, has_front=True)
    weights = weight_bytes(model, CONFIG, 4)
    assert rank_experts(weights, CONFIG, options, 2).slots_per_rank == 3


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((2, 4, 2, 3), "is a placement of 2 layers of 4 experts on 2 ranks; this service has 1 layers of 4"),
        (
            (1, 5, 2, 3),
            "of 5 experts on 2 ranks; this service has 1 layers of 4 experts on 2 ranks. Plan one",
        ),
        ((1, 4, 4, 2), "on 4 ranks; this service has 1 layers of 4 experts on 2 ranks"),
        (None, "it has no array num_experts, num_ranks, slot_expert: it is a recorded load"),
        ((), "cannot be read: No such file"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused_before_any_rank_starts(
    tmp_path: Path, sizes: tuple[int, ...] | None, said: str
) -> None:
    model, file = write_checkpoint(tmp_path / "model"), tmp_path / "placement.npz"
    if sizes:
        save_placement(random_placement(*sizes, seed=1), file)
    elif sizes is None:
        np.savez(file, load=np.ones((3, 1, 4)))
    options = options_for(model, f"--expert-placement={file}")
    complaint = complaint_of(lambda: check_start(options, num_ranks=2, num_local_ranks=2, has_front=True))
    assert complaint.startswith("--expert-placement: ") and str(file) in complaint and said in complaint


def test_layers_past_the_models_last_are_not_counted(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp.experts.0.down_proj.weight" for layer in (1, 2, 3)]
    write_safetensors(tmp_path / "model.safetensors", {name: [8, 8] for name in names})
    assert weight_bytes(tmp_path, {**CONFIG, "num_hidden_layers": 3}, 4).expert_layers == 2


def test_what_experts_need_that_move_is_not_promised_to_the_cache(tmp_path: Path) -> None:
    options = options_for(write_checkpoint(tmp_path))
    assert spare_bytes(options, 2) == 2 * 8 * 8 * 4
    assert cache_budget(1 << 20, spare_bytes(options, 2)) == (1 << 20) - 512
    with pytest.raises(KVMemoryError, match="experts that move while serving need 2 MiB"):
        cache_budget(1 << 20, 2 << 20)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in complaint_of(lambda: check_port("127.0.0.1", port))
    check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host.invalid"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    assert f"--host is {host!r}, which is no address of this machine" in complaint_of(
        lambda: check_port(host, 0)
    )


def test_a_hub_that_cannot_be_reached_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub  # noqa: PLC0415 - half a second, for one test

    def fail(*_: object, **__: object) -> str:
        raise OSError("no route to the hub\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    complaint = complaint_of(lambda: resolve_model("org/name"))
    assert (
        "'org/name' is neither a directory here nor to be had from the hub (OSError: no route to the hub)"
        in complaint
    )


def test_a_demo_model_that_cannot_be_made_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise moe.demo_model.DemoModelError("the disk is full")

    monkeypatch.setattr(moe.demo_model, "ensure_demo_model", fail)
    assert complaint_of(lambda: resolve_model("demo")) == "the demo model could not be made: the disk is full"


def test_a_directory_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert resolve_model("m") == (tmp_path / "m").resolve()


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


def test_a_backend_for_gpus_is_refused_before_the_model_is_looked_at(tmp_path: Path) -> None:
    options = replace(options_for(tmp_path / "none"), all2all_backend="nvshmem")
    complaint = complaint_of(lambda: check_start(options, num_ranks=2, num_local_ranks=2, has_front=True))
    assert complaint.startswith("--all2all-backend is nvshmem, which cannot be used: ")
    assert complaint.endswith("; use auto, gloo or shm")


def test_local_is_refused_for_two_ranks() -> None:
    check_backend("local", 1)
    assert "it serves one: use auto, gloo or shm" in complaint_of(lambda: check_backend("local", 2))


def test_nodes_must_be_filled_by_the_ranks() -> None:
    check_nodes(0, 3)
    check_nodes(3, 6)
    assert "give one of [1, 2, 3, 6], or 0" in complaint_of(lambda: check_nodes(4, 6))
