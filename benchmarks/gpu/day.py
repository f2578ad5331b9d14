"""Run the parts of a day within its time, unit by unit. Each result is saved immediately, and no failure ends the day.

The same parts run in two passes: the first gives each part its share of the time, the second the remaining time. The
parent opens no device, so an error of a kernel affects only the worker that launched it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from benchmarks.gpu.ranks.worker import DeadWorkerError, FailedUnitError, LateWorkerError
from benchmarks.gpu.results import DONE, FAILED, TIMED_OUT, Ledger, Row, Setting, part_lines


class DayPart(NamedTuple):
    """Module of a part and its time limits."""

    name: str
    module: str
    title: str
    limit_s: float  # of one unit, also if it hangs
    share: float = 1.0  # of the time that is left at its start, in the first pass
    least_s: float = 5.0  # time needed to start a unit: with less it would be cut off and waste the time
    is_repeated: bool = False  # measured again by a resumed run, which may be on another machine
    is_fresh: bool = False  # runs every unit on a device in a new process, with the device's whole memory


PARTS = (
    DayPart(
        "ceilings", "benchmarks.gpu.kernels.ceilings", "Ceilings of this device, measured in this run", 120.0, is_repeated=True
    ),
    DayPart("compile", "benchmarks.gpu.precompiled", "Kernels compiled in parallel for the later parts", 120.0, 0.2),
    DayPart("correctness", "benchmarks.gpu.kernels.correctness", "Kernels against float32 in plain torch", 90.0, 0.3),
    DayPart(
        "parity", "benchmarks.gpu.ranks.parity", "Whole models: answers, of two layers", 300.0, 0.5, 40.0, is_fresh=True
    ),
    DayPart(
        "bits", "benchmarks.gpu.ranks.equal_bits", "Whole models: equal bits with --batch-invariant", 300.0, 0.5, 40.0, is_fresh=True
    ),
    DayPart("kernels", "benchmarks.gpu.kernels.times", "Kernel times, medians, inputs not in L2", 120.0, 0.4),
    DayPart("step", "benchmarks.gpu.ranks.decode_steps", "Whole models: decode steps", 300.0, 0.5, 60.0, is_fresh=True),
    DayPart(
        "prompts", "benchmarks.gpu.ranks.prompt_steps", "Whole models: steps with prompts", 300.0, 0.4, 60.0, is_fresh=True
    ),
    DayPart(
        "launches", "benchmarks.gpu.ranks.step_kernels", "Whole models: kernels of a step", 300.0, 0.3, 60.0, is_fresh=True
    ),
    DayPart(
        "throughput", "benchmarks.gpu.ranks.throughput", "End to end on one rank, output tokens/s", 300.0, 0.7, 60.0, is_fresh=True
    ),
    DayPart("service", "benchmarks.gpu.ranks.service", "The service over HTTP", 300.0, 0.5, 60.0, is_fresh=True),
    DayPart("ranks", "benchmarks.gpu.ranks.two_ranks", "Two ranks on this device: the same bits as on CPUs", 520.0, 1.0, 40.0),
    DayPart("tests", "benchmarks.gpu.marked_tests", "Tests of the suite that need a GPU", 300.0),
    DayPart("tiles", "benchmarks.gpu.kernels.tile_times", "Tile configurations against the kernels' choice", 180.0),
)  # fmt: skip


START_LIMIT_S = 120.0  # of a worker: torch, triton and a device's context
LEAST_S = 5.0  # of a part's share: no unit is started with less
_BROKEN = ("CUDA", "AcceleratorError", "out of memory")  # a context may be unusable after these


class RunningWorker(Protocol):
    """Worker interface that a day needs (see `ranks.worker.Worker`)."""

    def units(self, timeout_s: float) -> list[str]: ...
    def run(self, unit: str, known: Mapping[str, float], timeout_s: float, rows: list[Row]) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


StartWorker = Callable[[str, Setting], RunningWorker]


class Day:
    """One run of the parts."""

    def __init__(
        self,
        ledger: Ledger,
        setting: Setting,
        start_worker: StartWorker,
        *,
        minutes: float,
        wanted: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = print,
    ) -> None:
        """Start the day's clock. `wanted`: texts, of which a unit's name must contain one; empty for all units."""
        self._ledger, self._setting, self._start_worker = ledger, setting, start_worker
        self._clock, self._say, self._wanted = clock, say, wanted
        self._deadline_s = clock() + 60.0 * minutes
        self._tried: set[tuple[str, str]] = set()
        self.not_reached: dict[str, list[str]] = {}

    def run(self, parts: Iterable[DayPart]) -> None:
        """Run all units that are not done, in two passes: by share, then without shares."""
        parts = list(parts)
        for part in parts:
            self._run_part(part, self._clock() + part.share * self._left_s())
        for part in parts:
            if self.not_reached.get(part.name) and self._left_s() > LEAST_S:
                self._run_part(part, self._deadline_s)

    def _run_part(self, part: DayPart, end_s: float) -> None:
        known = self._ledger.names(part.name)
        left = [name for name in known if self._is_wanted(name) and not self._is_over(part, name)]
        if known and not left:
            self.not_reached[part.name] = []
            return  # no worker is needed to find that out
        if self._left_s() < part.least_s:
            self.not_reached.setdefault(part.name, left or ["all"])
            return
        self.not_reached.setdefault(part.name, [])
        todo: list[str] | None = None
        while todo is None or (todo and self._may_begin(part, end_s)):
            worker = self._start_worker(part.module, self._setting)
            try:
                names = self._names(worker, part)
                if not names:
                    break
                if todo is None:
                    todo = [name for name in names if self._is_wanted(name) and not self._is_over(part, name)]
                todo = self._run_units(worker, part, todo, end_s)
            finally:
                worker.close()
        if todo is not None:
            self.not_reached[part.name] = todo

    def _names(self, worker: RunningWorker, part: DayPart) -> list[str]:
        """Return the worker's units. A part that cannot list them is recorded as one failed unit."""
        begun_s = self._clock()
        try:
            names = worker.units(min(START_LIMIT_S, self._left_s()))
        except LateWorkerError as error:
            worker.kill()
            self._enter(part, "start", TIMED_OUT, [], begun_s, str(error))
        except RuntimeError as error:
            self._enter(part, "start", FAILED, [], begun_s, str(error))
        else:
            self._ledger.forget(part.name, "start")
            self._ledger.note_names(part.name, names)
            return names
        return []

    def _run_units(self, worker: RunningWorker, part: DayPart, names: list[str], end_s: float) -> list[str]:
        """Run units until all are done, time is over, or the worker is unusable. Return the units that were not started."""
        for at, name in enumerate(names):
            if not self._may_begin(part, end_s):
                return names[at:]
            begun_s, rows = self._clock(), list[Row]()
            try:
                worker.run(name, self._ledger.known(), min(part.limit_s, self._left_s()), rows)
            except LateWorkerError as error:
                worker.kill()
                self._enter(part, name, TIMED_OUT, rows, begun_s, str(error))
                return names[at + 1 :]
            except DeadWorkerError as error:
                self._enter(part, name, FAILED, rows, begun_s, str(error))
                return names[at + 1 :]
            except FailedUnitError as error:
                self._enter(part, name, FAILED, rows, begun_s, str(error))
                if any(word in str(error) for word in _BROKEN):
                    return names[at + 1 :]
            else:
                self._enter(part, name, DONE, rows, begun_s, "")
            if part.is_fresh and not self._setting.is_interpreted:
                return names[at + 1 :]
        return []

    def _enter(
        self, part: DayPart, unit: str, status: str, rows: list[Row], begun_s: float, note: str
    ) -> None:
        seconds = self._clock() - begun_s
        self._tried.add((part.name, unit))
        self._ledger.write(part.name, unit, status, rows, seconds=seconds, note=note)
        wrong = sum(not row.is_right for row in rows)
        words = note or (f"{wrong} of {len(rows)} rows wrong" if wrong else f"{len(rows)} rows")
        self._say(f"{part.name}/{unit}: {status} after {seconds:.1f} s, {words}")

    def _is_wanted(self, unit: str) -> bool:
        return not self._wanted or any(text in unit for text in self._wanted)

    def _is_over(self, part: DayPart, unit: str) -> bool:
        if (part.name, unit) in self._tried:
            return True
        return not part.is_repeated and self._ledger.is_done(part.name, unit)

    def _may_begin(self, part: DayPart, end_s: float) -> bool:
        """Whether there is time for one more unit, both in the part's share and in the day."""
        return end_s - self._clock() >= LEAST_S and self._left_s() >= part.least_s

    def _left_s(self) -> float:
        return self._deadline_s - self._clock()


def day_lines(
    units: Mapping[str, Mapping[str, Any]], parts: Iterable[DayPart], not_reached: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the lines of all parts."""
    for part in parts:
        entries = {
            key.partition("/")[2]: entry for key, entry in units.items() if key.partition("/")[0] == part.name
        }
        left = not_reached.get(part.name, ())
        if not entries and not left:
            continue
        yield ""
        yield f"{part.title} ({part.name})"
        yield from part_lines(entries)
        if left:
            yield f"  not reached: {', '.join(left)}"
