"""Reading a checkpoint's files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe.load.checkpoint import INDEX_NAME, Checkpoint, CheckpointError
from server.serve.preflight.model import read_headers

SMAPS = Path("/proc/self/smaps")


def resident_kib(file: Path) -> int:
    """Return how much of a file this process has in memory."""
    found, is_here = 0, False
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_here = line.endswith(str(file.resolve()))
        elif is_here and words[0] == "Rss:":
            found += int(words[1])
    return found


@pytest.mark.skipif(not SMAPS.exists(), reason="needs Linux's /proc")
def test_memory_that_was_read_is_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    weight = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    save_file({"weight": weight, "other": weight * 2}, file)
    checkpoint = Checkpoint(tmp_path)
    kept = checkpoint.read("weight")
    assert torch.equal(kept, weight) and resident_kib(file) >= 4096
    checkpoint.release_memory()
    assert resident_kib(file) < 1024
    assert torch.equal(kept, weight) and torch.equal(checkpoint.read("other"), weight * 2)


def write_shards(
    directory: Path, shards: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None
) -> None:
    """Write files of tensors and their index."""
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    if index is not None:
        (directory / INDEX_NAME).write_text(json.dumps({"weight_map": index}))


WEIGHT, EXPERT = "model.norm.weight", "model.layers.0.mlp.experts.3.up_proj.weight"
A, B = "model-1.safetensors", "model-2.safetensors"


@pytest.mark.parametrize("name", [WEIGHT, EXPERT])
@pytest.mark.parametrize("right", [A, B])
def test_the_file_that_the_index_names_counts_where_two_have_a_tensor(
    name: str, right: str, tmp_path: Path
) -> None:
    """As after a save over an older one with other shards. The stale tensor may have another shape."""
    stale = A if right == B else B
    shards = {right: {name: torch.ones(4, 4)}, stale: {name: torch.zeros(8, 4), "other": torch.zeros(1)}}
    write_shards(tmp_path, shards, {name: right, "other": stale})
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.read(name), torch.ones(4, 4)) and checkpoint.shape(name) == (4, 4)
    assert torch.equal(checkpoint.read_row(name, 1), torch.ones(1, 4))
    headers = read_headers(tmp_path)
    assert headers[name]["shape"] == [4, 4] and headers.keys() == {name, "other"}


@pytest.mark.parametrize(
    "index", [None, {"other": A, "more": B}], ids=["no index", "an index without that entry"]
)
def test_a_tensor_in_two_files_is_refused_where_no_index_says_which_counts(
    index: dict[str, str] | None, tmp_path: Path
) -> None:
    shards = {
        file: {WEIGHT: torch.ones(2), extra: torch.ones(1)} for file, extra in ((A, "other"), (B, "more"))
    }
    write_shards(tmp_path, shards, index)
    with pytest.raises(CheckpointError, match=f"1 tensors in two files, such as {WEIGHT} in {B}"):
        Checkpoint(tmp_path)


def test_a_tensor_that_only_another_file_has_than_the_index_says_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {A: {WEIGHT: torch.ones(2)}, B: {"other": torch.ones(1)}}, {WEIGHT: B, "other": A})
    with pytest.raises(
        CheckpointError,
        match=f"lists 2 tensors that are not in their files, such as {WEIGHT} \\({B}\\), other \\({A}\\)",
    ):
        Checkpoint(tmp_path)
