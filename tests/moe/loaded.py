"""Shared by tests of loading: a rank that reports its reads, an independent reader of file headers, changed files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe.load.checkpoint import Checkpoint, CheckpointError
from scheduler.assembly import assemble
from scheduler.policy.config import EngineConfig
from tests.support.engines.serving import WaveDoorbell, build, own_share, teacher_forced
from tests.support.models.families import VOCABULARY

SEQUENCES = [
    torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (21, 5, 33, 12)
]
Tensors = dict[str, Tensor]


class Header(NamedTuple):
    """Header of one tensor."""

    dtype: str
    shape: list[int]
    num_bytes: int


def file_bytes(
    directory: Path, num_experts: int = 8, own: Callable[[int], bool] = lambda _: True
) -> tuple[int, int]:
    """Return the bytes of all tensors outside experts, and of some experts."""
    shared = experts = 0
    for name, header in headers(directory).items():
        _, is_expert, rest = name.partition(".experts.")
        first = rest.partition(".")[0]
        if not is_expert:
            shared += header.num_bytes
        elif first.isdigit():
            experts += header.num_bytes * own(int(first))
        else:
            experts += header.num_bytes // num_experts * sum(map(own, range(num_experts)))
    return shared, experts


class Loaded(NamedTuple):
    """Report of one rank after loading."""

    bytes_read: int
    expert_bytes: int
    reserved_expert_bytes: int
    reports: list[tuple[str, int, int]]  # stage, done, total
    logits: list[np.ndarray]  # of its share of SEQUENCES


def headers(directory: Path) -> dict[str, Header]:
    """Read all headers of a directory by the format's description: 8 bytes of length, then JSON."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            found[name] = Header(entry["dtype"], entry["shape"], end - start)
    return found


def load(directory: Path, dtype: str = "auto") -> Loaded:
    """Assemble this rank's engine and run its share of the sequences. Collective."""
    reports: list[tuple[str, int, int]] = []
    world = dist.is_initialized()
    config = EngineConfig(
        directory=directory, kv_cache_bytes=8 << 20, max_model_len=64, dtype=dtype,
        rank=dist.get_rank() if world else 0, world_size=dist.get_world_size() if world else 1,
    )  # fmt: skip
    built = assemble(config, WaveDoorbell(), lambda *report: reports.append(report))
    model = built.model
    return Loaded(
        model.checkpoint.bytes_read, model.expert_bytes, model.reserved_expert_bytes, reports,
        teacher_forced(built, own_share(SEQUENCES)),
    )  # fmt: skip


def refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Load on one rank. Return the message of the only error, raised before any tensor was read."""

    def read(_self: Checkpoint, tensor: Tensor) -> Tensor:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "_counted", read)
    with pytest.raises(CheckpointError) as caught:
        build(directory, max_model_len=64)
    return str(caught.value)


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the names of all tensors read from now on, whole or in part."""
    read: list[str] = []

    def recorded(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def reading(self: Checkpoint, name: str, *row: int) -> Tensor:
            read.append(name)
            return original(self, name, *row)

        return reading

    monkeypatch.setattr(Checkpoint, "read", recorded(Checkpoint.read))
    monkeypatch.setattr(Checkpoint, "read_row", recorded(Checkpoint.read_row))
    return read


def rewrite(source: Path, target: Path, change: Callable[[Tensors], Tensors | None]) -> Path:
    """Copy a single-file checkpoint with its tensors changed."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    changed = change(tensors)
    tensors = tensors if changed is None else changed
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def assert_equal_bits(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Check that logits are equal to the last bit."""
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a, b)
