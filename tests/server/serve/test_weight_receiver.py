"""A trainer's torch.distributed group: its tensors become a folder, and a trainer that dies or never comes is reported."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dispatch.ports import free_port
from server.front.errors import ApiError
from server.front.weights.group import WeightGroup
from server.serve import weight_receiver

TIMEOUT_S = 120.0
TRAINER = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=2)
print("joined", flush=True)
sys.stdin.readline()
for value in range(3):
    dist.broadcast(torch.full((value + 1, 2), float(value)).to(torch.bfloat16), src=0)
print("sent", flush=True)
sys.stdin.readline()
"""
NAMES, DTYPES = ["a", "b", "c"], ["bfloat16", "torch.bfloat16", "bfloat16"]
SHAPES = [[1, 2], [2, 2], [3, 2]]


def start_trainer(port: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={"GLOO_SOCKET_IFNAME": "lo", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip


def place(port: int, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    return {"address": "127.0.0.1", "port": port, "rank": 1, "world_size": 2, "timeout_s": timeout_s}


@pytest.mark.slow
def test_tensors_of_a_trainer_become_files(tmp_path: Path) -> None:
    async def test() -> None:
        port, group = free_port(), WeightGroup()
        trainer = start_trainer(port)
        assert trainer.stdin is not None
        try:
            await group.join(**place(port))
            with pytest.raises(ApiError, match="open already") as caught:
                await group.join(**place(port))
            assert caught.value.status == 409
            trainer.stdin.write("send\n")
            trainer.stdin.flush()
            await group.receive(NAMES, DTYPES, SHAPES, tmp_path / "new", TIMEOUT_S)
            found = load_file(tmp_path / "new" / "part-0.safetensors")
            assert {name: list(tensor.shape) for name, tensor in found.items()} == dict(
                zip(NAMES, SHAPES, strict=True)
            )
            assert all(
                torch.equal(found[name], torch.full_like(found[name], place))
                for place, name in enumerate(NAMES)
            )
            trainer.send_signal(signal.SIGKILL)
            with pytest.raises(ApiError, match="failed and was closed") as caught:
                await group.receive(NAMES, DTYPES, SHAPES, tmp_path / "more", TIMEOUT_S)
            assert caught.value.status == 400 and not group.is_open
        finally:
            trainer.kill()
            trainer.wait()
            await group.close()

    asyncio.run(test())


@pytest.mark.slow
def test_a_trainer_that_never_comes_is_reported() -> None:
    async def test() -> None:
        group = WeightGroup()
        with pytest.raises(ApiError, match="The group of the trainer failed and was closed") as caught:
            await group.join(**place(free_port(), timeout_s=3.0))
        assert caught.value.status == 400 and not group.is_open

    asyncio.run(test())


def test_without_a_group_nothing_is_received(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="No group is open") as caught:
        asyncio.run(WeightGroup().receive(NAMES, DTYPES, SHAPES, tmp_path / "new", 1.0))
    assert caught.value.status == 409


def test_large_updates_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_receiver, "PART_BYTES", 10)
    monkeypatch.setattr("torch.distributed.broadcast", lambda tensor, src: tensor.fill_(src + 1))
    weight_receiver.receive(NAMES, DTYPES, SHAPES, 0, str(tmp_path / "new"))
    files = sorted((tmp_path / "new").iterdir())
    assert [list(load_file(file)) for file in files] == [["a", "b"], ["c"]]
