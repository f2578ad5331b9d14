"""A family's gate is found by trying; rows are put in the kernel's order; what is not known stays the module's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.adopt.gates import Gate, apply, arranged, gate_of, gelu_tanh, silu, swiglu_oai


def module(gate: Any, *, has_gate: bool = True) -> SimpleNamespace:
    return SimpleNamespace(has_gate=has_gate, _apply_gate=gate, act_fn=torch.relu)


def by_halves(x: Tensor) -> Tensor:
    return silu(*x.chunk(2, dim=-1))


def in_turn(x: Tensor) -> Tensor:
    return swiglu_oai(x[..., ::2], x[..., 1::2])


def other_limit(x: Tensor) -> Tensor:
    return swiglu_oai(x[..., ::2].clamp(max=5.0), x[..., 1::2])


@pytest.mark.parametrize(
    ("gate", "found"),
    [
        (by_halves, Gate("silu")),
        (in_turn, Gate("swiglu_oai", True)),
        (lambda x: silu(x[..., ::2], x[..., 1::2]), Gate("silu", True)),
        (lambda x: torch.nn.functional.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], Gate("gelu")),
        (lambda x: gelu_tanh(*x.chunk(2, -1)), Gate("gelu_tanh")),
        (lambda x: torch.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], Gate("none")),
        (other_limit, Gate("none")),
        (lambda x: silu(*reversed(x.chunk(2, -1))), Gate("none")),
    ],
)
def test_the_gate_is_the_one_that_gives_the_modules_values(gate: Any, found: Gate) -> None:
    assert gate_of(module(gate)) == found


def test_a_module_without_a_gate_has_none() -> None:
    plain = module(None, has_gate=False)
    assert gate_of(plain) == Gate("none")
    assert apply(plain, torch.tensor([[-1.0, 2.0]])).tolist() == [[0.0, 2.0]]


def test_rows_of_a_gate_in_turn_are_put_one_after_the_other() -> None:
    rows = torch.arange(6)[:, None]
    assert arranged(rows, Gate("swiglu_oai", True)).flatten().tolist() == [0, 2, 4, 1, 3, 5]
    assert arranged(rows, Gate("silu")) is rows
    assert arranged(rows, Gate("none", True)) is rows
