"""`bench` and `bench_kineto` measure nothing here: they time CUDA kernels, of which there are none.

They return one second without calling what they are given, so that DeepEP's tests run through their tuning loops,
which assert nothing; the bandwidths which those print mean nothing. Measure with `python -m benchmarks.dispatch`.
"""

from collections.abc import Callable
from typing import Any

_SECONDS = 1.0


def bench(fn: Callable[[], Any], *_: Any, **__: Any) -> tuple[float, float, float]:
    """Return a second as average, shortest and longest time."""
    return _SECONDS, _SECONDS, _SECONDS


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    *_: Any,
    num_kernels_per_period: int = 1,
    **__: Any,
) -> Any:
    """Return a second per kernel name, or a list of them per name where a period has several kernels."""
    one: Any = _SECONDS if num_kernels_per_period == 1 else [_SECONDS] * num_kernels_per_period
    return one if isinstance(kernel_names, str) else (one,) * len(kernel_names)
