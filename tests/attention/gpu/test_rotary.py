"""Rotary embedding for GPUs against transformers' function: in the interpreter, and on a GPU if there is one."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.fixtures import OnDevice
from tests.support.gpu.attention import some_fast


def rotate_heads(device: str, heads: int, dim: int, rotary_dim: int, is_interleaved: bool) -> None:
    from attention.gpu.rotary import Rotation, rotate  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    angles = torch.randn(5, rotary_dim // 2).repeat(1, 2)
    cosines, sines = angles.cos().to(device), angles.sin().to(device)
    wide = torch.randn(5, heads + 1, dim + 3).to(device)
    x = wide[:, :heads, :dim]  # rows and heads have gaps between them
    turned = x[..., :rotary_dim].transpose(0, 1)[None]
    if is_interleaved:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    want, _ = apply_rotary_pos_emb(turned, turned, cosines[None], sines[None])
    want = want[0].transpose(0, 1)
    if is_interleaved:
        want = torch.stack(want.chunk(2, dim=-1), dim=-1).flatten(-2)
    before = wide.clone()
    rotate(x, cosines, sines, rotation=Rotation(is_interleaved=is_interleaved))
    torch.testing.assert_close(x[..., :rotary_dim], want, atol=1e-6, rtol=1e-5)
    wide[:, :heads, :rotary_dim] = before[:, :heads, :rotary_dim]
    assert torch.equal(wide, before)


CASES = {
    "all dims": (4, 32, 32, False),
    "two tiles of heads, some dims, interleaved": (11, 24, 16, True),
    "two tiles of heads, some dims": (11, 24, 16, False),
    "one head of 80, interleaved": (1, 80, 80, True),
    "D 96": (2, 96, 96, False),
}


@pytest.mark.parametrize("case", some_fast(CASES, "all dims", "two tiles of heads, some dims, interleaved"))
def test_heads_are_rotated_as_transformers_rotates_them(
    on_device: OnDevice, case: tuple[int, int, int, bool]
) -> None:
    on_device(rotate_heads, *case)


def rotate_both(device: str) -> None:
    from attention.gpu.rotary import rotate  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    cosines, sines = torch.randn(2, 3, 16).to(device)
    query, key = torch.randn(3, 11, 24).to(device), torch.randn(3, 2, 40).to(device)[..., 3:27]
    alone = query.clone(), key.clone()
    for x in alone:
        rotate(x, cosines, sines)
    before = query.clone()
    rotate(query, cosines, sines, keys_TGD=key)
    assert torch.equal(query, alone[0])
    assert torch.equal(key, alone[1])
    assert not torch.equal(query, before)


def test_queries_and_keys_are_rotated_together_as_one_by_one(on_device: OnDevice) -> None:
    on_device(rotate_both)


def refuse(device: str) -> None:
    from attention.gpu.rotary import rotate  # noqa: PLC0415 - in the interpreter

    for rotary_dim in (7, 34):
        with pytest.raises(
            ValueError, match=f"have {rotary_dim} dims; the number must be even and at most 32"
        ):
            rotate(torch.zeros(1, 1, 32, device=device), *torch.zeros(2, 1, rotary_dim, device=device))


def test_angles_that_do_not_fit_are_refused(on_device: OnDevice) -> None:
    on_device(refuse)
