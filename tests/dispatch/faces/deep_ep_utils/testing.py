"""Stubs of `bench` and `bench_kineto`, which measure nothing: they time CUDA kernels, and these do not exist here.

They return one second without calling their argument, so that DeepEP's tests run through their tuning loops, which
assert nothing. The bandwidths that those print are meaningless. Measure with `python -m benchmarks.dispatch`.
"""

from collections.abc import Callable
from typing import Any

_SECONDS = 1.0


def bench(fn: Callable[[], Any], *_: Any, **__: Any) -> tuple[float, float, float]:
    """Return one second as average, shortest and longest time."""
    return _SECONDS, _SECONDS, _SECONDS


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    *_: Any,
    num_kernels_per_period: int = 1,
    **__: Any,
) -> Any:
    """Return one second per kernel name, or a list of them per name if a period has several kernels."""
    one: Any = _SECONDS if num_kernels_per_period == 1 else [_SECONDS] * num_kernels_per_period
    return one if isinstance(kernel_names, str) else (one,) * len(kernel_names)
