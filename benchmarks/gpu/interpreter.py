"""Triton's interpreter without work that it repeats at every call.

Before each launch, and before each call of a function within a kernel, Triton's interpreter replaces the names of
`triton.language` that its compiler implements. It looks through all of them, which takes longer than most operations of a
kernel. After a launch, it restores the names for a compiler. A process that interprets kernels compiles none.
"""

import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


class _Kept:
    """What the interpreter has replaced, which stays replaced."""

    def restore(self) -> None:
        """Do nothing."""


def patch_once() -> None:
    """If this process interprets kernels (TRITON_INTERPRET=1), replace the names once per function instead of at every call.

    Other versions of Triton, without the function that replaces names, stay as they are.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch: Callable[[object], object] | None = getattr(interpreter, "_patch_lang", None)
    if patch is None or patch.__module__ == __name__:
        return
    done: set[object] = set()
    kept = _Kept()

    def patch_first(function: object) -> _Kept:
        if function not in done:
            patch(function)
            done.add(function)
        return kept

    interpreter._patch_lang = patch_first
