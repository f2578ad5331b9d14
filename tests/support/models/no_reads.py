"""A guard that rejects operations that make the host wait for a device: reads of a tensor's values, data-dependent shapes.

On CPU tensors, which replace a device's, such reads raise nothing. The guard therefore rejects them by name, above and
below the dispatcher. Triton's interpreter may read what kernels read.
"""

import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = frozenset(
    {"item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "argwhere"}
    | {"__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
)
READING_OPS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique",
    "aten.unique",
)


class HostReadError(AssertionError):
    """The host read a tensor's values."""


Meet = Callable[[str], None]  # called on every read


def _refuse(read: str) -> None:
    raise HostReadError(f"{read} in a step that must not wait")


def _is_interpreting() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "triton.runtime.interpreter":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Above(TorchFunctionMode):
    def __init__(self, meet: Meet) -> None:
        super().__init__()
        self._meet = meet

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS and not _is_interpreting():
            self._meet(f"{name} of a tensor")
        return function(*args, **(kwargs or {}))


class _Below(TorchDispatchMode):
    def __init__(self, meet: Meet) -> None:
        super().__init__()
        self._meet = meet

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        by_mask = name.startswith(("aten.index.Tensor", "aten.index_put")) and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (name.startswith(READING_OPS) or by_mask) and not _is_interpreting():
            self._meet(f"{name}{' by a mask' if by_mask else ''}")
        return function(*args, **(kwargs or {}))


class NoReads:
    """Context in which the host may not read tensors."""

    def __init__(self, meet: Meet = _refuse) -> None:
        self._modes = (_Above(meet), _Below(meet))

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class CountedReads(NoReads):
    """Context that records the host's reads.

    Attributes:
        reads: Reads in order. A read that is built from other reads counts as all of them.
    """

    def __init__(self) -> None:
        self.reads: list[str] = []
        super().__init__(self.reads.append)
