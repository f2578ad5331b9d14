"""Store uploaded files and batch answers in one folder: OpenAI's file objects, within limits, each visible only to its owner.

A file consists of its content, `ID.jsonl`, and its record, `ID.json`. Names in the folder are generated ids; the client's file
name is only stored. An upload's content is written before its record; a batch's answers are moved to `ID.jsonl` after it. If the
front dies between the two, the next front removes the incomplete upload, or the batch completes its file (`runs`).

An id begins with its creation time, so ids sort by age, and a list can continue after a file that has been deleted. A lock
ensures that only one service uses the folder. Rejected: a database file. A few thousand small files do not need one, and
`ls` and `rm` work on files.

With several API keys, an owner may use at most as much as stays free for others (`shares`). A running batch's answers count while they
grow. On a full disk, a batch's answers can be read in place until their record can be written.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from server.front.errors import ApiError, bad_request
from server.http.shares import Shares
from server.machine.steady_clock import SteadyClock, taken_over
from server.options.flag import OptionsError

INPUT, OUTPUT = "batch", "batch_output"  # purposes
UPLOADS = (INPUT, "vision", "user_data")  # of uploads: lines of a batch, or an image
MAX_FILES = 10_000  # OpenAI's longest list
MAX_NAME_CHARS = 255
LIFETIME_S = 30 * 86_400  # OpenAI's default for batch files, and the maximum here
LEAST_LIFETIME_S = 3600
_CONTENT, _ABOUT = ".jsonl", ".json"
_OURS = re.compile(r"file-[0-9a-f]{32}\.(jsonl|json|draft)")  # names from `new_id` and `write_json`
_LOCK = "lock"
_OWN_NAMES = (_LOCK, "batches")  # further names of a service
_OF_SEVERAL = ", and each API key may use at most as much as stays free for the others"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOG = logging.getLogger("wideep.front")


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=_HasId)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """The record of a file."""

    id: str
    owner: str  # digest of the API key that uploaded it; empty without keys
    filename: str  # the client's name for it
    purpose: str  # one of UPLOADS, or OUTPUT
    num_bytes: int
    created_at: int  # seconds since 1970
    expires_at: int

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """Files by id. Runs in the event loop, except that a thread writes uploads."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        max_files: int = MAX_FILES,
        are_several: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Open the folder and load its files. Creates it if it is missing.

        Args:
            max_bytes: Limit for all files together. Batch answers may exceed it, uploads may not.
            are_several: Returns whether several owners share the limits.

        Raises:
            OptionsError: The folder is unusable, accessible to other users, or used by another service.
        """
        self.directory, self._clock = directory, clock or SteadyClock()
        self._bytes, self._number = Shares(max_bytes, are_several), Shares(max_files, are_several)
        self._files: dict[str, StoredFile] = {}
        self._lent: dict[str, Path] = {}  # by file id, answers of batches without a stored record yet
        self._are_several = are_several
        self._growing: dict[str, tuple[str, int]] = {}  # by batch, its owner and the bytes of its answers
        # Returns whether a batch reads a file. Such a file does not expire.
        self.is_read: Callable[[str], bool] = lambda _: False
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(directory)
            self._lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_over()
        except BlockingIOError as error:
            raise OptionsError(
                f"--files-dir {str(directory)!r} is used by another service; give each service a separate folder"
            ) from error
        except OSError as error:
            raise OptionsError(f"--files-dir {str(directory)!r} cannot be used: {error.strerror}") from error

    def _take_over(self) -> None:
        # Only files named by a service: the folder may contain other files.
        names = {path.name for path in self.directory.iterdir() if _OURS.fullmatch(path.name)}
        for name in names:
            file_id, ending = os.path.splitext(name)
            if ending not in (_ABOUT, _CONTENT) or not {file_id + _ABOUT, file_id + _CONTENT} <= names:
                (self.directory / name).unlink()  # an incomplete file of a front that was killed
            elif ending == _ABOUT:
                about = read_json(self.directory / name)
                with passing_over(self.directory / name):
                    self._remember(_taken_over(StoredFile(**about), self.now_s))

    @property
    def now_s(self) -> float:
        """The current time, in seconds since 1970."""
        return self._clock()

    async def add(
        self,
        content: bytes,
        *,
        owner: str,
        filename: str,
        purpose: str = INPUT,
        lifetime_s: int = LIFETIME_S,
    ) -> StoredFile:
        """Store an upload.

        Raises:
            ApiError: 413 if it exceeds the limits; 507 if the disk is full; 500 if it cannot be written.
        """
        self._check_room(len(content), owner)
        about = self._about(new_id("file-"), owner, filename, purpose, len(content), lifetime_s)
        self._take(about)  # reserve while writing
        try:
            await asyncio.to_thread(self._write, about, content)
        except OSError as error:
            self._remove(about.id)
            not_written(error)
        finally:
            self._give_back(about)
        self._remember(about)
        return about

    def lend(self, path: Path, file_id: str, *, owner: str, filename: str, lifetime_s: int) -> None:
        """Make a batch's written answers available as a file, until the process ends or `adopt` stores it permanently.

        Does nothing if it was called before.
        """
        if file_id not in self._files and path.exists():
            self._remember(self._about(file_id, owner, filename, OUTPUT, path.stat().st_size, lifetime_s))
            self._lent[file_id] = path

    def adopt(self, file_id: str) -> None:
        """Store a lent file permanently.

        Raises:
            OSError: Its record cannot be written. The file stays lent.
        """
        path = self._lent.get(file_id)
        if path is not None:
            write_json(self.directory / (file_id + _ABOUT), asdict(self._files[file_id]))
            path.replace(self._own_path_of(file_id))
            del self._lent[file_id]

    def note_growing(self, batch_id: str, owner: str, num_bytes: int) -> None:
        """Count the bytes of a batch's answers before they become a file."""
        _, before = self._growing.pop(batch_id, (owner, 0))
        self._bytes.give_back(owner, before)
        if num_bytes:
            self._bytes.take(owner, num_bytes)
            self._growing[batch_id] = owner, num_bytes

    def may_grow(self, owner: str) -> bool:
        """Return whether a batch may write more answers. A single owner may exceed the limit. Each of several owners has an
        equal part, which uploads of others cannot reduce.
        """
        return not self._are_several() or self._bytes.has_room(owner, 0) or self._bytes.has_part(owner)

    def find(self, file_id: str, owner: str, param: str = "file_id") -> StoredFile:
        """Return a file.

        Raises:
            ApiError: 404, naming `param`, if it does not exist or has another owner.
        """
        found = self._files.get(file_id)
        if found is None or found.owner != owner or self._is_over(found):
            raise _missing(file_id, param)
        return found

    async def content_of(self, file: StoredFile, param: str = "file_id") -> bytes:
        """Return a file's content.

        Raises:
            ApiError: 404, naming `param`, if it has been deleted since it was found.
        """
        try:
            return await asyncio.to_thread(self.path_of(file.id).read_bytes)
        except FileNotFoundError:
            raise _missing(file.id, param) from None

    def path_of(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._lent.get(file_id) or self._own_path_of(file_id)

    def _own_path_of(self, file_id: str) -> Path:
        return self.directory / (file_id + _CONTENT)

    def all_of(self, owner: str) -> list[StoredFile]:
        """Return an owner's files, unordered."""
        self.expire()
        return [each for each in self._files.values() if each.owner == owner and not self._is_over(each)]

    def delete(self, file: StoredFile) -> None:
        """Remove a file.

        Raises:
            OSError: It cannot be removed, and stays.
        """
        self._remove(file.id)
        if self._files.pop(file.id, None) is not None:
            self._give_back(file)

    def expire(self) -> None:
        """Remove expired files. Log those that cannot be removed; the next call tries again."""
        remove_expired("files", [each for each in self._files.values() if self._is_over(each)], self.delete)

    def close(self) -> None:
        """Release the folder for another service."""
        os.close(self._lock)

    def _check_room(self, num_bytes: int, owner: str) -> None:
        self.expire()
        if not self._number.has_room(owner, 1):
            raise ApiError(
                413,
                f"{self._number.held} files are stored, {self._number.held_by(owner)} of them yours; this server stores up to "
                f"{self._number.total}{_OF_SEVERAL if self._are_several() else ''}. Delete some.",
            )
        if not self._bytes.has_room(owner, num_bytes):
            raise ApiError(
                413,
                f"A file of {num_bytes} bytes exceeds the limit: files with {self._bytes.held} bytes are stored, "
                f"{self._bytes.held_by(owner)} of them yours, and this server stores up to {self._bytes.total} in all "
                f"(--max-files-bytes){_OF_SEVERAL if self._are_several() else ''}. Delete some.",
                param="file",
            )

    def _remember(self, file: StoredFile) -> None:
        self._files[file.id] = file
        self._take(file)

    def _take(self, file: StoredFile) -> None:
        self._number.take(file.owner, 1)
        self._bytes.take(file.owner, file.num_bytes)

    def _give_back(self, file: StoredFile) -> None:
        self._number.give_back(file.owner, 1)
        self._bytes.give_back(file.owner, file.num_bytes)

    def _is_over(self, file: StoredFile) -> bool:
        return file.expires_at <= self.now_s and not self.is_read(file.id)

    def _about(
        self, file_id: str, owner: str, filename: str, purpose: str, num_bytes: int, lifetime_s: int
    ) -> StoredFile:
        now_s = int(self.now_s)
        return StoredFile(
            id=file_id,
            owner=owner,
            filename=filename,
            purpose=purpose,
            num_bytes=num_bytes,
            created_at=now_s,
            expires_at=now_s + lifetime_s,
        )

    def _write(self, about: StoredFile, content: bytes) -> None:
        with open(self._own_path_of(about.id), "xb", opener=_private) as file:
            file.write(content)
        write_json(self.directory / (about.id + _ABOUT), asdict(about))

    def _remove(self, file_id: str) -> None:
        if lent := self._lent.get(file_id):
            lent.unlink(missing_ok=True)
            del self._lent[file_id]
        for ending in (_ABOUT, _CONTENT):
            (self.directory / (file_id + ending)).unlink(missing_ok=True)


def is_in_use(directory: Path) -> bool:
    """Return whether another service has the folder. False if that cannot be found out."""
    with contextlib.suppress(OSError):
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False


def _missing(file_id: str, param: str) -> ApiError:
    return ApiError(404, f"No such File object: {file_id}.", param=param)


def _make_private(directory: Path) -> None:
    """Restrict a folder to its owner. A folder with other files is not changed.

    Raises:
        OptionsError: Other users can access the folder, and its mode cannot be changed.
    """
    mode = stat.S_IMODE(directory.stat().st_mode)
    if not mode & 0o077:
        return
    words = f"--files-dir {str(directory)!r} is accessible to other users (mode {mode:o})"
    has_others = any(
        path.name not in _OWN_NAMES and not _OURS.fullmatch(path.name) for path in directory.iterdir()
    )
    if has_others:
        raise OptionsError(
            f"{words} and contains other files; run chmod 700 on it, or give a separate folder, which gets this mode"
        )
    try:
        directory.chmod(0o700)
    except PermissionError as error:
        raise OptionsError(
            f"{words} and has another owner; give a folder below it, which will be private"
        ) from error
    _LOG.warning("%s; its mode is now 700", words)


def _taken_over(file: StoredFile, now_s: float) -> StoredFile:
    return replace(file, expires_at=int(taken_over(file.expires_at, now_s=now_s, lifetime_s=LIFETIME_S)))


def new_id(head: str) -> str:
    """Return an unpredictable id. Ids sort by creation time."""
    return f"{head}{time.time_ns():016x}{secrets.token_hex(8)}"


def page_of(
    items: Iterable[Item],
    shown: Callable[[Item], dict[str, Any]],
    *,
    after: str | None,
    limit: int,
    newest_first: bool = True,
) -> dict[str, Any]:
    """Return a page of a list, as OpenAI's clients request it.

    Args:
        after: An id; the page begins after it, even if that object no longer exists.
    """
    if after is not None and not re.fullmatch(r"[a-z]+[-_][0-9a-f]{32}", after):
        raise bad_request(f"after is {after!r}; it must be the id of the last object of a page.", "after")
    found = sorted(items, key=lambda each: each.id, reverse=newest_first)
    if after is not None:
        found = [each for each in found if (each.id < after if newest_first else each.id > after)]
    data = [shown(each) for each in found[:limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
    }


def remove_expired(kind: str, expired: Iterable[Item], remove: Callable[[Item], None]) -> None:
    """Remove expired objects. Log how many cannot be removed, in one line."""
    failures: list[OSError] = []
    for each in expired:
        try:
            remove(each)
        except OSError as error:
            failures.append(error)
    if failures:
        _LOG.error("%d expired %s cannot be removed now: %s", len(failures), kind, failures[0])


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small file atomically.

    Raises:
        OSError: The file cannot be written.
    """
    draft = path.with_suffix(".draft")
    try:
        with open(draft, "w", opener=_private) as file:
            json.dump(value, file)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of `write_json`. Returns an empty dict if it is invalid."""
    with passing_over(path):
        return dict(json.loads(path.read_text()))
    return {}


@contextlib.contextmanager
def passing_over(path: Path) -> Iterator[None]:
    """Log an invalid file of the folder and ignore it. It is not removed: another version may have written it."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        _LOG.error("%s is ignored: %s: %s", path, type(error).__name__, error)


def is_full(error: OSError) -> bool:
    """Return whether a write failed because the disk is full."""
    return error.errno in _FULL


def not_written(error: OSError) -> NoReturn:
    """Refuse a request because a file cannot be written.

    Raises:
        ApiError: 507 if the disk is full; 500 otherwise.
    """
    if is_full(error):
        raise ApiError(
            507, "The disk with this server's files (--files-dir) is full; delete some files, or retry later."
        ) from error
    raise ApiError(500, f"This server's files (--files-dir) cannot be written: {error.strerror}.") from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def expiry_of(seconds: Any, param: str) -> int:
    """Parse a file's lifetime in seconds.

    Raises:
        ApiError: 400, naming `param`.
    """
    text = str(seconds)
    if not text.isdecimal() or len(text) > 9 or not LEAST_LIFETIME_S <= int(text) <= LIFETIME_S:
        raise bad_request(
            f"{param} is {text[:80]!r}; it must be from {LEAST_LIFETIME_S} (an hour) to {LIFETIME_S} (30 days).",
            param,
        )
    return int(text)
