"""A dispatch of realistic size between nodes, with the service's own dispatcher over gloo; the test process, one per node.

It is a separate process because it imports torch, which takes seconds. The doctor starts it first, runs its other checks
meanwhile, and kills it at the end. It reads a JSON line per order and writes one when it is done. Results are compared bit
for bit with the expected ones before a time counts.

Rows have the model's width in bfloat16, slots are drawn with a seed, and experts return the row unchanged. One process represents
a node. On GPUs, a service sends the same rows through NCCL or NVSHMEM, which this does not test.
"""

import json
import statistics
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from dispatch.dispatcher import Dispatcher
from dispatch.errors import DispatchError
from dispatch.wires.open import open_wire
from server.machine.parent_death import die_with_parent

_WARM_UPS, _RUNS = 2, 5


class DispatchSizes(NamedTuple):
    """The dimensions of a dispatch."""

    hidden: int
    top_k: int
    experts: int  # of a layer


def run_dispatch_trial() -> int:
    """Execute the doctor's orders from stdin until it closes."""
    die_with_parent()
    kept: list[object] = []  # a store serves as long as it is referenced
    _tell({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "store_host" in order:
                store = TCPStore(order["store_host"], 0, is_master=True, wait_for_workers=False)
                kept.append(store)
                _tell({"port": store.port})
            else:
                _tell({"sizes": _try_sizes(order)})
        except (DispatchError, dist.DistError, RuntimeError) as error:  # gloo raises only RuntimeError
            _tell({"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
    return 0


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _try_sizes(order: dict[str, Any]) -> list[dict[str, float]]:
    """Form a gloo group with the other nodes' processes, and dispatch each number of tokens."""
    timeout_s, rank, world_size = order["timeout_s"], order["rank"], order["world_size"]
    store = TCPStore(order["host"], order["port"], is_master=False, timeout=timedelta(seconds=timeout_s))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    sizes = DispatchSizes(**order["sizes"])
    slots_per_rank = -(-sizes.experts // world_size)
    dispatcher = Dispatcher(
        open_wire("gloo", dist.group.WORLD, timeout_s=timeout_s), slots_per_rank=slots_per_rank
    )
    try:
        return [_time_one(dispatcher, sizes, tokens, rank) for tokens in order["tokens"]]
    finally:
        dispatcher.close()


def _time_one(dispatcher: Dispatcher, sizes: DispatchSizes, num_tokens: int, rank: int) -> dict[str, float]:
    """Dispatch and combine `num_tokens` tokens per node. Returns medians."""
    random = torch.Generator().manual_seed(rank)
    x_TH = torch.randn(num_tokens, sizes.hidden, generator=random).to(torch.bfloat16)
    slots = dispatcher.slots_per_rank * dispatcher.world_size
    slots_TK = torch.rand(num_tokens, slots, generator=random).topk(sizes.top_k, dim=1).indices
    weights_TK = torch.rand(num_tokens, sizes.top_k, generator=random)
    dispatches, combines = [], []
    for run in range(_WARM_UPS + _RUNS):
        sent = dispatcher.traffic
        begun_s = time.perf_counter()
        dispatched = dispatcher.dispatch(x_TH, slots_TK)
        middle_s = time.perf_counter()
        y_PH = dispatched.x_NH[dispatched.row_P]
        resumed_s = time.perf_counter()
        out_TH = dispatcher.combine(y_PH, weights_TK, dispatched)
        if run >= _WARM_UPS:
            dispatches.append(middle_s - begun_s)
            combines.append(time.perf_counter() - resumed_s)
    ended = dispatcher.traffic
    return {
        "tokens": num_tokens,
        "dispatch_ms": statistics.median(dispatches) * 1e3,
        "combine_ms": statistics.median(combines) * 1e3,
        "sent_bytes": sum(ended) - sum(sent),
        "is_right": float(torch.equal(out_TH, _expected(x_TH, weights_TK))),
    }


def _expected(x_TH: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the result if every expert returns the row: summed choice by choice in float32, rounded once."""
    sum_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
    for choice in range(weights_TK.shape[1]):
        sum_TH += weights_TK[:, choice : choice + 1] * x_TH.float()
    return sum_TH.to(x_TH.dtype)
