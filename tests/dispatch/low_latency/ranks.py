"""Functions and input tensors of a pool's ranks in the low-latency tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch.faces.low_latency import LowLatencyFace
from dispatch.low_latency.cpu import CpuExchange
from dispatch.wires.open import open_wire
from tests.dispatch.exchange import catch
from tests.dispatch.gpu.ranks import open_interpreted
from tests.dispatch.low_latency.cases import Layer, RankResult, answer, make_cases, zero_undefined
from tests.support.gpu.interpreted import needs_triton

INTERPRETED = [pytest.mark.slow, needs_triton]


@contextmanager
def open_face(name: str, **kwargs: Any) -> Iterator[LowLatencyFace]:
    """Open a face over all ranks of the pool. For triton, its kernels are interpreted."""
    if name == "triton":
        exchange = open_interpreted()
        try:
            yield LowLatencyFace(exchange, **kwargs)
            dist.barrier()  # no rank continues while a peer still writes
        finally:
            exchange.close()
        return
    wire = open_wire(name, dist.group.WORLD, timeout_s=20.0)
    try:
        yield LowLatencyFace(CpuExchange(wire), **kwargs)
    finally:
        wire.close()


def run_layer(
    face: LowLatencyFace, layer: Layer, *, with_hooks: bool = False, spoil: bool = False
) -> RankResult:
    """Dispatch, compute, combine, and copy the results.

    Args:
        spoil: Overwrite the sent data before the hooks run.
    """
    rank = face.exchange.rank
    case = layer.cases[rank]
    x_TH = case.x_TH.clone()
    recv_x, count_L, handle, _, hook = face.low_latency_dispatch(
        x_TH, case.topk_TK, layer.max_tokens, layer.experts_per_rank * len(layer.cases),
        use_fp8=layer.is_fp8, round_scale=layer.round_scale, use_ue8m0=layer.is_ue8m0, return_recv_hook=with_hooks,
    )  # fmt: skip
    if spoil:
        x_TH.fill_(float("nan"))
    if hook is not None:
        hook()
    x_LNH, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    y_LNH = answer(x_LNH, scales, rank, case.x_TH.dtype)
    combined_TH, _, hook = face.low_latency_combine(
        y_LNH, case.topk_TK, case.weights_TK, handle, return_recv_hook=with_hooks
    )
    if spoil:
        y_LNH.fill_(float("nan"))
    if hook is not None:
        hook()
    tokens_LN = zero_undefined(handle[0], count_L)
    scales = None if scales is None else zero_undefined(scales, count_L)
    return RankResult(
        zero_undefined(x_LNH, count_L),
        scales,
        count_L.clone(),
        tokens_LN,
        handle[1].clone(),
        combined_TH.clone(),
    )


def run_layers(name: str, layers: list[Layer], with_hooks: bool) -> list[RankResult]:
    """Run several layers through one face."""
    with open_face(name) as face:
        return [run_layer(face, layer, with_hooks=with_hooks, spoil=with_hooks) for layer in layers]


def one_rank_wrong(name: str, wrong_rank: int, call: str, change: dict[str, Any]) -> tuple[str, RankResult]:
    """Make a call with other arguments on one rank, then run a layer that must work."""
    torch.manual_seed(0)
    layer = Layer(make_cases(1, [3] * dist.get_world_size(), dtype=torch.bfloat16), 4, 2)
    with open_face(name) as face:
        text = catch(lambda: _call(face, layer, call, change if face.exchange.rank == wrong_rank else {}))
        return text, run_layer(face, layer)


def _call(face: LowLatencyFace, layer: Layer, call: str, change: dict[str, Any]) -> None:
    case = layer.cases[face.exchange.rank]
    arguments: dict[str, Any] = {
        "x": case.x_TH, "topk_idx": case.topk_TK, "num_max_dispatch_tokens_per_rank": layer.max_tokens,
        "num_experts": layer.experts_per_rank * len(layer.cases), "use_fp8": False,
    }  # fmt: skip
    if call == "dispatch":
        face.low_latency_dispatch(**{**arguments, **change})
        return
    recv_x, _, handle, _, _ = face.low_latency_dispatch(**arguments)
    answers = {"x": recv_x, "topk_idx": case.topk_TK, "topk_weights": case.weights_TK, "handle": handle}
    face.low_latency_combine(**{**answers, **change})


BF16 = torch.bfloat16


def bring(tokens: int = 3, hidden: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, with the first two experts as choices of each."""
    return torch.randn(tokens, hidden).to(BF16), torch.tensor([[0, 1]] * tokens)
