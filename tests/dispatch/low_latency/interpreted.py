"""What ranks of a pool run to try the Triton kernels in the interpreter, over shared memory between processes.

The kernels' module is imported in here: the interpreter must be chosen before, and only in these processes.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.low_latency.symmetric import SharedMemory, SymmetricLayout
from tests.dispatch.low_latency.cases import Layer, RankResult, answer, zero_undefined


def open_exchange(layer: Layer, memory: SharedMemory, **kwargs: Any) -> Any:
    """An exchange whose kernels are interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"
    from dispatch.low_latency.triton_exchange import TritonExchange  # noqa: PLC0415

    return TritonExchange(layer.shape(), memory, round_scale=layer.round_scale, lanes=2, **kwargs)


def run_interpreted(layers: list[Layer]) -> list[list[RankResult]]:
    """Run each layer's cases twice through one exchange, so that both phases are used more than once."""
    results = []
    for layer in layers:
        num_bytes = SymmetricLayout(shape=layer.shape()).total_bytes
        memory = SharedMemory(dist.group.WORLD, num_bytes, timeout_s=20.0)
        try:
            exchange = open_exchange(layer, memory)
            results.append([_run_layer(exchange, layer, memory.rank) for _ in range(2)])
        finally:
            dist.barrier()
            memory.close()
    return results


def _run_layer(exchange: Any, layer: Layer, rank: int) -> RankResult:
    case = layer.cases[rank]
    received = exchange.post_dispatch(case.x_TH, case.topk_TK)
    exchange.finish()
    assert exchange.late_ranks() == []
    y_LNH = answer(received.x_LNH, received.scales, rank, case.x_TH.dtype)
    out_TH = torch.empty_like(case.x_TH)
    exchange.post_combine(received, y_LNH, case.topk_TK, case.weights_TK, out_TH)
    exchange.finish()
    count_L = received.count_L
    scales = None if received.scales is None else zero_undefined(received.scales, count_L)
    return RankResult(
        zero_undefined(received.x_LNH, count_L), scales, count_L.clone(),
        zero_undefined(received.source_token_LN, count_L), received.layout_range_LR.clone(), out_TH,
    )  # fmt: skip


def dispatch_without(layer: Layer, absent: int) -> tuple[list[int], list[int], list[int], Tensor] | None:
    """All but one rank dispatch and combine; the others find out that it is late, and mask it."""
    num_bytes = SymmetricLayout(shape=layer.shape()).total_bytes
    memory = SharedMemory(dist.group.WORLD, num_bytes, timeout_s=20.0)
    try:
        exchange = open_exchange(layer, memory, max_polls=5000, mask_lost=True)
        dist.barrier()  # nobody is late because it still imports
        if memory.rank == absent:
            return None
        case = layer.cases[memory.rank]
        received = exchange.post_dispatch(case.x_TH, case.topk_TK)
        exchange.finish()
        late = exchange.late_ranks()
        y_LNH = answer(received.x_LNH, None, memory.rank, case.x_TH.dtype)
        out_TH = exchange.post_combine(
            received, y_LNH, case.topk_TK, case.weights_TK, torch.empty_like(case.x_TH)
        )
        exchange.finish()
        return late, exchange.mask.tolist(), received.count_L.tolist(), out_TH
    finally:
        dist.barrier()
        memory.close()
