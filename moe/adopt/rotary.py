"""Attention modules of a built model rotate queries and keys with the kernel, where trying shows that it does the same.

`transformers`' modules call a function of their own file, `apply_rotary_pos_emb`; a module whose file's function
computes what the kernel does gets its forward again, with the kernel under that name: the same code, other globals.
Families that rotate otherwise (angles of half a head, pairs taken apart) keep theirs.
Rejected: exchanging the function in the file, which would change every model of the process.
"""

from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from attention.gpu.rotary import rotate

_NAME = "apply_rotary_pos_emb"
_ROWS, _HEADS, _DIM = 4, 2, 32
# Of values up to about 3: transformers rounds both products and their sum to the type, the kernel once.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}


def rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_more: Any, **_options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [1, H, T, D] by angles [1, T, E], in place; returns them."""
    rotate(q[0].transpose(0, 1), cos[0], sin[0], keys_TGD=k[0].transpose(0, 1))
    return q, k


def exchange_rotary(net: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Let a model's attention modules rotate with the kernel; returns how many do.

    Args:
        dtype: of queries and keys.
        device: of the model.
    """
    agreed: dict[Any, bool] = {}
    exchanged = 0
    for module in net.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
            continue
        own = forward.__globals__[_NAME]
        if own not in agreed:
            agreed[own] = _agrees(own, dtype, device)
        if agreed[own]:
            module.forward = MethodType(_with_kernel(forward), module)
            exchanged += 1
    return exchanged


def _with_kernel(forward: FunctionType) -> FunctionType:
    """The same function, but for what one name stands for."""
    names = {**forward.__globals__, _NAME: rotate_both}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@torch.no_grad()
def _agrees(own: Any, dtype: torch.dtype, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, _HEADS, _ROWS, _DIM, generator=generator).to(device, dtype) for _ in range(2))
    angle = torch.randn(1, _ROWS, _DIM // 2, generator=generator)
    both = torch.cat((angle, angle), dim=-1)
    cos, sin = both.cos().to(device, dtype), both.sin().to(device, dtype)
    try:
        wanted = own(q.clone(), k.clone(), cos, sin)
    except (RuntimeError, TypeError):  # it wants other shapes or more arguments
        return False
    found = rotate_both(q.clone(), k.clone(), cos, sin)
    tolerance = _TOLERANCE[dtype]
    return all(
        torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
        for ours, theirs in zip(found, wanted, strict=True)
    )
