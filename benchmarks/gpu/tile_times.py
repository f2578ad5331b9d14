"""Times of candidate tiles, against the kernel's own choice; what `benchmarks.tune_kernels` writes into the table.

A candidate's `times` is the geometric mean over its workloads of the choice's time over its own: above 1 it is faster.
It is checked against float32 first; one that is wrong, or that the device cannot launch, is out.
"""

import math
from collections.abc import Iterator
from typing import Any

from triton.errors import TritonError

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.checking import check
from benchmarks.gpu.rows import Row, Setting
from benchmarks.gpu.tile_candidates import Tuned, tuned
from benchmarks.gpu.tile_table import Tried, fields_of
from benchmarks.gpu.timing import num_copies, time_calls

# In how CUDA names what a kernel did: nothing can be launched by this process after it.
_BROKEN = ("illegal", "misaligned address", "unspecified launch failure", "device-side assert")


def units(setting: Setting) -> list[str]:
    """A kernel at a shape each."""
    return list(tuned(setting, Bench.of(setting)))


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Time one kernel's candidates; each is a row when it is known, as a day may end amid them."""
    bench = Bench.of(setting)
    case = tuned(setting, bench)[unit]
    for tried in try_all(bench, case):
        fields = fields_of(tried.tile, case.choice)
        name = ", ".join(f"{field} {value}" for field, value in fields.items())
        yield Row(name=f"{unit}: {name}", figures={"times": tried.times}, note=tried.trouble)


def try_all(bench: Bench, case: Tuned) -> Iterator[Tried]:
    """Check and time all candidates, one by one.

    Raises:
        RuntimeError: the device has failed, and is of no more use to this process.
    """
    base_s = _seconds(bench, case, case.choice)
    for tile in case.candidates:
        yield _try(bench, case, tile, base_s)


def _try(bench: Bench, case: Tuned, tile: Any, base_s: list[float]) -> Tried:
    try:
        row = check(bench, case.kernel, case.calls(tile)[0])
        if not row.is_right:
            return Tried(tile, 0.0, f"wrong: error {row.figures['error']:.1e}")
        seconds = _seconds(bench, case, tile)
    except (
        TritonError,
        RuntimeError,
        ValueError,
        AssertionError,
    ) as error:  # too many registers, too much memory
        if any(word in str(error) for word in _BROKEN):
            raise
        return Tried(tile, 0.0, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    ratios = [math.log(base / own) for base, own in zip(base_s, seconds, strict=True)]
    return Tried(tile, math.exp(sum(ratios) / len(ratios)))


def _seconds(bench: Bench, case: Tuned, tile: Any) -> list[float]:
    found = []
    for make in case.calls(tile):
        first = make(bench, 0)
        calls = [first, *(make(bench, seed) for seed in range(1, num_copies(bench, first.num_bytes)))]
        found.append(time_calls(bench, [call.run for call in calls]).seconds)
    return found
