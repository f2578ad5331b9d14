"""A part for tests of the worker: some units end well, some do not."""

import os
import time
from collections.abc import Iterator

from benchmarks.gpu.rows import Row, Setting


def units(setting: Setting) -> list[str]:
    return ["good", "bad", "gone", "slow"]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    if unit == "bad":
        raise ValueError("a kernel that takes no such thing\nand more")
    if unit == "gone":
        print("the last words", flush=True)  # not an answer: standard output is standard error in a worker
        os._exit(3)
    yield Row(name=unit, figures={"ceiling": setting.ceiling("copy_tb_per_s"), "pid": os.getpid()})
    if unit == "slow":
        time.sleep(60)
