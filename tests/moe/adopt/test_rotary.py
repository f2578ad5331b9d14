"""Modules that get the rotary kernel: those that call transformers' function, unless their forward was exchanged before."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from attention.gpu.rotary import HALVES, Rotation
from moe.adopt.adopt import SampleRows
from moe.adopt.rotary import kind_of, rotary, turned

ROWS = SampleRows(torch.float32, torch.device("cpu"))


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return turned(q, k, cos, sin, rotation=HALVES)


def keep_all(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
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
    assert candidate.kind == (apply_rotary_pos_emb,)


def test_a_forward_that_was_exchanged_is_left_alone() -> None:
    """An indexer's exchanged forward chooses from pages. The rotary kernel's would restore transformers' own."""
    module = Attention()
    module.forward = lambda *inputs: inputs  # type: ignore[method-assign]
    assert list(rotary(module, ROWS)) == []


SORTED = Rotation(is_interleaved=True, is_sorted=True)


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("qwen3_moe", "apply_rotary_pos_emb", HALVES),
        ("glm4_moe", "apply_rotary_pos_emb", HALVES),
        ("gpt_oss", "apply_rotary_pos_emb", Rotation(has_half_angles=True)),
        ("deepseek_v3", "apply_rotary_pos_emb_interleave", SORTED),
        ("ernie4_5_moe", "apply_rotary_pos_emb", Rotation(is_interleaved=True)),
    ],
)
def test_the_kind_of_a_familys_rotation_is_found(family: str, name: str, kind: Rotation) -> None:
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert kind_of(getattr(file, name)) == kind


def test_another_function_has_no_kind() -> None:
    assert kind_of(keep_all) is None
