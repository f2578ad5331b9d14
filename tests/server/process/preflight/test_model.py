"""Where a model comes from, what its config.json says, and files of weights that are missing, cut or something else."""

import json
from pathlib import Path

import pytest

import moe.demo_model
from server.process.preflight.memory import weight_bytes
from server.process.preflight.model import (
    check_is_moe,
    check_length,
    read_config,
    resolve_model,
    safetensors_files,
)
from tests.support.fake_checkpoint import CONFIG, write_checkpoint
from tests.support.starts import complaint_of


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
