"""The kernel that rotates queries and keys, for attention modules.

`transformers`' modules call a function of their own file, `apply_rotary_pos_emb`. If that function computes the same as
the kernel, the module gets a copy of its forward with the kernel under that name: the same code, other globals.
Families that rotate in another way (angles of half a head, separate pairs) keep theirs.
Rejected: replacing the function in the file, which would change every model of the process.
"""

import inspect
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from attention.gpu.rotary import rotate
from moe.adopt.adopt import Candidate, SampleRows

_NAME = "apply_rotary_pos_emb"
_ROWS, _HEADS, _DIM = 4, 2, 32
# For values up to about 3: transformers rounds both products and their sum to the type, the kernel rounds once.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}


def rotary(module: Any, rows: SampleRows) -> Iterator[Candidate]:
    """Propose the kernel for a module whose forward calls the function."""
    # The forward was already exchanged, as for an indexer that chooses from pages (attention.sparse).
    if "forward" in vars(module):
        return
    forward = inspect.unwrap(type(module).forward)  # without the wrapper that renames old keywords
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
        return
    own = forward.__globals__[_NAME]
    yield Candidate(
        own=own,
        ours=rotate_both,
        arguments=partial(_draw, rows),
        tolerance=_TOLERANCE[rows.dtype],
        install=lambda: setattr(module, "forward", MethodType(_with_kernel(forward), module)),
        kind=own,
    )


def rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_more: Any, **_options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [1, H, T, D] by angles [1, T, E] in place, and return them."""
    rotate(q[0].transpose(0, 1), cos[0], sin[0], keys_TGD=k[0].transpose(0, 1))
    return q, k


def _with_kernel(forward: FunctionType) -> FunctionType:
    """Copy a function with one global name replaced."""
    names = {**forward.__globals__, _NAME: rotate_both}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _draw(rows: SampleRows) -> tuple[Tensor, ...]:
    """Return queries, keys, and the cosines and sines of their angles."""
    angle = torch.randn(1, _ROWS, _DIM // 2, generator=torch.Generator().manual_seed(2))
    both = torch.cat((angle, angle), dim=-1)
    cos, sin = (each.to(rows.device, rows.dtype) for each in (both.cos(), both.sin()))
    q, k = (rows.draw(1, _HEADS, _ROWS, _DIM, seed=seed) for seed in range(2))
    return q, k, cos, sin
