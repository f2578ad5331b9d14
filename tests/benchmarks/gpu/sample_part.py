"""A part for tests of the worker: some units succeed, some fail."""

import os
import sys
import time
from collections.abc import Iterator
from types import ModuleType

from benchmarks.gpu.results import Row, Setting


def units(setting: Setting) -> list[str]:
    return ["good", "bad", "gone", "slow"]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    if unit == "bad":
        raise ValueError("a kernel that takes no such thing\nand more")
    if unit == "unfit":
        errors = ModuleType("triton.errors")
        errors.TritonError = type("TritonError", (Exception,), {})  # type: ignore[attr-defined]
        sys.modules["triton.errors"] = errors  # as if triton were imported
        raise errors.TritonError("out of resource: shared memory")
    if unit == "childless":
        raise EOFError
    if unit == "gone":
        print("the last words", flush=True)  # not an answer: in a worker, standard output is standard error
        os._exit(3)
    yield Row(name=unit, figures={"ceiling": setting.ceiling("copy_tb_per_s"), "pid": os.getpid()})
    if unit == "slow":
        time.sleep(60)


def launched(name: str) -> None:
    """Act on a kernel as a compiling process does."""
    if name == "bad":
        raise ValueError("no such shape\nand more")
    if name == "gone":
        os._exit(3)
