"""Modules that get the rotary kernel: those that call transformers' function, unless their forward was exchanged before."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from moe.adopt.adopt import SampleRows
from moe.adopt.rotary import rotary

ROWS = SampleRows(torch.float32, torch.device("cpu"))


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


def renaming(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def renamed(*inputs: Any, **options: Any) -> Any:
        return forward(*inputs, **options)

    return renamed


class Attention(nn.Module):
    """Calls the function through a decorator, as all of transformers' modules since 5.24."""

    @renaming
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin)


def test_a_decorated_forward_is_proposed_for() -> None:
    [candidate] = rotary(Attention(), ROWS)
    assert candidate.own is apply_rotary_pos_emb


def test_a_forward_that_was_exchanged_is_left_alone() -> None:
    """An indexer's exchanged forward chooses from pages. The rotary kernel's would restore transformers' own."""
    module = Attention()
    module.forward = lambda *inputs: inputs  # type: ignore[method-assign]
    assert list(rotary(module, ROWS)) == []
