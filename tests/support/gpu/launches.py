"""Count what a step would launch on a GPU: operators of torch that run a kernel, and launches of Triton kernels.

Use it in a process that interprets Triton's kernels. Operators by which the interpreter emulates a GPU are not counted.
An operator counts if it writes to a tensor, or returns memory that is not its arguments', unless it only allocates.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Launches(TorchDispatchMode):
    """Records the names of operators and kernels, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.is_inside_kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _memory((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        is_new = func._schema.is_mutable or not _memory(out) <= given
        if is_new and "empty" not in func.name() and not self.is_inside_kernel:
            self.names.append(func.name())
        return out


def _memory(values: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in tree_leaves(values) if isinstance(each, Tensor)}


@contextmanager
def counting_launches() -> Iterator[list[str]]:
    """Yield the names of what is launched within the context."""
    from triton.runtime.interpreter import GridExecutor  # noqa: PLC0415 - after the interpreter is chosen

    run, launches = GridExecutor.__call__, Launches()

    def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launches.names.append(executor.fn.__name__)
        launches.is_inside_kernel = True
        try:
            return run(executor, *args, **kwargs)
        finally:
            launches.is_inside_kernel = False

    GridExecutor.__call__ = counted
    try:
        with launches:
            yield launches.names
    finally:
        GridExecutor.__call__ = run
