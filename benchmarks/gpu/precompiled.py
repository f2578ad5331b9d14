"""Compile the kernels of the checks in parallel, before they are checked one after another.

A compiler takes a core and seconds per kernel, and a machine with a GPU has many cores. Compiled kernels are kept in Triton's
cache on the disk, where the later parts find them. Nothing is checked here. A kernel that cannot be compiled or launched is
reported by the part that checks it.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.cases import checked_cases
from benchmarks.gpu.results import Row, Setting
from server.machine.parent_death import die_with_parent

_MOST_PROCESSES = 8  # each has a context on the device, and some gigabytes of inputs there


class CompileOutcome(NamedTuple):
    """Outcome of one launch; the problem is "" if it succeeded."""

    name: str
    problem: str


def units(setting: Setting) -> list[str]:
    """Return the only unit."""
    return ["kernels"]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Launch every kernel of the checks once, except in the interpreter, which compiles nothing."""
    if setting.is_interpreted:
        yield Row(name="nothing is compiled", figures={})
        return
    processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2))
    outcomes = side_by_side(functools.partial(launch, setting), list(checked_cases(setting)), processes)
    failed = [outcome for outcome in outcomes if outcome.problem]
    figures = {"processes": processes, "launched": len(outcomes) - len(failed), "failed": len(failed)}
    yield Row(
        name=unit, figures=figures, note="; ".join(f"{each.name}: {each.problem}" for each in failed[:3])
    )


def launch(setting: Setting, name: str) -> None:
    """Run one kernel as its check does."""
    bench = Bench.of(setting)
    checked_cases(setting)[name](bench, 0).run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def side_by_side(
    function: Callable[[str], None], names: Sequence[str], processes: int
) -> list[CompileOutcome]:
    """Call a function with each name, in up to `processes` processes at a time, which die with this one."""
    begin = functools.partial(die_with_parent, parent_pid=os.getpid())
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=begin) as pool:
        coming = {name: pool.submit(function, name) for name in names}
        return [CompileOutcome(name, _words(future.exception())) for name, future in coming.items()]


def _words(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
