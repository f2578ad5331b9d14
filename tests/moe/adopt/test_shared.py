"""Blocks add shared experts' results in the sum of the routed answers if this gives their own results."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.adopt.adopt import SampleRows, adopt
from moe.adopt.shared import SharedSums
from moe.backend import serve_experts

ROWS = SampleRows(torch.float32, torch.device("cpu"))


class Experts(nn.Module):
    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.expert_layer: Any = SimpleNamespace(adds=None, run=self.run)
        self.has_added: list[bool] = []

    def run(self, _module: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Double the rows, and add as a layer does."""
        adds, self.expert_layer.adds = self.expert_layer.adds, None
        self.has_added.append(adds is not None)
        return 2 * x_TD if adds is None else 2 * x_TD + adds()

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return serve_experts(self, x_TD, ids_TK, weights_TK)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x.view(-1, 8) @ self.weight.t()
        return logits, *logits.softmax(-1).topk(2)


class SummingBlock(nn.Module):
    """Like DeepSeek-V3's block, or with a factor on the shared result."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = Gate(), Experts(), nn.Linear(8, 8, bias=False)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        _, weights, ids = self.gate(x)
        routed: Tensor = self.experts(x.view(-1, 8), ids, weights).view(x.shape)
        shared: Tensor = self.shared_experts(x)
        return routed + (shared if self.factor == 1.0 else shared * self.factor)


class GatingBlock(nn.Module):
    """Like Qwen3-Next's block, or with a factor on the shared result."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_expert = Gate(), Experts(), nn.Linear(8, 8, bias=False)
        self.shared_expert_gate, self.factor = nn.Linear(8, 1, bias=False), factor

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 8)
        shared: Tensor = self.shared_expert(rows)
        _, weights, ids = self.gate(rows)
        routed: Tensor = self.experts(rows, ids, weights)
        shared = torch.sigmoid(self.shared_expert_gate(rows)) * shared
        return (routed + (shared if self.factor == 1.0 else shared * self.factor)).view(x.shape)


@pytest.mark.parametrize("kind", [SummingBlock, GatingBlock])
@pytest.mark.parametrize(("factor", "is_adopted"), [(1.0, True), (0.5, False)])
def test_a_block_that_only_adds_shared_results_lets_its_layer_add_them(
    kind: Any, factor: float, is_adopted: bool
) -> None:
    torch.manual_seed(0)
    block, x = kind(factor), torch.randn(1, 3, 8)
    with torch.no_grad():
        wanted = block(x)
        assert adopt(block.modules(), (SharedSums(),), ROWS)["SharedSums"] == int(is_adopted)
        found = block(x)
    torch.testing.assert_close(found, wanted)
    assert block.experts.has_added == [False, is_adopted]
    assert block.experts.expert_layer.adds is None
