"""Answers that a client may ask for again by an `Idempotency-Key`: a file each, in a folder that outlives the front.

The folder is the supervisor's (or serve's), so that a front that takes the place of a killed one finds what was answered, and
which keys were used for which request. The request itself is not kept: who asks again sends it again. A request without a key
costs nothing here; one with a key costs six system calls: a file is written when it is accepted and again when it is answered.

A file is a line of JSON that says which request it is for and, once there is an answer, a second one with its head, and its
body. What a killed front was writing is shorter than its head says, and counts as not answered. Rejected: one file for all,
which has to be rewritten while streams wait, and keeping the tokens of unfinished answers, which costs a write per step and is
not needed: a request that is run again draws the same tokens (`exchanges.draw_seed`).
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

MAX_AGE_S = 3600.0  # since it was accepted
MAX_BYTES = 64 << 20  # of bodies, together
MAX_ANSWER_BYTES = 16 << 20
MAX_KEYS = 4096


class WholeAnswer(NamedTuple):
    """What was sent to the client."""

    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(slots=True)
class _Entry:
    fingerprint: str
    accepted_s: float  # time.time()
    num_bytes: int | None = None  # of the answer; None: there is none yet


class KeptAnswers:
    """What is known of the keys that were used lately, oldest first."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int = MAX_BYTES,
        max_keys: int = MAX_KEYS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take over what is in the folder."""
        self._directory, self._clock = directory, clock
        self._max_bytes, self._max_keys = max_bytes, max_keys
        self._entries: dict[str, _Entry] = {}
        self._num_bytes = 0
        found = ((path.name, _read_entry(path)) for path in directory.iterdir())
        for name, entry in sorted(
            ((name, entry) for name, entry in found if entry is not None),
            key=lambda each: each[1].accepted_s,
        ):
            self._entries[name] = entry
            self._num_bytes += entry.num_bytes or 0

    def fingerprint_of(self, name: str) -> str | None:
        """Return which request a key was used for; None: for none that is remembered."""
        self._expire()
        entry = self._entries.get(name)
        return None if entry is None else entry.fingerprint

    def accept(self, name: str, fingerprint: str) -> None:
        """Remember which request a key is used for."""
        self.forget(name)
        entry = self._entries[name] = _Entry(fingerprint, self._clock())
        head = json.dumps({"fingerprint": fingerprint, "accepted_s": entry.accepted_s})
        _append(self._directory / name, head.encode() + b"\n")
        self._expire()

    def finish(self, name: str, answer: WholeAnswer) -> None:
        """Keep an answer; one that is too long is forgotten with its key."""
        entry = self._entries.get(name)
        if entry is None:
            return
        if len(answer.body) > min(MAX_ANSWER_BYTES, self._max_bytes):
            self.forget(name)
            return
        headers = [[field.decode("latin-1") for field in header] for header in answer.headers]
        head = json.dumps({"headers": headers, "num_bytes": len(answer.body)})
        _append(self._directory / name, head.encode() + b"\n" + answer.body)
        entry.num_bytes = len(answer.body)
        self._num_bytes += entry.num_bytes
        self._expire()

    def read(self, name: str) -> WholeAnswer | None:
        """Return a kept answer; None: there is none yet."""
        entry = self._entries.get(name)
        if entry is None or entry.num_bytes is None:
            return None
        try:
            _, head, body = (self._directory / name).read_bytes().split(b"\n", 2)
        except FileNotFoundError:  # somebody tidied up
            self.forget(name)
            return None
        headers = [
            (key.encode("latin-1"), value.encode("latin-1")) for key, value in json.loads(head)["headers"]
        ]
        return WholeAnswer(headers, body)

    def forget(self, name: str) -> None:
        """Remember nothing of a key."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes or 0
            (self._directory / name).unlink(missing_ok=True)

    def _expire(self) -> None:
        """Forget what is too old, and the oldest where there is too much."""
        oldest_s = self._clock() - MAX_AGE_S
        while self._entries:
            name, entry = next(iter(self._entries.items()))
            is_too_much = self._num_bytes > self._max_bytes or len(self._entries) > self._max_keys
            if entry.accepted_s >= oldest_s and not is_too_much:
                return
            self.forget(name)


def _append(path: Path, content: bytes) -> None:
    """Write at a file's end with three system calls; Python's own files take six.

    Raises:
        OSError: not all of it could be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def _read_entry(path: Path) -> _Entry | None:
    """Read what a file is for; None, and it goes, where its writer was killed before it said so."""
    with path.open("rb") as file:
        first, second = _line(file.readline()), _line(file.readline())
        num_left = path.stat().st_size - file.tell()
    if first is None:
        path.unlink()
        return None
    entry = _Entry(first["fingerprint"], first["accepted_s"])
    if second is not None and second["num_bytes"] == num_left:
        entry.num_bytes = num_left
    elif second is not None:  # cut off: the next answer is written behind the first line
        path.write_text(json.dumps(first) + "\n")
    return entry


def _line(content: bytes) -> dict[str, Any] | None:
    value: dict[str, Any] | None = None
    with contextlib.suppress(ValueError):
        value = json.loads(content)
    return value
