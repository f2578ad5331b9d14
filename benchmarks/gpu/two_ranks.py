"""Two ranks on one device: correctness only, as they share it. What they exchange has the bits that CPU ranks get.

Each unit starts two processes with a group over gloo. In the interpreter shared memory stands for the device's symmetric
memory, and nothing can be captured. Two ranks of NCCL need two devices, so its bits are not checked here.
"""

from collections.abc import Iterator

from benchmarks.gpu import pair_of_ranks
from benchmarks.gpu.rank_checks import CHECKS
from benchmarks.gpu.results import Row, Setting

_TIMEOUT_S, _INTERPRETED_TIMEOUT_S = 180.0, 500.0  # kernels and the CPU's are compiled in it, by both


def units(setting: Setting) -> list[str]:
    """What the ranks do."""
    return list(CHECKS)


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Let two ranks do it; their rows are one where they agree."""
    timeout_s = _INTERPRETED_TIMEOUT_S if setting.is_interpreted else _TIMEOUT_S
    first, second = pair_of_ranks.run(unit, setting, timeout_s=timeout_s)
    for row, other in zip(first, second, strict=True):
        yield Row(
            name=row.name,
            figures=row.figures,
            is_right=row.is_right and other.is_right,
            note=row.note or other.note,
        )
