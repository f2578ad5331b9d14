"""Choose Triton's interpreter in a process. This must happen before the process imports triton."""

import os
import sys
from importlib.util import find_spec

import pytest

from benchmarks.gpu.interpreter import patch_once

# Searched, not imported: ranks import tests before they choose the interpreter. The fixture `interpreter` skips by itself.
NO_TRITON = "needs triton: pip install -r requirements-dev.txt"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason=NO_TRITON)


def interpret() -> None:
    """Interpret kernels imported from now on, on CPU tensors."""
    is_interpreting = "tests.support.preload_engines" in sys.modules
    assert is_interpreting or "triton" not in sys.modules, (
        "triton is imported, so its kernels would be compiled"
    )
    os.environ["TRITON_INTERPRET"] = "1"
    patch_once()
