"""After the first call of a shape, the low-latency path allocates no tensor and reads none from Python.

The guard (`graph_safe`) rejects operations that would break a captured CUDA graph. A control shows that it can fail.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch.faces.low_latency import LowLatencyFace
from dispatch.low_latency.cpu import CpuExchange
from dispatch.wires.local import LocalWire
from dispatch.wires.open import open_wire
from tests.dispatch.low_latency.cases import Layer, make_cases
from tests.fixtures import PoolOf
from tests.support.gpu.graph_safe import GraphSafe


def addresses_of_rounds(face: LowLatencyFace, layer: Layer, rounds: int, *, use_out: bool) -> list[list[int]]:
    """Run guarded rounds after two that may allocate. Return the addresses of each round's results."""
    case = layer.cases[face.exchange.rank]
    hidden, num_experts = case.x_TH.shape[1], layer.experts_per_rank * len(layer.cases)
    y_LNH = torch.zeros(layer.experts_per_rank, layer.shape().rows_per_expert, hidden, dtype=case.x_TH.dtype)
    out_TH = torch.zeros_like(case.x_TH) if use_out else None
    stats_L = torch.zeros(layer.experts_per_rank, dtype=torch.int32)
    waits_R = torch.zeros(len(layer.cases), dtype=torch.int64)

    def run(hooks: bool) -> list[int]:
        recv_x, count_L, handle, _, hook = face.low_latency_dispatch(
            case.x_TH, case.topk_TK, layer.max_tokens, num_experts, stats_L, waits_R, use_fp8=layer.is_fp8,
            return_recv_hook=hooks,
        )  # fmt: skip
        if hook is not None:
            hook()
        combined_TH, _, hook = face.low_latency_combine(
            y_LNH, case.topk_TK, case.weights_TK, handle, return_recv_hook=hooks, out=out_TH,
            combine_wait_recv_cost_stats=waits_R,
        )  # fmt: skip
        if hook is not None:
            hook()
        rows = recv_x if isinstance(recv_x, tuple) else (recv_x,)
        return [tensor.data_ptr() for tensor in (*rows, count_L, *handle[:2], combined_TH)]

    for hooks in (False, True):
        run(hooks)
    with GraphSafe():
        return [run(hooks=bool(index & 2)) for index in range(rounds)]


def rounds_of(name: str, layer: Layer, use_out: bool) -> list[list[int]]:
    wire = open_wire(name, dist.group.WORLD, timeout_s=20.0)
    try:
        return addresses_of_rounds(LowLatencyFace(CpuExchange(wire)), layer, 6, use_out=use_out)
    finally:
        wire.close()


def check_turns(rounds: list[list[int]]) -> None:
    """Check that two results alternate, always at the same addresses."""
    assert rounds[0] != rounds[1]
    assert all(addresses == rounds[index % 2] for index, addresses in enumerate(rounds))


@pytest.mark.parametrize("name", ["shm", "gloo"])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_calls_neither_allocate_nor_synchronise(pool_of: PoolOf, name: str, is_fp8: bool) -> None:
    layer = Layer(make_cases(1, [3, 5], hidden=256, dtype=torch.bfloat16), 6, 2, is_fp8)
    for rounds in pool_of(2).run(rounds_of, name, layer, False):
        check_turns(rounds)


def test_the_result_goes_to_out() -> None:
    layer = Layer(make_cases(1, [3], hidden=256), 6, 2)
    rounds = addresses_of_rounds(LowLatencyFace(CpuExchange(LocalWire())), layer, 4, use_out=True)
    assert len({addresses[-1] for addresses in rounds}) == 1


@pytest.mark.parametrize(
    "action",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x.clone(),
        lambda x: torch.empty(3),
        lambda x: x + 1,
        lambda x: x[x > 0],
        lambda x: x.tolist(),
    ],
)
def test_the_guard_catches_what_it_is_for(action: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(AssertionError, match="on the low-latency path"), GraphSafe():
        action(torch.ones(2))
