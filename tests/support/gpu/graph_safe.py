"""Reject on the CPU what would break a captured CUDA graph: operators that synchronise, have data-dependent
results or allocate memory. Launches of interpreted kernels are allowed: on a GPU each is one operation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_HARMLESS = ("aten.slice", "aten.view", "aten.select", "aten.alias", "aten.copy_", "aten.detach")
_WIRES = ("c10d.alltoall_base_", "c10d.send", "c10d.recv_")  # into memory that the wire owns


class GraphSafe(TorchDispatchMode):
    """Raise on any operator that is neither a view nor a copy into existing memory, unless `lets_through` allows it."""

    lets_through = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.lets_through and not str(func).startswith(_HARMLESS + _WIRES):
            raise AssertionError(f"{func} on the low-latency path")
        return func(*args, **(kwargs or {}))


@contextmanager
def graph_safe_launches() -> Iterator[None]:
    """Guard all operators except those by which Triton's interpreter emulates a GPU."""
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415 - after the interpreter is chosen

    run, guard = InterpretedFunction.run, GraphSafe()

    def run_unguarded(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        guard.lets_through = True
        try:
            return run(kernel, *args, **kwargs)
        finally:
            guard.lets_through = False

    InterpretedFunction.run = run_unguarded
    try:
        with guard:
            yield
    finally:
        InterpretedFunction.run = run
