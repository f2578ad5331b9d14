"""The residual stream, with its last sum pending until a norm or other code needs it.

A decoder layer adds to the stream and norms the sum, often across the border of two layers. Here the sum is a tensor that
knows its two terms. A norm with a kernel for both (`moe.adopt.norms`) makes them one launch; any other operator gets
the sum from torch, at that time. So families keep `transformers`' layers, and none has to be recognised.
Rejected: layers with our own forward, tried per class. They need the names of each family's parts, and hand over a norm from
one layer to the next, which is wrong once code between them changes the stream.

A term must not change in place between a sum and its first use. Decoder layers do not do that: both are new tensors.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

_SUMS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
# Getters that need no values.
_ABOUT = frozenset(
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "is_cuda", "is_meta", "layout", "ndim", "shape")
)


class Stream(Tensor):
    """A tensor that may be a pending sum.

    Attributes:
        base: The tensor, without what is pending.
        added: Pending term, of the same shape and type, or None.
    """

    base: Tensor
    added: Tensor | None

    @staticmethod
    def __new__(cls, base: Tensor, added: Tensor | None = None) -> "Stream":
        """Wrap plain tensors without copying."""
        self = Tensor._make_wrapper_subclass(
            cls, base.shape, dtype=base.dtype, device=base.device, requires_grad=False
        )
        self.base, self.added = base, added
        return self

    def settle(self, total: Tensor) -> None:
        """Set the tensor's values: those of the pending sum."""
        self.base, self.added = total, None

    def plain(self) -> Tensor:
        """Return the plain tensor, after its pending sum."""
        if self.added is not None:
            self.settle(self.base + self.added)
        return self.base

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Keep a sum pending; answer questions about the shape; run everything else on plain tensors."""
        if function in _ABOUT:
            return function(args[0].base)
        if function in _SUMS and not kwargs and len(args) == 2 and _are_alike(*args):
            first, second = args if isinstance(args[0], Stream) else reversed(args)
            return Stream(_plain(first), _plain(second))
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs or {}))
        return function(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it as a static method
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run code below the Python API on plain tensors."""
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs or {}))
        return function(*plain_args, **plain_kwargs)


def start_streams(layers: Iterable[nn.Module]) -> None:
    """Let decoder layers take their hidden states as a `Stream`."""
    for layer in layers:
        layer.register_forward_pre_hook(_begin, with_kwargs=True)


def _begin(
    _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (_streamed(args[0]), *args[1:]), kwargs
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": _streamed(kwargs["hidden_states"])}
    return args, kwargs


def _streamed(value: Any) -> Any:
    is_stream = type(value) is Tensor and value.is_floating_point()
    return Stream(value) if is_stream else value


def _are_alike(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    return one.shape == other.shape and one.dtype is other.dtype and one.device == other.device


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, Stream) else value
