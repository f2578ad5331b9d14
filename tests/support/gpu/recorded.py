"""CUDA graphs without CUDA: a replay repeats all launches of a captured function, with the same tensors and arguments.

Nothing of the function's Python runs in a replay. So all values that the function read from the host at capture (a number of
rows, a list of tiles, a grid) stay as they were, as on a GPU, and a replay with other contents shows it. Views are not launches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.models.no_reads import NoReads

Run = Callable[[], Tensor]
_NOT_LAUNCHES = ("aten.empty", "aten.new_empty")


class _Launches(TorchDispatchMode):
    """Records operators that write memory."""

    def __init__(self) -> None:
        super().__init__()
        self.again: list[Callable[[], object]] = []
        self.names: list[str] = []
        self.is_in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.is_in_kernel or str(func).startswith(_NOT_LAUNCHES):
            return result
        read = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if func._schema.is_mutable:
            self._add(str(func), lambda: func(*args, **kwargs))
        elif not any(_storage(each) in read for each in outputs):
            self._add(str(func), lambda: _write_again(outputs, func(*args, **kwargs)))
        return result

    def _add(self, name: str, again: Callable[[], object]) -> None:
        self.names.append(name)
        self.again.append(again)

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Record kernels that Triton's interpreter runs, but not the operators by which it runs them."""
        from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415 - after it is chosen

        launch = InterpretedFunction.run

        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_in_kernel or kwargs.get("warmup"):
                return launch(kernel, *args, **kwargs)
            self._add(kernel.__name__, lambda: launch(kernel, *args, **kwargs))
            self.is_in_kernel = True
            try:
                return launch(kernel, *args, **kwargs)
            finally:
                self.is_in_kernel = False

        InterpretedFunction.run = recorded
        try:
            yield
        finally:
            InterpretedFunction.run = launch


class FakeGraphs:
    """A `scheduler.step.graphs.Recorder`.

    Attributes:
        launches: Names of what each capture launches, in order.
        replayed: Number of the capture of each replay.
    """

    def __init__(self) -> None:
        self.launches: list[list[str]] = []
        self.replayed: list[int] = []

    def capture(self, run: Run) -> Run:
        """Warm up, then record. The host may not read tensors."""
        run()
        recording = _Launches()
        with NoReads(), recording.kernels(), recording:
            result = run()
        number = len(self.launches)
        self.launches.append(recording.names)

        @torch.inference_mode()
        def replay() -> Tensor:
            self.replayed.append(number)
            for again in recording.again:
                again()
            return result

        return replay

    def finish(self) -> int:
        """Return 0: nothing was reserved."""
        return 0


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _write_again(outputs: list[Tensor], result: Any) -> None:
    made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
    for output, again in zip(outputs, made, strict=True):
        output.copy_(again)
