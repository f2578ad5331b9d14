"""The kernel that rotates queries and keys, for attention modules.

`transformers`' modules call functions of the same file, `apply_rotary_pos_emb` and, in DeepSeek's families,
`apply_rotary_pos_emb_interleave`. A trial on the CPU finds which kind of rotation such a function computes. If the kernel
then agrees on the device, the module gets a copy of its forward with the kernel under that name: the same code, other globals.
Families that rotate in another way keep theirs.
Rejected: replacing the function in the file, which would change every model of the process.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from attention.gpu.rotary import HALVES, Rotation, rotate
from moe.adopt.adopt import Candidate, SampleRows, first_agreeing

NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
KINDS = (
    HALVES,
    Rotation(has_half_angles=True),  # gpt-oss
    Rotation(is_interleaved=True, is_sorted=True),  # DeepSeek
    Rotation(is_interleaved=True),  # ERNIE
)
_ROWS, _HEADS, _DIM = 4, 2, 32
# For values up to about 3: transformers rounds both products and their sum to the type, the kernel rounds once.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
_ON_CPU = SampleRows(torch.float32, torch.device("cpu"))


def rotary(module: Any, rows: SampleRows) -> Iterator[Candidate]:
    """Propose the kernel for a module if its forward calls one of the functions, or both."""
    # The forward was already exchanged, as for an indexer that chooses from pages (attention.sparse).
    forward = forward_of(module)
    if forward is None:
        return
    kinds = {name: kind_of(forward.__globals__[name]) for name in called_by(forward)}
    known = {name: kind for name, kind in kinds.items() if kind is not None}
    if not known:
        return
    owns = [forward.__globals__[name] for name in known]
    yield Candidate(
        own=partial(_each, owns),
        ours=partial(_each, [partial(rotate_both, rotation=kind) for kind in known.values()]),
        arguments=partial(_draw_all, rows, list(known.values())),
        tolerance=_TOLERANCE[rows.dtype],
        install=lambda: setattr(module, "forward", MethodType(_with_kernels(forward, known), module)),
        kind=tuple(owns),
    )


def forward_of(module: Any) -> FunctionType | None:
    """Return the function that a module's class defines, or None if it was exchanged."""
    if "forward" in vars(module):
        return None
    forward = inspect.unwrap(type(module).forward)  # without the wrapper that renames old keywords
    return forward if isinstance(forward, FunctionType) else None


def called_by(forward: FunctionType) -> list[str]:
    """Return the names of the rotating functions that a forward may call."""
    return [name for name in NAMES if name in forward.__code__.co_names and name in forward.__globals__]


@cache
def kind_of(own: Callable[..., Any]) -> Rotation | None:
    """Return the kind of rotation that a function of `transformers` computes, or None if it is another."""
    found: list[Rotation] = []
    candidates = (
        Candidate(
            own=own,
            ours=partial(turned, rotation=kind),
            arguments=partial(_draw, _ON_CPU, kind),
            tolerance=_TOLERANCE[torch.float32],
            install=partial(found.append, kind),
        )
        for kind in KINDS
    )
    first = first_agreeing(candidates)
    if first is None:
        return None
    first.install()
    return found[0]


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [1, H, T, D] in torch: the oracle of the kernel."""
    half = rotation.rotary_dim(cos) // 2
    cosine, sine = (angles[:, None, :, :half] for angles in (cos, sin))

    def turn(x: Tensor) -> Tensor:
        part, rest = x[..., : 2 * half], x[..., 2 * half :]
        a, b = (part[..., ::2], part[..., 1::2]) if rotation.is_interleaved else part.chunk(2, dim=-1)
        both = a * cosine - b * sine, b * cosine + a * sine
        apart = not rotation.is_interleaved or rotation.is_sorted
        joined = torch.cat(both, -1) if apart else torch.stack(both, -1).flatten(-2)
        return torch.cat((joined, rest), dim=-1)

    return turn(q), turn(k)


def rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_more: Any, rotation: Rotation = HALVES, **_options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [1, H, T, D] by angles [1, T, A] in place, and return them."""
    rotate(
        q[0].transpose(0, 1), cos[0], sin[0], keys_TGD=k[0].transpose(0, 1), rotation=rotation
    )  # fmt: skip
    return q, k


def _each(functions: list[Callable[..., tuple[Tensor, Tensor]]], *arguments: Tensor) -> list[Tensor]:
    """Call each function with four of the arguments."""
    return [
        each
        for at, function in enumerate(functions)
        for each in function(*arguments[4 * at : 4 * at + 4])
    ]  # fmt: skip


def _with_kernels(forward: FunctionType, kinds: dict[str, Rotation]) -> FunctionType:
    """Copy a function with some global names replaced."""
    kernels = {name: partial(rotate_both, rotation=kind) for name, kind in kinds.items()}
    names = {**forward.__globals__, **kernels}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _draw_all(rows: SampleRows, kinds: list[Rotation]) -> tuple[Tensor, ...]:
    return tuple(each for kind in kinds for each in _draw(rows, kind))


def _draw(rows: SampleRows, kind: Rotation) -> tuple[Tensor, ...]:
    """Return queries, keys, and the cosines and sines of their angles."""
    q, k = (rows.draw(1, _HEADS, _ROWS, _DIM, seed=seed) for seed in range(2))
    return q, k, *draw_angles(rows, kind, _ROWS, _DIM)


def draw_angles(rows: SampleRows, kind: Rotation, num_rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """Draw cosines and sines of angles for heads of E dims: [1, T, A] each."""
    angle = torch.randn(1, num_rows, dim // 2, generator=torch.Generator().manual_seed(2))
    angles = angle if kind.has_half_angles else torch.cat((angle, angle), dim=-1)
    return angles.cos().to(rows.device, rows.dtype), angles.sin().to(rows.device, rows.dtype)
