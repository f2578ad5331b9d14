"""A family's norm runs the kernel if that computes the same; a norm that does something else keeps its own forward."""

import torch
from torch import nn

from tests.support.ranks import RankPool


class PlainRMSNorm(nn.Module):
    """As Llama's."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class OffsetRMSNorm(PlainRMSNorm):
    """As Gemma's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class CentredRMSNorm(PlainRMSNorm):
    """Not an RMSNorm, whatever its name says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


def exchange() -> tuple[int, list[bool], float]:
    """Exchange the norms of a small model; how many, which, and how far the exchanged one is from its own."""
    from moe.adopt.adopt import Rows, adopt  # noqa: PLC0415 - in the interpreter
    from moe.adopt.norms import norms  # noqa: PLC0415

    torch.manual_seed(0)
    net = nn.ModuleList(
        [PlainRMSNorm(1e-2), OffsetRMSNorm(), CentredRMSNorm(), nn.LayerNorm(16), nn.Linear(16, 4)]
    )
    x = torch.randn(1, 3, 2, 16).transpose(1, 2)
    wanted = net[0](x)
    count = adopt(net.modules(), (norms,), Rows(torch.float32, torch.device("cpu")))["norms"]
    exchanged = ["forward" in vars(module) for module in net]
    return count, exchanged, float((net[0](x) - wanted).abs().max())


def test_only_norms_that_the_kernel_computes_are_exchanged(interpreter: RankPool) -> None:
    count, exchanged, difference = interpreter.run(exchange)[0]
    assert count == 1 and exchanged == [True, False, False, False, False]
    assert difference < 1e-5
