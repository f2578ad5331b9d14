"""Gated MLPs that get the kernel: those of three linear layers and silu, without clamps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.fixtures import OnDevice
from tests.support.gpu.interpreted import needs_triton
from tests.support.ranks import RankPool

pytestmark = needs_triton


def gate(device: str, rows: int, inner: int) -> None:
    from moe.gpu.gate import silu_gate  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    both = torch.randn(rows, 2 * inner + 1, device=device) * 4
    one, other = both[:, :inner], both[:, inner : 2 * inner]
    torch.testing.assert_close(silu_gate(one, other), functional.silu(one) * other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "inner"), [(3, 48), (1, 1500)])
def test_rows_are_gated_as_torch_gates_them(on_device: OnDevice, rows: int, inner: int) -> None:
    on_device(gate, rows, inner)


class Mlp(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], limit: float = 0.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down_proj, self.act_fn, self.limit = nn.Linear(12, 8, bias=False), act, limit

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up_proj(x)
        up = up.clamp(-self.limit, self.limit) if self.limit else up
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * up)
        return out


def adopted() -> tuple[list[bool], float]:
    """Return which of three MLPs get the kernel, and how far the first one's result changes."""
    from moe.adopt.adopt import SampleRows, adopt  # noqa: PLC0415 - in the interpreter
    from moe.adopt.mlp import GatedMlps  # noqa: PLC0415
    from moe.gpu.gate import silu_gate  # noqa: PLC0415

    torch.manual_seed(0)
    mlps = [Mlp(functional.silu), Mlp(functional.gelu), Mlp(functional.silu, limit=7.0)]
    x = torch.randn(1, 5, 8)
    with torch.no_grad():
        wanted = mlps[0](x)
        adopt(mlps, (GatedMlps(silu_gate),), SampleRows(torch.float32, torch.device("cpu")))
        difference = float((mlps[0](x) - wanted).abs().max())
    return ["forward" in vars(mlp) for mlp in mlps], difference


def test_only_mlps_that_the_kernel_computes_use_it(interpreter: RankPool) -> None:
    are_adopted, difference = interpreter.run(adopted)[0]
    assert are_adopted == [True, False, False]
    assert difference < 1e-5
