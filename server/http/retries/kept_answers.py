"""Answers for retries with an `Idempotency-Key`: a file each, in a folder that outlives the front.

The folder belongs to the supervisor (or serve), so that a front that replaces a killed one finds the answers, and the
request of each key. The request itself is not kept, because a retry sends it again. A request without a key
costs nothing here. One with a key costs six system calls: its file is written at acceptance and again with the answer.

The first line of a file is JSON that identifies the request. With an answer, a second line with its head and the
body follow. If a front was killed while writing, the file is shorter than its head states, and counts as not answered. So does
a file that cannot be read. If there are too many keys or bytes, the owner that holds most of them loses its oldest.

Rejected: one file for all answers, which must be rewritten while streams wait; keeping the tokens of unfinished answers, which
costs a write per step and is not needed, because a request that runs again draws the same tokens (`exchanges.draw_seed`).
"""

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from server.http.shares import Shares
from server.machine.steady_clock import SteadyClock

MAX_AGE_S = 3600.0  # since acceptance
MAX_BYTES = 64 << 20  # of all bodies together
MAX_ANSWER_BYTES = 16 << 20
MAX_KEYS = 4096
_LOG = logging.getLogger("wideep.front")


class WholeAnswer(NamedTuple):
    """The answer as it was sent to the client."""

    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(slots=True)
class _Entry:
    owner: str
    fingerprint: str
    accepted_s: float  # since 1970
    num_bytes: int | None = None  # of the answer, or None before it is finished


class KeptAnswers:
    """The recently used keys and their answers, oldest first."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int = MAX_BYTES,
        max_keys: int = MAX_KEYS,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Load the answers in the folder."""
        self._directory, self._clock = directory, clock or SteadyClock()
        self._entries: dict[str, _Entry] = {}
        self._bytes, self._keys = Shares(max_bytes), Shares(max_keys)
        found = ((path.name, _read_entry(path)) for path in directory.iterdir())
        for name, entry in sorted(
            ((name, entry) for name, entry in found if entry is not None), key=lambda each: each[1].accepted_s
        ):
            entry.accepted_s = min(entry.accepted_s, self._clock())  # the calendar may have been set back
            self._remember(name, entry)
            self._bytes.take(entry.owner, entry.num_bytes or 0)

    def fingerprint_of(self, name: str) -> str | None:
        """Return the fingerprint of a key's request, or None for an unknown key."""
        self._expire()
        entry = self._entries.get(name)
        return None if entry is None else entry.fingerprint

    def accept(self, name: str, fingerprint: str, owner: str = "") -> None:
        """Record a key's request and owner.

        Raises:
            OSError: The file cannot be written; nothing is recorded.
        """
        self.forget(name)
        entry = _Entry(owner, fingerprint, self._clock())
        head = json.dumps({"owner": owner, "fingerprint": fingerprint, "accepted_s": entry.accepted_s})
        try:
            _append(self._directory / name, head.encode() + b"\n", os.O_TRUNC)
        except OSError:
            self._unlink(name)
            raise
        self._remember(name, entry)
        self._expire()

    def finish(self, name: str, answer: WholeAnswer) -> None:
        """Keep an answer. If it is too long, forget it and its key.

        Raises:
            OSError: The answer cannot be written; the key is forgotten.
        """
        entry = self._entries.get(name)
        if entry is None:
            return
        if len(answer.body) > min(MAX_ANSWER_BYTES, self._bytes.total):
            self.forget(name)
            return
        headers = [[field.decode("latin-1") for field in header] for header in answer.headers]
        head = json.dumps({"headers": headers, "num_bytes": len(answer.body)})
        try:
            _append(self._directory / name, head.encode() + b"\n" + answer.body)
        except OSError:
            self.forget(name)
            raise
        entry.num_bytes = len(answer.body)
        self._bytes.take(entry.owner, entry.num_bytes)
        self._expire()

    def read(self, name: str) -> WholeAnswer | None:
        """Return a kept answer. Returns None if there is no answer yet, or it cannot be read and is forgotten."""
        entry = self._entries.get(name)
        if entry is None or entry.num_bytes is None:
            return None
        try:
            return _read_answer(self._directory / name, entry.num_bytes)
        except FileNotFoundError:  # a cleanup removed it
            self.forget(name)
        except (OSError, ValueError, LookupError, TypeError) as error:
            _LOG.error("cannot read a kept answer: %s: %s", type(error).__name__, error)
            self.forget(name)
        return None

    def forget(self, name: str) -> None:
        """Remove a key and its answer."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._keys.give_back(entry.owner, 1)
            self._bytes.give_back(entry.owner, entry.num_bytes or 0)
            self._unlink(name)

    def _remember(self, name: str, entry: _Entry) -> None:
        self._entries[name] = entry
        self._keys.take(entry.owner, 1)

    def _unlink(self, name: str) -> None:
        """Remove a file if possible. The key's next use overwrites a file that remains."""
        with contextlib.suppress(OSError):
            (self._directory / name).unlink(missing_ok=True)

    def _expire(self) -> None:
        """Forget entries that are too old. Above the limits, forget the oldest entry of the largest owner."""
        oldest_s = self._clock() - MAX_AGE_S
        while self._entries:
            name, entry = next(iter(self._entries.items()))
            if entry.accepted_s >= oldest_s:
                break
            self.forget(name)
        for shares in (self._keys, self._bytes):
            while shares.is_over:
                most = shares.largest
                self.forget(next(name for name, each in self._entries.items() if each.owner == most))


def _append(path: Path, content: bytes, flags: int = 0) -> None:
    """Append to a file with three system calls; Python's own files need six.

    Raises:
        OSError: Not all of it could be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    try:
        if os.write(fd, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def _read_answer(path: Path, num_bytes: int) -> WholeAnswer:
    """Read an answer's head and body.

    Raises:
        OSError, ValueError, LookupError, TypeError: The file is not as written by `finish`.
    """
    _, head, body = path.read_bytes().split(b"\n", 2)
    headers = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in json.loads(head)["headers"]]
    if len(body) != num_bytes:
        raise ValueError(f"it has {len(body)} of {num_bytes} bytes")
    return WholeAnswer(headers, body)


def _read_entry(path: Path) -> _Entry | None:
    """Read a file's entry. If its first line is invalid, remove the file and return None."""
    with path.open("rb") as file:
        begin = file.readline()
        first, second = _line(begin), _line(file.readline())
        num_bytes = path.stat().st_size
        num_left = num_bytes - file.tell()
    try:
        if not begin.endswith(b"\n"):
            raise ValueError("its first line is cut off")
        entry = _Entry(str(first.get("owner", "")), str(first["fingerprint"]), float(first["accepted_s"]))
    except (LookupError, ValueError, TypeError):
        path.unlink()
        return None
    if second and second.get("num_bytes") == num_left:
        entry.num_bytes = num_left
    elif num_bytes > len(begin):  # cut off; the next answer is written after the first line
        os.truncate(path, len(begin))
    return entry


def _line(content: bytes) -> dict[str, Any]:
    """Return a line's JSON object, or an empty one if it is not an object."""
    with contextlib.suppress(ValueError):
        value = json.loads(content)
        return value if isinstance(value, dict) else {}
    return {}
