"""The MoE layer's kernels inside torch.compile: one graph, the same results as without it."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton: pip install -r requirements-dev.txt"
)


def layer(x: Tensor, residual: Tensor, parts: Any, ops: Any, routing: Any) -> tuple[Tensor, ...]:
    """Norm, routing, FP8 rows and one product, as a layer would use them; `parts` are its weights."""
    normed = ops.rms_norm(x, parts["norm"], 1e-6, residual_TD=residual)
    again = ops.rms_norm(normed + 1, parts["norm"], 1e-6)
    ids, weights = ops.route(again @ parts["router"], routing)
    rows, scales = ops.quantise_rows(again)
    raised = ops.grouped_linear(
        again, parts["up"], parts["offsets"], parts["places"], num_pairs=4, gate="silu", tile=parts["tile"]
    )
    return residual, ids, weights, rows.float() * scales, raised * 2


def compile_layer() -> None:
    from moe.gpu import grouped, norm, ops, quantise, routing  # noqa: PLC0415 - in the interpreter
    from moe.gpu.tiles import DECODE_TILE  # noqa: PLC0415

    class Direct:
        """The same calls without operators."""

        rms_norm = staticmethod(norm.rms_norm)
        route = staticmethod(routing.route)
        quantise_rows = staticmethod(quantise.quantise_rows)
        grouped_linear = staticmethod(grouped.grouped_linear)

    torch.manual_seed(0)
    x, residual = torch.randn(4, 64), torch.randn(4, 64)
    parts = {
        "norm": torch.randn(64), "router": torch.randn(64, 8), "up": torch.randn(3, 32, 64), "tile": DECODE_TILE,
        "offsets": torch.tensor([0, 1, 4]), "places": torch.tensor([2, 0], dtype=torch.int32),
    }  # fmt: skip
    rule = routing.Routing(choices=2, normalise=True)
    wanted = layer(x, residual.clone(), parts, Direct, rule)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ours = compiled(x, residual.clone(), parts, ops, rule)
    for own, want in zip(ours, wanted, strict=True):
        assert torch.equal(own, want)


@pytest.mark.slow
def test_a_layer_is_one_graph_and_gives_the_same(interpreter: RankPool) -> None:
    interpreter.run(compile_layer, timeout_s=300.0)


def check_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - dear to import

    from moe.gpu import ops  # noqa: PLC0415 - in the interpreter
    from moe.gpu.routing import Routing  # noqa: PLC0415

    with FakeTensorMode():
        x = torch.empty(4, 256, dtype=torch.bfloat16)
        rows, scales = ops.quantise_rows(x)
        assert (rows.dtype, rows.shape, scales.shape) == (torch.float8_e4m3fn, (4, 256), (4, 2))
        weights, offsets = torch.empty(3, 64, 256).to(torch.float8_e4m3fn), torch.zeros(3, dtype=torch.int64)
        raised = ops.grouped_linear(
            rows, weights, offsets, torch.zeros(2, dtype=torch.int32), num_pairs=9, gate="silu", x_scales_TB=scales,
            scales_WBB=torch.ones(3, 1, 2),
        )  # fmt: skip
        assert (raised.dtype, raised.shape) == (torch.bfloat16, (9, 32))
        assert ops.rms_norm(x, torch.empty(256), 1e-6).dtype == torch.bfloat16
        ids, chosen = ops.route(torch.empty(4, 16), Routing(choices=3))
        assert (ids.dtype, ids.shape, chosen.dtype) == (torch.int64, (4, 3), torch.float32)


@pytest.mark.slow
def test_operators_say_what_they_will_return(interpreter: RankPool) -> None:
    interpreter.run(check_shapes)
