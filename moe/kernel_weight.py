"""A weight that modules use like any other, stored in the form that one of our kernels multiplies with.

`transformers`' modules call `torch.nn.functional.linear(x, self.weight)` and `embedding(ids, self.weight)`. A
`KernelWeight` handles both through `__torch_function__`, so nn.Linear, routers and tied embeddings run on our
kernels without changes to model code. All other operations work as on a plain tensor, correctly but
slowly. Subclasses define storage and product: `moe.cpu.weights.packed_weight`, `moe.gpu.device_weight`.
Rejected: replacing modules' classes (routers are not nn.Linear and differ by family).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear
from torch.utils._pytree import tree_map

CASTS = frozenset({Tensor.to, Tensor.type})
# Getters that need no values of the tensor; all others (T, mT, data) do.
ABOUT = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "device", "dtype", "grad", "grad_fn", "is_cuda", "is_leaf", "is_meta", "is_sparse", "layout", "ndim",
        "requires_grad", "shape",
    )
)  # fmt: skip


class KernelWeight(Tensor):
    """A weight [N, K] that appears as a tensor of a floating-point type on a device."""

    def plain(self) -> Tensor:
        """Return the weight as a plain tensor of its type: [N, K]."""
        raise NotImplementedError

    def stored(self) -> Sequence[Tensor]:
        """Return the tensors that the weight is stored in."""
        return [self.plain()]

    def cast(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a type, as casts of plain tensors do; itself if it has that type."""
        return self if self.dtype is dtype else self.plain().to(dtype)

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return `linear(x, self, bias)`, or None if the kernel does not support such rows."""
        raise NotImplementedError

    def multiplied_wide(self, _x: Tensor) -> Tensor | None:
        """Return `linear(x, self)` as float32, from exact products and sums in float32, or None if the kernel has only its type."""
        return None

    def embedded(self, ids: Tensor) -> Tensor | None:
        """Return the rows of some ids, or None if only the plain weight can provide them."""
        raise NotImplementedError

    def joined(self, _others: Sequence[Tensor]) -> "KernelWeight | None":
        """Return one weight of this one's rows and then the others'. All of them are parts of it from now on.

        None if the weights can only be multiplied one by one.
        """
        return None

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run linear and embedding on the kernel, return itself for casts to its type, and use a plain tensor otherwise."""
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
        """Refuse: code below the Python API must not use a weight without plain storage."""
        raise AssertionError(f"{function} reached a kernel's weight; __torch_function__ did not handle it")


def _cast_to(function: Any, args: tuple[Any, ...]) -> torch.dtype | None:
    """Return the type that a call casts a weight to, or None if it is not a plain cast."""
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
    return linear(_plain(input), _plain(weight), _plain(bias))  # result or error as in torch


def _embedding(ids: Tensor, weight: Tensor, *options: Any, **more_options: Any) -> Tensor:
    out = weight.embedded(ids) if isinstance(weight, KernelWeight) else None
    return embedding(ids, _plain(weight), *options, **more_options) if out is None else out
