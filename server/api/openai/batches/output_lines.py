"""Write a batch's answers in OpenAI's batch output format, line by line, so that a run can be interrupted and resumed.

A line is one write to the end of the file. So if the process ends, the file has complete lines and at most one torn line at the
end (a full disk, a lost machine), which the next run removes. The ids of the lines show what is answered already.
Rejected: a side file with the state, which can contradict the answers.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from server.api.openai.batches.bulk_client import Reply
from server.api.openai.batches.input_lines import KEY_HEAD, BadLine, BatchFileError, BatchLine
from server.http.json_writer import json_bytes

_READ_BYTES = 1 << 16


class BatchOutput:
    """The output file. A context manager that closes it."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Open or create the file, remove a torn last line, and read the answered lines.

        Args:
            mode: Mode of a created file, reduced by the umask.

        Raises:
            BatchFileError: The file cannot be written, is in use by another batch, or contains something else.
        """
        self._path = path
        self.answered: dict[str, bool] = {}  # key -> whether the answer is good
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
        """Number of lines without a good answer."""
        return sum(not is_good for is_good in self.answered.values())

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self._fd).st_size

    def append(self, entry: dict[str, Any], line: bytes | None = None) -> bool:
        """Add a line. Returns whether it is a good answer.

        Args:
            line: The entry as JSON, if it was encoded elsewhere: log-probabilities may take megabytes.

        Raises:
            BatchFileError: The disk is full, or the file was removed.
        """
        line = (json_bytes(entry) if line is None else line) + b"\n"
        try:
            while line:  # one write, except on a full disk
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            raise BatchFileError(f"cannot write the answers to {self._path}: {error.strerror}") from error
        self.answered[entry["id"]] = is_good = is_good_entry(entry)
        return is_good

    def close(self) -> None:
        """Close and unlock the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchFileError(f"{self._path} is in use by another run-batch") from error

    def _mend(self) -> bool:
        """Complete or remove a last line without a line end. Returns whether a line was removed."""
        size = os.fstat(self._fd).st_size
        start = _last_line_start(self._fd, size)
        if start == size:
            return False
        if _entry(os.pread(self._fd, size - start, start)) is not None:  # only the line's end is missing
            try:
                os.write(self._fd, b"\n")
                return False
            except OSError:  # the disk is still full: remove the line, which was not reported as answered
                pass
        os.ftruncate(self._fd, start)
        return True

    def _read(self) -> None:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                entry = _entry(line)
                if entry is None:
                    raise BatchFileError(
                        f"{self._path}, line {number}, is not an answer of run-batch; give another -o, or remove the file"
                    )
                self.answered[entry["id"]] = is_good_entry(entry)


def answer_entry(line: BatchLine, reply: Reply) -> dict[str, Any]:
    """Return the output line of the service's answer, good or bad."""
    return {
        "id": line.key,
        "custom_id": line.custom_id,
        "response": {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body},
        "error": None,
    }


def refusal_entry(line: BadLine) -> dict[str, Any]:
    """Return the output line of a line that was not sent."""
    return entry_without_answer(line, "invalid_request", line.reason)


def entry_without_answer(line: BatchLine | BadLine, code: str, message: str) -> dict[str, Any]:
    """Return the output line of a line without an answer."""
    return {
        "id": line.key,
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }


def is_good_entry(entry: dict[str, Any]) -> bool:
    """Return whether a line's request succeeded."""
    response = entry.get("response")
    return not entry.get("error") and isinstance(response, dict) and response.get("status_code") == 200


def _entry(line: bytes) -> dict[str, Any] | None:
    """Parse an output line. Returns None if run-batch did not write it."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    key = entry.get("id") if isinstance(entry, dict) else None
    return entry if isinstance(key, str) and key.startswith(KEY_HEAD) else None


def _last_line_start(fd: int, size: int) -> int:
    """Return the position after the last line end, which is `size` if the file ends with a line end."""
    for start in _chunk_starts(size):
        at = os.pread(fd, min(_READ_BYTES, size - start), start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
    return 0


def _chunk_starts(size: int) -> Iterator[int]:
    """Yield the start positions of the file's chunks, last first."""
    return iter(range((size - 1) // _READ_BYTES * _READ_BYTES, -1, -_READ_BYTES)) if size else iter(())
