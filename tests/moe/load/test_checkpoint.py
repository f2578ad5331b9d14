"""Reading a checkpoint's files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe.load.checkpoint import Checkpoint

SMAPS = Path("/proc/self/smaps")


def resident_kib(file: Path) -> int:
    """How much of a file this process has in memory."""
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
