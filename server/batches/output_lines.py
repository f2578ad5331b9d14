"""A batch's answers: OpenAI's batch output format, appended line by line, safe to interrupt and to go on with.

A line is one write to the file's end, so whatever ends the process leaves whole lines, or at worst one torn line at
the end (a full disk, a lost machine), which the next run cuts off. The lines' ids say what is answered already.
Rejected: a side file with the state, which can contradict the answers.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from server.batches.bulk_client import Reply
from server.batches.input_lines import KEY_HEAD, BadLine, BatchFileError, BatchLine

_READ_BYTES = 1 << 16


class BatchOutput:
    """The output file. A context manager: leaving closes it."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Open or create the file, cut off a torn last line, and read what is answered.

        Args:
            mode: of a file that is created; the process' umask takes away from it.

        Raises:
            BatchFileError: the file cannot be written, is another batch's at this moment, or holds something else.
        """
        self._path = path
        self.answered: dict[str, bool] = {}  # key -> whether it is a good answer
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
        except OSError as error:
            raise BatchFileError(f"cannot write the answers to {path}: {error.strerror}") from error
        try:
            self._lock()
            self.was_torn = self._mend()
            self._read()
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def num_failed(self) -> int:
        """Lines that have no good answer."""
        return sum(not is_good for is_good in self.answered.values())

    @property
    def num_bytes(self) -> int:
        """How long the file is."""
        return os.fstat(self._fd).st_size

    def append(self, entry: dict[str, Any], line: bytes | None = None) -> bool:
        """Add a line; returns whether it is a good answer.

        Args:
            line: the entry as JSON, if it was encoded elsewhere: one with log-probabilities may be megabytes.

        Raises:
            BatchFileError: the disk is full, or the file gone.
        """
        line = (json.dumps(entry).encode() if line is None else line) + b"\n"
        try:
            while line:  # once, but on a full disk
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            raise BatchFileError(f"cannot write the answers to {self._path}: {error.strerror}") from error
        self.answered[entry["id"]] = is_good = is_good_entry(entry)
        return is_good

    def close(self) -> None:
        """Close the file, which unlocks it."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchFileError(f"{self._path} is being written by another run-batch") from error

    def _mend(self) -> bool:
        """Complete or cut off a last line without an end; returns whether there was one to cut off."""
        size = os.fstat(self._fd).st_size
        start = _last_line_start(self._fd, size)
        if start == size:
            return False
        if _entry(os.pread(self._fd, size - start, start)) is not None:  # only the line's end is missing
            try:
                os.write(self._fd, b"\n")
                return False
            except OSError:  # still a full disk: it has not been told as answered
                pass
        os.ftruncate(self._fd, start)
        return True

    def _read(self) -> None:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                entry = _entry(line)
                if entry is None:
                    raise BatchFileError(
                        f"{self._path}, line {number}, is no answer of run-batch; give another -o, or remove the file"
                    )
                self.answered[entry["id"]] = is_good_entry(entry)


def answer_entry(line: BatchLine, reply: Reply) -> dict[str, Any]:
    """Word what the service answered, good or bad."""
    return {
        "id": line.key,
        "custom_id": line.custom_id,
        "response": {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body},
        "error": None,
    }


def refusal_entry(line: BadLine) -> dict[str, Any]:
    """Word why a line was not sent."""
    return entry_without_answer(line, "invalid_request", line.reason)


def entry_without_answer(line: BatchLine | BadLine, code: str, message: str) -> dict[str, Any]:
    """Word why a line has no answer at all."""
    return {
        "id": line.key,
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }


def is_good_entry(entry: dict[str, Any]) -> bool:
    """Whether a line's request was answered."""
    response = entry.get("response")
    return not entry.get("error") and isinstance(response, dict) and response.get("status_code") == 200


def _entry(line: bytes) -> dict[str, Any] | None:
    """Read a line; None if it is not one of ours."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    key = entry.get("id") if isinstance(entry, dict) else None
    return entry if isinstance(key, str) and key.startswith(KEY_HEAD) else None


def _last_line_start(fd: int, size: int) -> int:
    """Return where the text after the last line end begins; `size` if there is none."""
    for start in _chunk_starts(size):
        at = os.pread(fd, min(_READ_BYTES, size - start), start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
    return 0


def _chunk_starts(size: int) -> Iterator[int]:
    """Yield the starts of the file's chunks, the last first."""
    return iter(range((size - 1) // _READ_BYTES * _READ_BYTES, -1, -_READ_BYTES)) if size else iter(())
