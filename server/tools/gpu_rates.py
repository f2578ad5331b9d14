"""Measure a GPU's memory and matrix rates, for `wideep size --device this` and `wideep doctor`.

A child process measures, because this process does not import torch. Copies count bytes read and bytes written, and are not
captured in a CUDA graph: captured ones reached two thirds of the bandwidth on an H200. Data is random: zeros run faster.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from server.serve.preflight.model import PreflightError

_CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from server.tools import gpu_rates; gpu_rates.main()"
_TIMEOUT_S = 120.0  # torch's first import on a cold disk
_COPIED_BYTES, _ROWS = 1 << 30, 8192
_RUNS, _WARM_UPS = 10, 3


class GpuRates(NamedTuple):
    """Measured rates of the first GPU."""

    copy_bytes_per_s: float  # bytes read plus bytes written
    bfloat16_per_s: float  # operations of a matrix product; a multiply-add is two


def measure_gpu(*, child: str = _CHILD) -> GpuRates:
    """Measure the first GPU in a child process.

    Raises:
        PreflightError: The child failed; the message has its last line.
    """
    try:
        found = subprocess.run(
            [sys.executable, "-P", "-c", child, str(Path(__file__).parents[2])],
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=True,
        )  # fmt: skip
        return GpuRates(**json.loads(found.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        raise PreflightError(
            f"the GPU's rates could not be measured: {reason.splitlines()[-1] if reason else type(error).__name__}"
        ) from error


def rates_on(torch: Any, device: str, *, copied_bytes: int = _COPIED_BYTES, rows: int = _ROWS) -> GpuRates:
    """Measure a device. `torch` is the module."""
    source = torch.randn(copied_bytes // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    left, right = (torch.randn(rows, rows, device=device, dtype=torch.bfloat16) for _ in range(2))

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    copy_s = _median_s(lambda: target.copy_(source), wait)
    product_s = _median_s(lambda: torch.matmul(left, right), wait)
    return GpuRates(2 * copied_bytes / copy_s, 2 * rows**3 / product_s)


def _median_s(call: Callable[[], object], wait: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_WARM_UPS + _RUNS):
        wait()
        begun_s = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - begun_s)
    return statistics.median(seconds[_WARM_UPS:])


def main() -> None:
    """Print the first GPU's rates as JSON."""
    import torch  # noqa: PLC0415 - needed in the child process only

    print(json.dumps(rates_on(torch, "cuda")._asdict()))
