"""A weight that modules use like any other, held in a form that a kernel of ours multiplies with.

`transformers`' modules call `torch.nn.functional.linear(x, self.weight)` and `embedding(ids, self.weight)`; a
`KernelWeight` answers both through `__torch_function__`, so that nn.Linear, routers and tied embeddings run on our
kernels without a line of model code replaced. Whatever else is asked of it, it answers as a plain tensor, correct but
slow. What it holds and multiplies with is its class's: `moe.cpu.packed_weight`, `moe.gpu.device_weight`.
Rejected: to exchange modules' classes (routers are not nn.Linear and differ by family).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear
from torch.utils._pytree import tree_map

CASTS = frozenset({Tensor.to, Tensor.type})
# Getters that tell about a tensor without its values; all others (T, mT, data) want them.
ABOUT = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "device", "dtype", "grad", "grad_fn", "is_cuda", "is_leaf", "is_meta", "is_sparse", "layout", "ndim",
        "requires_grad", "shape",
    )
)  # fmt: skip


class KernelWeight(Tensor):
    """[N, K], presented as a tensor of a floating type on a device."""

    def plain(self) -> Tensor:
        """The weight as a plain tensor of its type: [N, K]."""
        raise NotImplementedError

    def cast(self, dtype: torch.dtype) -> Tensor:
        """The weight in a type, as plain tensors cast; itself where it has that type."""
        return self if self.dtype is dtype else self.plain().to(dtype)

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return `linear(x, self, bias)`; None: the kernel does not take such rows."""
        raise NotImplementedError

    def embedded(self, ids: Tensor) -> Tensor | None:
        """Return the rows of some ids; None: only the plain weight has them."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer linear and embedding with the kernel, casts to its own type with itself, the rest as a plain tensor."""
        kwargs = kwargs or {}
        if function is linear:
            return _linear(*args, **kwargs)
        if function is embedding:
            return _embedding(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if function in ABOUT:
                return function(*args, **kwargs)
            wanted = _cast_to(function, args)
            if wanted is not None and isinstance(args[0], KernelWeight):
                return args[0].cast(wanted)
            plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
            return function(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> Any:
        """Refuse: nothing below the Python API may touch a weight that has no plain storage."""
        raise AssertionError(f"{function} reached a kernel's weight; __torch_function__ should have answered")


def _cast_to(function: Any, args: tuple[Any, ...]) -> torch.dtype | None:
    """The type that a call casts a weight to, if it does nothing else."""
    if function is Tensor.float:
        return torch.float32
    is_cast = function in CASTS and len(args) == 2 and isinstance(args[1], torch.dtype)
    return args[1] if is_cast and args[1].is_floating_point else None


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, KernelWeight) else value


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = weight.multiplied(input, bias) if isinstance(weight, KernelWeight) else None
    if out is not None:
        return out
    return linear(_plain(input), _plain(weight), _plain(bias))  # answers, or refuses, as torch does


def _embedding(ids: Tensor, weight: Tensor, *options: Any, **more_options: Any) -> Tensor:
    out = weight.embedded(ids) if isinstance(weight, KernelWeight) else None
    return embedding(ids, _plain(weight), *options, **more_options) if out is None else out
