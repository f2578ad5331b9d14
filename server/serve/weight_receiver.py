"""The process that receives new weights from a trainer's torch.distributed group, and writes them to safetensors files.

The front starts it when a client names a group, so the front needs no torch, and a group that breaks ends neither front nor
ranks. Ranks then read the files as those of any folder. Tensors are written as soon as they take PART_BYTES.

Input on stdin: one JSON object per line, {"join": {address, port, rank, world_size, timeout_s}} first, then {"receive": {names, dtypes,
shapes, source, folder}}. Output on stdout: {} for each, or {"failure": TEXT}.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from server.machine.parent_death import die_with_parent

PART_BYTES = 1 << 30  # most memory of received tensors, besides the largest one


def run_receiver(orders: TextIO = sys.stdin) -> int:
    """Follow orders until stdin ends; return the exit status."""
    die_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # gloo writes to stdout
    for line in orders:
        try:
            _follow(json.loads(line))
            answer: dict[str, Any] = {}
        except Exception as error:  # noqa: BLE001 - the front passes it on
            answer = {"failure": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


def _follow(order: dict[str, Any]) -> None:
    if "join" in order:
        join(**order["join"])
    else:
        receive(**order["receive"])


def join(address: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
    """Join the trainer's group. Collective over it."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def receive(names: list[str], dtypes: list[str], shapes: list[list[int]], source: int, folder: str) -> None:
    """Receive tensors that the group's rank `source` broadcasts in this order, and write them to a new folder."""
    target = Path(folder)
    target.mkdir(mode=0o700, parents=True)
    held: dict[str, Tensor] = {}
    num_bytes, num_files = 0, 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        dist.broadcast(tensor, src=source)
        held[name] = tensor
        num_bytes += tensor.nbytes
        if num_bytes >= PART_BYTES:
            save_file(held, target / f"part-{num_files}.safetensors")
            num_bytes, num_files = 0, num_files + 1
            held.clear()
    if held:
        save_file(held, target / f"part-{num_files}.safetensors")
