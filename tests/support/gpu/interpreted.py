"""Chooses Triton's interpreter in a process, which must happen before the process imports triton."""

import os
import sys
from importlib.util import find_spec

import pytest

# Looked for, not imported: ranks import tests before they choose to interpret. The fixture `interpreter` skips by itself.
NO_TRITON = "needs triton: pip install -r requirements-dev.txt"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason=NO_TRITON)


def interpret() -> None:
    """Have kernels that are imported from now on interpreted on CPU tensors."""
    assert "triton" not in sys.modules, "triton is imported already: its kernels would be compiled"
    os.environ["TRITON_INTERPRET"] = "1"
