"""A worker seen from the day: started, asked with a time limit, ended. It touches no device itself."""

import contextlib
import functools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.gpu.rows import Row, Setting
from server.parent_death import die_with_parent

STOP_TIMEOUT_S = 10.0
_LAST_BYTES = 4000


class DeadWorkerError(RuntimeError):
    """The process ended; the message has its last words."""


class FailedUnitError(RuntimeError):
    """A unit raised an error; the message is that."""


class LateWorkerError(RuntimeError):
    """No answer within the limit; the process is of no more use."""


class Worker:
    """A running worker; a context that ends it."""

    def __init__(self, module: str, setting: Setting, log: IO[bytes]) -> None:
        """Start; nothing is waited for."""
        self._log, self._log_start = log, log.seek(0, os.SEEK_END)
        self._answers: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.worker", module],
            cwd=Path(__file__).parents[2],
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
            DeadWorkerError, LateWorkerError.
            RuntimeError: the part cannot run here, and why.
        """
        answer = self._receive(timeout_s)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return list(answer["units"])

    def run(self, unit: str, known: Mapping[str, float], timeout_s: float, rows: list[Row]) -> None:
        """Run a unit; its rows are added to `rows` as they come, also where it fails later.

        Raises:
            DeadWorkerError, LateWorkerError.
            FailedUnitError: it failed, and the worker can go on.
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
        """End the process: kindly, then not."""
        assert self.process.stdin is not None, "started with a pipe"
        with contextlib.suppress(BrokenPipeError):  # it may have ended before it read the last line
            self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End the process now."""
        self.process.kill()
        self.process.wait()

    def _send(self, value: Any) -> None:
        assert self.process.stdin is not None, "started with a pipe"
        with contextlib.suppress(BrokenPipeError):  # it has ended: receiving finds out, and says why
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise LateWorkerError("no answer within its time") from None
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
        """Return how the process ended, and the last line that it wrote."""
        code = self.process.wait()
        self._log.flush()
        with open(self._log.name, "rb") as log:
            log.seek(max(self._log_start, os.path.getsize(self._log.name) - _LAST_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        end = f"killed by signal {-code}" if code < 0 else f"ended with {code}"
        return f"the process {end}: {lines[-1].strip()}" if lines else f"the process {end} without a word"


def _environment(setting: Setting) -> dict[str, str]:
    """The interpreter is chosen before triton is imported."""
    chosen = {"TRITON_INTERPRET": "1"} if setting.is_interpreted else {}
    return {**os.environ, **chosen, "PYTHONUNBUFFERED": "1"}
