"""Dispatcher on one rank: equal to the oracle, and bad input is rejected by name before anything is sent."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch import layout
from dispatch.dispatcher import Dispatched, Dispatcher
from dispatch.wires.local import LocalWire
from tests.dispatch.exchange import run_layer
from tests.dispatch.oracle import make_cases, simulate

S = 4


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(LocalWire(), slots_per_rank=S)


def local_dispatch(dispatcher: Dispatcher, T: int = 3) -> Dispatched:
    return dispatcher.dispatch(torch.ones(T, 8), torch.zeros(T, 2, dtype=torch.int64))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    tokens=st.integers(0, 9),
    hidden=st.sampled_from([1, 3, 8, 33]),
    choices=st.integers(1, 6),
    no_choice=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
def test_one_rank_equals_the_oracle(
    seed: int, tokens: int, hidden: int, choices: int, no_choice: float, dtype: torch.dtype
) -> None:
    dispatcher = Dispatcher(LocalWire(), slots_per_rank=S)
    cases = make_cases(
        seed, [tokens], hidden=hidden, choices=choices, slots_per_rank=S, no_choice=no_choice, dtype=dtype
    )
    got, want = run_layer(dispatcher, cases[0]), simulate(cases, S)[0]
    for ours, oracle in zip(got, want, strict=True):
        assert ours.dtype == oracle.dtype
        assert torch.equal(ours, oracle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_sum_has_the_oracles_bits(dispatcher: Dispatcher, dtype: torch.dtype) -> None:
    """Values over 60 orders of magnitude reveal a fused multiply-add or another order."""
    generator = torch.Generator().manual_seed(1)
    T, K, H = 64, 8, 130
    slots_TK = torch.randint(-1, S, (T, K), generator=generator)
    dispatched = dispatcher.dispatch(torch.zeros(T, H, dtype=dtype), slots_TK)
    P = dispatched.row_P.numel()
    scale = 10.0 ** torch.randint(-30, 30, (P, 1), generator=generator).float()
    y_PH = (torch.randn(P, H, generator=generator) * scale).to(dtype)
    weights_TK = torch.randn(T, K, generator=generator)
    got = dispatcher.combine(y_PH, weights_TK, dispatched)
    pair_of_answer = layout.order_pairs(slots_TK[(slots_TK >= 0).any(1)], S).pair_of_answer
    position_TK = layout.answer_positions(slots_TK, S)
    want = layout.sum_answers(y_PH[pair_of_answer], position_TK, weights_TK, dtype)
    assert torch.equal(got, want)


def test_infinities_and_nans_pass_through_bfloat16(dispatcher: Dispatcher) -> None:
    dispatched = dispatcher.dispatch(torch.zeros(1, 4, dtype=torch.bfloat16), torch.tensor([[0]]))
    y_PH = torch.tensor([[float("inf"), float("-inf"), float("nan"), 3.3e38]], dtype=torch.bfloat16)
    combined = dispatcher.combine(y_PH, torch.tensor([[1.0]]), dispatched)
    assert torch.equal(combined.isnan(), y_PH.isnan())
    assert torch.equal(combined.nan_to_num(), y_PH.nan_to_num())


def test_a_single_rank_copies_no_rows(dispatcher: Dispatcher) -> None:
    x_TH = torch.randn(5, 8)
    assert dispatcher.dispatch(x_TH, torch.zeros(5, 1, dtype=torch.int64)).x_NH.data_ptr() == x_TH.data_ptr()


def test_non_contiguous_arguments_are_accepted(dispatcher: Dispatcher) -> None:
    case = make_cases(3, [6], hidden=8, slots_per_rank=S)[0]
    crooked = case._replace(
        x_TH=case.x_TH.T.contiguous().T,
        slots_TK=case.slots_TK.T.contiguous().T,
        weights_TK=case.weights_TK.T.contiguous().T,
    )
    for ours, oracle in zip(run_layer(dispatcher, crooked), simulate([case], S)[0], strict=True):
        assert torch.equal(ours, oracle)


def test_buffers_are_reused_once_grown(dispatcher: Dispatcher) -> None:
    first = local_dispatch(dispatcher, 8).row_P.data_ptr()
    assert local_dispatch(dispatcher, 4).row_P.data_ptr() == first


@pytest.mark.parametrize(
    ("x", "slots", "message"),
    [
        (torch.zeros(2, 8), torch.tensor([[0], [4]]), r"slots_TK\[1, 0\] is 4; it must be -1 or in \[0, 4\)"),
        (torch.zeros(1, 8), torch.tensor([[0, -2]]), r"slots_TK\[0, 1\] is -2"),
        (torch.zeros(1, 8), torch.tensor([[1 << 40]]), "is 1099511627776"),
        (torch.zeros(2, 0), torch.zeros(2, 1, dtype=torch.int64), "H is 0"),
    ],
)
def test_dispatch_refuses_bad_input_by_name(dispatcher: Dispatcher, x: Any, slots: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dispatcher.dispatch(x, slots)
    local_dispatch(dispatcher)  # and it still works


def test_slots_per_rank_must_be_positive() -> None:
    with pytest.raises(ValueError, match="slots_per_rank is 0"):
        Dispatcher(LocalWire(), slots_per_rank=0)
