"""Every kernel compared with plain torch in float32, at the shapes of real models, in bfloat16 (see `bench.check`)."""

from collections.abc import Iterator

from benchmarks.gpu.bench import Bench, check
from benchmarks.gpu.kernels.cases import checked_cases
from benchmarks.gpu.results import Row, Setting


def units(setting: Setting) -> list[str]:
    """Return one unit per kernel and shape."""
    return list(checked_cases(setting))


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Check one unit."""
    yield check(Bench.of(setting), unit, checked_cases(setting)[unit])
