"""Low-latency calls in a CUDA graph, which repeats launches with their recorded arguments.

Without a GPU, launches are recorded in the interpreter and repeated there: only memory contents may differ between
calls. The control passes the number of calls by value, as a counter on the host would.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch.faces.low_latency import LowLatencyFace
from tests.dispatch.gpu.ranks import open_interpreted
from tests.dispatch.low_latency.cases import Layer, RankCase, answer, make_cases, simulate
from tests.support.gpu.interpreted import needs_triton
from tests.support.ranks import RankPool

pytestmark = needs_triton
Launch = Callable[[], Any]


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect every launch, which still runs, with its present arguments."""
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415 - after the interpreter is chosen

    launches: list[Launch] = []
    run = InterpretedFunction.run

    def record(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(lambda: run(kernel, *args, **kwargs))
        return run(kernel, *args, **kwargs)

    InterpretedFunction.run = record
    try:
        yield launches
    finally:
        InterpretedFunction.run = run


def replay_layers(is_fp8: bool, counts_on_host: bool) -> list[bool]:
    """Record one layer, then repeat its launches with other contents, with other calls in between."""
    exchange = open_interpreted(is_blocking=False, timeout_s=5.0)
    rank, dtype = exchange.rank, torch.bfloat16
    layers = [
        Layer(make_cases(seed, [3, 3], hidden=256, dtype=dtype), 3, 2, is_fp8=is_fp8) for seed in range(4)
    ]
    face = LowLatencyFace(exchange)
    case = RankCase(*(tensor.clone() for tensor in layers[0].cases[rank]))
    y_LNH = torch.zeros(2, layers[0].shape().rows_per_expert, 256, dtype=dtype)
    out_TH = torch.zeros_like(case.x_TH)
    with recording() as to_experts:
        received, _, handle, _, _ = face.low_latency_dispatch(case.x_TH, case.topk_TK, 3, 4, use_fp8=is_fp8)
    rows, scales = received if isinstance(received, tuple) else (received, None)
    with recording() as back:
        face.low_latency_combine(y_LNH, case.topk_TK, case.weights_TK, handle, out=out_TH)
    if counts_on_host:  # the control: the first launch has a counter
        to_experts, back = to_experts[1:], back[1:]
    results = []
    for layer in layers[1:]:
        for held, wanted in zip(case, layer.cases[rank], strict=True):
            held.copy_(wanted)
        for launch in to_experts:
            launch()
        y_LNH.copy_(answer(rows, scales, rank, dtype))
        for launch in back:
            launch()
        results.append(torch.equal(out_TH, simulate(layer)[rank].combined_TH))
        if not counts_on_host:
            face.clean_low_latency_buffer(4, 256, 4)  # one more call swaps the halves
    dist.barrier()
    exchange.close()
    return results


@pytest.mark.parametrize("is_fp8", [pytest.param(False, marks=pytest.mark.slow), True])
def test_recorded_launches_serve_other_contents(interpreting_pair: RankPool, is_fp8: bool) -> None:
    assert interpreting_pair.run(replay_layers, is_fp8, False) == [[True] * 3] * 2


@pytest.mark.slow
def test_the_control_fails_where_the_number_of_calls_stands_still(interpreting_pair: RankPool) -> None:
    for results in interpreting_pair.run(replay_layers, False, True):
        assert not all(results)
