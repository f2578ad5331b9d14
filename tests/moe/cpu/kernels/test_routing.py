"""Routing on CPU against plain torch, with the same cases as on a GPU."""

import pytest
import torch

from moe.cpu.kernels.routing import route
from moe.routing import Routing
from tests.moe.gpu.test_routing import HAS_BIAS, KINDS, oracle


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("has_ties", [False, True])
def test_experts_and_weights_are_those_of_the_definition(kind: str, rows: int, has_ties: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, 24, generator=generator)
    if has_ties:  # of equal scores, the lower expert is chosen
        logits = logits.round()
    bias = torch.rand(24, generator=generator) if kind in HAS_BIAS and not has_ties else None
    routing = Routing(**KINDS[kind])
    ids, weights = route(logits, routing, bias_E=bias)
    want_ids, want_weights = oracle(logits, routing, bias)
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)
    if has_ties and routing.groups > routing.groups_chosen:
        return  # sums of equal scores may differ in the last bit, so the best groups are not unique
    assert torch.equal(ids, want_ids)


def test_a_row_of_nan_stays_nan_and_names_only_experts_that_there_are() -> None:
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    logits[1], logits[2, 3], logits[3] = float("nan"), float("nan"), -float("inf")
    for kind in KINDS.values():
        ids, weights = route(logits, Routing(**kind))
        assert ((ids >= 0) & (ids < 8)).all()
        assert weights[1].isnan().all() and not weights[0].isnan().any()
        if kind.get("is_sigmoid"):
            assert 3 not in ids[2]


def test_a_rows_choice_does_not_depend_on_the_rows_beside_it() -> None:
    logits = torch.randn(50, 24, generator=torch.Generator().manual_seed(0))
    rule = Routing(**KINDS["deepseek_v2"])
    ids, weights = route(logits, rule)
    for row in (0, 17, 49):
        own_ids, own_weights = route(logits[row : row + 1].contiguous(), rule)
        assert torch.equal(own_ids[0], ids[row]) and torch.equal(own_weights[0], weights[row])
