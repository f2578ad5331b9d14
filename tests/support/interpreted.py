"""Chooses Triton's interpreter in a process, which must happen before the process imports triton."""

import os
import sys


def interpret() -> None:
    """Have kernels that are imported from now on interpreted on CPU tensors."""
    assert "triton" not in sys.modules, "triton is imported already: its kernels would be compiled"
    os.environ["TRITON_INTERPRET"] = "1"
