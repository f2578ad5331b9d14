"""Rotary embedding for GPUs in the interpreter against transformers' function, and compiled."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton: pip install -r requirements-dev.txt"
)


def rotate_heads(heads: int, dim: int, rotary_dim: int, is_interleaved: bool) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from attention.gpu.rotary import rotate  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    angles = torch.randn(5, rotary_dim // 2).repeat(1, 2)
    cosines, sines = angles.cos(), angles.sin()
    wide = torch.randn(5, heads + 1, dim + 3)
    x = wide[:, :heads, :dim]  # rows and heads have gaps between them
    turned = x[..., :rotary_dim].transpose(0, 1)[None]
    if is_interleaved:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    want, _ = apply_rotary_pos_emb(turned, turned, cosines[None], sines[None])
    want = want[0].transpose(0, 1)
    if is_interleaved:
        want = torch.stack(want.chunk(2, dim=-1), dim=-1).flatten(-2)
    before = wide.clone()
    rotate(x, cosines, sines, is_interleaved=is_interleaved)
    torch.testing.assert_close(x[..., :rotary_dim], want, atol=1e-6, rtol=1e-5)
    wide[:, :heads, :rotary_dim] = before[:, :heads, :rotary_dim]
    assert torch.equal(wide, before)


@pytest.mark.parametrize(("heads", "dim", "rotary_dim"), [(4, 32, 32), (3, 24, 16), (1, 80, 80)])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_heads_are_rotated_as_transformers_rotates_them(
    interpreter: RankPool, heads: int, dim: int, rotary_dim: int, is_interleaved: bool
) -> None:
    interpreter.run(rotate_heads, heads, dim, rotary_dim, is_interleaved)


def test_the_kernel_compiles_within_its_budget(tmp_path: Path) -> None:
    from attention.gpu import rotary  # noqa: PLC0415 - not in the interpreter
    from tests.support.triton_compile import Kernel, check_budget  # noqa: PLC0415

    types = {"x": "*bf16", "cosines": "*fp32", "sines": "*fp32", "row_stride": "i32", "head_stride": "i32"}
    sizes = {"E": 128, "HALF": 64, "IS_INTERLEAVED": False}
    check_budget(Kernel(rotary.rotate_rows, types, sizes, 1, 64), tmp_path)
