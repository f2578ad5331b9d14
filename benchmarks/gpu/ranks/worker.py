"""The process that runs a part: `python -m benchmarks.gpu.ranks.worker MODULE`, driven over standard input.

The first line it reads is the setting; it answers with the part's units. Every further line names a unit and the figures known
so far. The worker answers with the unit's rows as they are produced, then with its end or the reason of its failure. An error
that ends the process (a kernel that breaks the device's context, or an unexpected one) costs the parent that unit and the start
of another worker, not the day.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from subprocess import SubprocessError
from typing import IO, Any, Self

from benchmarks.gpu.results import Row, Setting
from server.machine.parent_death import die_with_parent

STOP_TIMEOUT_S = 10.0
_LAST_BYTES = 4000


class DeadWorkerError(RuntimeError):
    """The process ended; the message has its last output."""


class FailedUnitError(RuntimeError):
    """A unit raised an error; the message quotes it."""


class LateWorkerError(RuntimeError):
    """There was no answer within the limit; the process is not usable any more."""


class Worker:
    """A running worker, as a context that stops it."""

    def __init__(self, module: str, setting: Setting, log: IO[bytes]) -> None:
        """Start the process without waiting for it."""
        self._log, self._log_start = log, log.seek(0, os.SEEK_END)
        self._answers: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.ranks.worker", module],
            cwd=Path(__file__).parents[3],
            env=_environment(setting),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=functools.partial(die_with_parent, parent_pid=os.getpid()),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send(setting.as_json())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def units(self, timeout_s: float) -> list[str]:
        """Return the part's units.

        Raises:
            DeadWorkerError, LateWorkerError: The process ended, or did not answer in time.
            RuntimeError: The part cannot run here; the message gives the reason.
        """
        answer = self._receive(timeout_s)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return list(answer["units"])

    def run(self, unit: str, known: Mapping[str, float], timeout_s: float, rows: list[Row]) -> None:
        """Run a unit. Its rows are added to `rows` as they arrive, even if it fails later.

        Raises:
            DeadWorkerError, LateWorkerError: The process ended, or did not answer in time.
            FailedUnitError: The unit failed; the worker is still usable.
        """
        end_s = time.monotonic() + timeout_s
        self._send({"unit": unit, "known": dict(known)})
        while True:
            answer = self._receive(end_s - time.monotonic())
            if "row" in answer:
                rows.append(Row(**answer["row"]))
            elif "failed" in answer:
                raise FailedUnitError(answer["failed"])
            else:
                return

    def close(self) -> None:
        """Close the input, wait for the process to end, and kill it if it does not."""
        assert self.process.stdin is not None, "started with a pipe"
        with contextlib.suppress(BrokenPipeError):  # it may have ended before it read the last line
            self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()

    def _send(self, value: Any) -> None:
        assert self.process.stdin is not None, "started with a pipe"
        with contextlib.suppress(BrokenPipeError):  # it has ended: receiving reports the reason
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise LateWorkerError("no answer within the time limit") from None
        if not line:
            raise DeadWorkerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read(self) -> None:
        assert self.process.stdout is not None, "started with a pipe"
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _last_words(self) -> str:
        """Return how the process ended, and the last line of its output."""
        code = self.process.wait()
        self._log.flush()
        with open(self._log.name, "rb") as log:
            log.seek(max(self._log_start, os.path.getsize(self._log.name) - _LAST_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        end = f"killed by signal {-code}" if code < 0 else f"ended with {code}"
        return f"the process {end}: {lines[-1].strip()}" if lines else f"the process {end} and wrote nothing"


def _environment(setting: Setting) -> dict[str, str]:
    """Return the worker's environment. Triton reads the choice of the interpreter when it is imported."""
    chosen = {"TRITON_INTERPRET": "1"} if setting.is_interpreted else {}
    return {**os.environ, **chosen, "PYTHONUNBUFFERED": "1"}


# Errors of missing packages, libraries that reject a call, wrong launches and children that end; `_failures` adds Triton's.
# Any other error ends the process.
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
    """Answer with the part's units, then run each unit that a line names, until the input ends."""
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
    """Add Triton's errors for kernels that do not compile or fit the device, which are not RuntimeErrors."""
    errors = sys.modules.get("triton.errors")
    return FAILURES if errors is None else (*FAILURES, errors.TritonError)


def _words(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def main() -> None:
    """Serve. Standard output carries only answers; everything else goes to standard error."""
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
