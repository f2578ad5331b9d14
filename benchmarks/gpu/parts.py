"""The parts of a day, ordered by worth. A part is a module with `units(setting)` and `run(setting, unit)`.

Modules are named, not imported: they import torch and triton, which only a worker does. Shares keep one part from eating
a short day; what it did not reach comes in a second pass, with whatever time is left.
"""

from typing import NamedTuple


class Part(NamedTuple):
    """Where a part's code is and what time it may take."""

    name: str
    module: str
    title: str
    limit_s: float  # of one unit; a hang costs no more
    share: float = 1.0  # of the time that is left when it begins, in the first pass
    least_s: float = 5.0  # no unit is begun with less: it would be cut, and its time be others'
    is_repeated: bool = False  # measured again by a resumed run: the machine may be another one
    is_fresh: bool = False  # every unit in a process of its own, with the whole memory of the device


PARTS = (
    Part(
        "ceilings", "benchmarks.gpu.ceilings", "Ceilings of this device, measured in this run", 120.0, is_repeated=True
    ),
    Part("compile", "benchmarks.gpu.precompiled", "Kernels compiled side by side, for what follows", 120.0, 0.2),
    Part("correctness", "benchmarks.gpu.correctness", "Kernels against float32 in plain torch", 90.0, 0.3),
    Part(
        "parity", "benchmarks.gpu.parity", "Whole models: answers, of two layers", 300.0, 0.5, 40.0, is_fresh=True
    ),
    Part("kernels", "benchmarks.gpu.kernel_times", "Kernel times, medians, inputs not in L2", 120.0, 0.4),
    Part("step", "benchmarks.gpu.decode_steps", "Whole models: decode steps", 300.0, 0.5, 60.0, is_fresh=True),
    Part(
        "throughput", "benchmarks.gpu.throughput", "End to end on one rank, output tokens/s", 300.0, 0.7, 60.0, is_fresh=True
    ),
    Part("ranks", "benchmarks.gpu.two_ranks", "Two ranks on this device: the same bits as on CPUs", 520.0, 1.0, 40.0),
    Part("tests", "benchmarks.gpu.marked_tests", "Tests of the suite that need a GPU", 300.0),
    Part("tiles", "benchmarks.gpu.tile_times", "Tile configurations against the kernels' choice", 180.0),
)  # fmt: skip
