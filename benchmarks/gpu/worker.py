"""The process in which a part runs: `python -m benchmarks.gpu.worker MODULE`, driven over standard input.

The first line that it reads is the setting, and it answers with the part's units; every further line names a unit and
what is known by now, and is answered with the unit's rows as they come and with its end, or why it failed. What ends the
process (a kernel that breaks the device's context, an error that nobody foresaw) costs the parent that unit and the start
of another worker, not the day.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from subprocess import SubprocessError
from typing import Any

from benchmarks.gpu.rows import Row, Setting

# What a missing package, a library that refuses, a wrong launch or a child that ends raises; and Triton's own errors,
# see `_failures`. Anything else ends the process.
FAILURES: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SubprocessError,
    TypeError,
    ValueError,
)


def answer_lines(module: Any, lines: Iterator[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Say which units there are, and run those that are named, until there are no more lines."""
    setting = Setting(**json.loads(next(lines)))
    try:
        answer({"units": list(module.units(setting))})
    except _failures() as error:
        answer({"failed": _words(error)})
        return
    for line in lines:
        wanted = json.loads(line)
        try:
            rows: Iterable[Row] = module.run(replace(setting, known=wanted["known"]), wanted["unit"])
            for row in rows:
                answer({"row": row.as_json()})
        except _failures() as error:
            traceback.print_exc()
            answer({"failed": _words(error)})
        else:
            answer({"end": wanted["unit"]})
        gc.collect()


def _failures() -> tuple[type[Exception], ...]:
    """Add what Triton raises of a kernel that does not compile or fit the device, which is no RuntimeError."""
    errors = sys.modules.get("triton.errors")
    return FAILURES if errors is None else (*FAILURES, errors.TritonError)


def _words(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def main() -> None:
    """Serve; standard output carries answers only, all else goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        module = importlib.import_module(sys.argv[1])
    except ImportError as error:
        answer({"failed": _words(error)})
        return
    answer_lines(module, iter(sys.stdin.readline, ""), answer)


if __name__ == "__main__":
    main()
