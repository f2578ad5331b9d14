"""Compiled tiles cached by several processes, each for its own needs, work together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILDREN = ["linear", "grouped linear", "grouped linear"]


@pytest.mark.slow
def test_kernels_that_different_processes_cached_call_their_own_tiles(tmp_path: Path) -> None:
    """The second process compiles one kernel and loads the other. The third loads both."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for kernels in CHILDREN:
        child = subprocess.run(
            [sys.executable, "-m", "tests.support.gpu.kernel_child", *kernels.split()],
            env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if child.returncode:
            pytest.fail(f"{kernels}: {child.stderr[-1500:]}")
