"""Checkpoints that do not fit or are damaged: all of it is told in one error, before any tensor is read."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe.load.checkpoint import CheckpointError
from tests.conftest import PoolOf
from tests.moe.loaded import Tensors, refused, rewrite
from tests.support.serving import build


def drop(*names: str) -> Callable[[Tensors], None]:
    """Take tensors away."""

    def change(tensors: Tensors) -> None:
        for name in names:
            tensors.pop(name)

    return change


EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"


def test_one_error_lists_all_that_does_not_fit(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared tensors and experts alike, of all layers."""

    def break_everything(tensors: Tensors) -> None:
        drop("model.norm.weight", EXPERT.format(0, 7, "w3"), EXPERT.format(2, 5, "w2"))(tensors)
        for matrix in ("w1", "w2", "w3"):
            tensors[EXPERT.format(1, 8, matrix)] = torch.zeros(32, 64)
        tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(64)
        tensors["lm_head.weight"] = torch.zeros(255, 64)
        tensors[EXPERT.format(0, 6, "w2")] = torch.zeros(64, 31)
        tensors[EXPERT.format(1, 2, "w1")] = torch.zeros(33, 64)
        tensors[EXPERT.format(1, 4, "w1")] = torch.zeros(32, 65)

    message = refused(rewrite(mixtral, tmp_path / "broken", break_everything), monkeypatch)
    missing, unexpected, wrong = message.split("\n")[1:]
    assert missing.startswith("  missing: ")
    assert "model.norm.weight" in missing
    assert "w3.weight for model.layers.0.mlp.experts.gate_up_proj of expert 7" in missing
    assert "model.layers.2.mlp.experts.down_proj of expert 5" in missing
    assert missing.count(",") == 2
    assert unexpected.startswith("  unexpected: ")
    for matrix in ("w1", "w2", "w3"):
        assert EXPERT.format(1, 8, matrix) in unexpected
    assert "model.layers.3.input_layernorm.weight" in unexpected
    assert wrong.startswith("  of the wrong shape: ")
    assert "lm_head.weight: [255, 64] instead of [256, 64]" in wrong
    assert (
        f"{EXPERT.format(0, 6, 'w2')} [64, 31], to make model.layers.0.mlp.experts.down_proj [64, 32]"
        in wrong
    )
    assert (
        f"{EXPERT.format(1, 2, 'w1')} [33, 64]" in wrong and f"{EXPERT.format(1, 4, 'w1')} [32, 65]" in wrong
    )


def assemble_fails(directory: Path) -> str:
    """Return the error of assembling this rank's engine."""
    with pytest.raises(CheckpointError) as caught:
        build(directory, max_model_len=64)
    return str(caught.value)


def test_every_rank_refuses_an_expert_that_only_another_holds(
    mixtral: Path, tmp_path: Path, pool_of: PoolOf
) -> None:
    broken = rewrite(
        mixtral, tmp_path / "broken", drop(*(EXPERT.format(0, 7, w) for w in ("w1", "w2", "w3")))
    )
    messages = set(pool_of(2).run(assemble_fails, broken))
    assert len(messages) == 1
    assert "model.layers.0.mlp.experts.gate_up_proj of expert 7" in messages.pop()


def test_a_fused_tensor_of_the_wrong_shape_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.1.mlp.experts.down_proj"

    def narrow(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:7]

    message = refused(rewrite(checkpoint("gpt_oss"), tmp_path / "broken", narrow), monkeypatch)
    assert f"{name}: [7, 32, 64] instead of [8, 32, 64]" in message


def test_experts_given_twice_are_refused(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def double(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(8, 64, 32)
        tensors["model.layers.1.mlp.experts.0.w1.weight"] = torch.zeros(32, 64)

    message = refused(rewrite(mixtral, tmp_path / "double", double), monkeypatch)
    assert "unexpected" in message
    assert EXPERT.format(0, 0, "w2") in message and "layers.1.mlp.experts.0.w1.weight" in message


def test_long_lists_are_cut_and_counted(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(tensors: Tensors) -> Tensors:
        return {f"other.{name}": tensor for name, tensor in tensors.items()}

    message = refused(rewrite(mixtral, tmp_path / "other", rename), monkeypatch)
    assert len(message) < 20_000
    assert re.search(r"missing: .* and \d+ more\n  unexpected: .* and \d+ more$", message)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_quantised_tensors_are_refused_by_their_type(
    dtype: torch.dtype, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quantise(tensors: Tensors) -> Tensors:
        return {name: t.to(dtype) if ".experts." in name else t for name, t in tensors.items()}

    message = refused(rewrite(mixtral, tmp_path / "quantised", quantise), monkeypatch)
    kind = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int8: "I8"}[dtype]
    assert f"72 of type {kind}" in message and "bfloat16, float16 or float32" in message


def cut(directory: Path) -> None:
    """Cut the file short."""
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def no_tensors(directory: Path) -> None:
    """Only another format is left."""
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def index(content: str) -> Callable[[Path], None]:
    """Put an index beside the file."""

    def change(directory: Path) -> None:
        (directory / "model.safetensors.index.json").write_text(content)

    return change


DAMAGES = {
    "cut short": (cut, "model.safetensors is not a readable safetensors file"),
    "a pointer of git-lfs": (
        lambda directory: (directory / "model.safetensors").write_text("version https://git-lfs") and None,
        "model.safetensors is not a readable safetensors file",
    ),
    "none": (no_tensors, "holds no .safetensors files"),
    "index without its shard": (
        index('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        "names files that are not there: model-00001-of-00002.safetensors",
    ),
    "index not JSON": (index("{"), "model.safetensors.index.json is not a safetensors index"),
    "index of another form": (
        index('{"weight_map": 3}'),
        "model.safetensors.index.json is not a safetensors index",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(
    damage: str, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(mixtral, tmp_path / "broken")
    hurt, message = DAMAGES[damage]
    hurt(broken)
    assert message in refused(broken, monkeypatch)
