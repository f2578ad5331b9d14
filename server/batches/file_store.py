"""Files that clients gave and batches made, in a folder: OpenAI's file objects, bounded, and each its owner's alone.

A file is two: its content, `ID.jsonl`, and what is known of it, `ID.json`. Names in the folder are ids that are made here; what a
client calls its file is only told. An upload's content is written before what is known of it, a batch's answers after: whatever
ends the front between the two leaves a half that the next one removes, or that the batch completes (`runs`).

An id begins with its time, so that ids in order are files in order, and a list goes on behind a file that is deleted meanwhile.
One service uses a folder at a time: a lock tells the second one. Rejected: a database file, for what a few thousand small files
do, and which `ls` and `rm` would not read.

With several API keys an owner has room for as much as it leaves free for others (`shares`). What a batch writes is counted as it
grows. On a full disk a batch's answers can be read where they are until what is known of them can be written.
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

from server.errors import ApiError, bad_request
from server.http.shares import Shares
from server.options.flag import OptionsError
from server.steady_clock import SteadyClock, taken_over

INPUT, OUTPUT = "batch", "batch_output"  # purposes
MAX_FILES = 10_000  # OpenAI's longest list
MAX_NAME_CHARS = 255
LIFETIME_S = 30 * 86_400  # OpenAI's for files of batches, and the longest that may be asked for
LEAST_LIFETIME_S = 3600
_CONTENT, _ABOUT = ".jsonl", ".json"
_OURS = re.compile(r"file-[0-9a-f]{32}\.(jsonl|json|draft)")  # see `new_id` and `write_json`
_OWN_NAMES = ("lock", "batches")  # beside what `_OURS` names
_OF_SEVERAL = ", of one API key as much as it leaves free for others"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOG = logging.getLogger("wideep.front")


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=_HasId)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """What is known of a file."""

    id: str
    owner: str  # whose API key gave it, as a digest; empty where no key is needed
    filename: str  # as the client calls it
    purpose: str  # INPUT or OUTPUT
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
    """The files by id. Everything but the writing of an upload's content runs in the event loop."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        max_files: int = MAX_FILES,
        are_several: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Take over what is in the folder, which is made if it is missing.

        Args:
            max_bytes: of all files together; answers of batches may go beyond it, uploads may not.
            are_several: whether several owners share that.

        Raises:
            OptionsError: the folder cannot be used, others can look into it, or another service uses it.
        """
        self.directory, self._clock = directory, clock or SteadyClock()
        self._bytes, self._number = Shares(max_bytes, are_several), Shares(max_files, are_several)
        self._files: dict[str, StoredFile] = {}
        self._lent: dict[str, Path] = {}  # by file id, answers that a batch could not make a file of yet
        self._are_several = are_several
        self._growing: dict[str, tuple[str, int]] = {}  # by batch, its owner and the bytes of its answers
        self.is_read: Callable[[str], bool] = lambda _: (
            False
        )  # whether a batch reads a file, which then stays
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(directory)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_over()
        except BlockingIOError as error:
            raise OptionsError(
                f"--files-dir {str(directory)!r} is used by another service; give each a folder of its own"
            ) from error
        except OSError as error:
            raise OptionsError(f"--files-dir {str(directory)!r} cannot be used: {error.strerror}") from error

    def _take_over(self) -> None:
        # Only what a service has named: the folder may hold files of others.
        names = {path.name for path in self.directory.iterdir() if _OURS.fullmatch(path.name)}
        for name in names:
            file_id, ending = os.path.splitext(name)
            if ending not in (_ABOUT, _CONTENT) or not {file_id + _ABOUT, file_id + _CONTENT} <= names:
                (self.directory / name).unlink()  # a half, left by a front that was killed
            elif ending == _ABOUT:
                about = read_json(self.directory / name)
                with passing_over(self.directory / name):
                    self._remember(_taken_over(StoredFile(**about), self.now_s))

    @property
    def now_s(self) -> float:
        """The time, in seconds since 1970."""
        return self._clock()

    async def add(
        self, content: bytes, *, owner: str, filename: str, lifetime_s: int = LIFETIME_S
    ) -> StoredFile:
        """Keep an upload.

        Raises:
            ApiError: 413, there is no room for it; 507, the disk is full; 500, it cannot be written.
        """
        self._check_room(len(content), owner)
        about = self._about(new_id("file-"), owner, filename, INPUT, len(content), lifetime_s)
        self._take(about)  # while it is written
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
        """Make a file of a batch's answers, which are written, until this process ends or `adopt` keeps it for good.

        Nothing happens if that was done before.
        """
        if file_id not in self._files and path.exists():
            self._remember(self._about(file_id, owner, filename, OUTPUT, path.stat().st_size, lifetime_s))
            self._lent[file_id] = path

    def adopt(self, file_id: str) -> None:
        """Keep a file that was lent.

        Raises:
            OSError: what is known of it cannot be written; it stays lent.
        """
        path = self._lent.get(file_id)
        if path is not None:
            write_json(self.directory / (file_id + _ABOUT), asdict(self._files[file_id]))
            path.replace(self._own_path_of(file_id))
            del self._lent[file_id]

    def note_growing(self, batch_id: str, owner: str, num_bytes: int) -> None:
        """Count what a batch has written and no file is made of yet."""
        _, before = self._growing.pop(batch_id, (owner, 0))
        self._bytes.give_back(owner, before)
        if num_bytes:
            self._bytes.take(owner, num_bytes)
            self._growing[batch_id] = owner, num_bytes

    def may_grow(self, owner: str) -> bool:
        """Whether a batch may write more answers. One owner alone may go beyond the bound; of several each has an equal part,
        which what others upload meanwhile takes nothing from.
        """
        return not self._are_several() or self._bytes.has_room(owner, 0) or self._bytes.has_part(owner)

    def find(self, file_id: str, owner: str, param: str = "file_id") -> StoredFile:
        """Return a file.

        Raises:
            ApiError: 404, naming `param`: there is none, or it is somebody else's.
        """
        found = self._files.get(file_id)
        if found is None or found.owner != owner or self._is_over(found):
            raise ApiError(404, f"No such File object: {file_id}.", param=param)
        return found

    def path_of(self, file_id: str) -> Path:
        """Return where a file's content is."""
        return self._lent.get(file_id) or self._own_path_of(file_id)

    def _own_path_of(self, file_id: str) -> Path:
        return self.directory / (file_id + _CONTENT)

    def all_of(self, owner: str) -> list[StoredFile]:
        """Return somebody's files, in no order."""
        self.expire()
        return [each for each in self._files.values() if each.owner == owner]

    def delete(self, file: StoredFile) -> None:
        """Remove a file."""
        if self._files.pop(file.id, None) is not None:
            self._give_back(file)
        self._remove(file.id)

    def expire(self) -> None:
        """Remove what is too old."""
        for each in [each for each in self._files.values() if self._is_over(each)]:
            self.delete(each)

    def close(self) -> None:
        """Let another service use the folder."""
        os.close(self._lock)

    def _check_room(self, num_bytes: int, owner: str) -> None:
        self.expire()
        if not self._number.has_room(owner, 1):
            raise ApiError(
                413,
                f"{self._number.held} files are kept, {self._number.held_by(owner)} of them yours; this server keeps "
                f"{self._number.total}{_OF_SEVERAL if self._are_several() else ''}. Delete some.",
            )
        if not self._bytes.has_room(owner, num_bytes):
            raise ApiError(
                413,
                f"A file of {num_bytes} bytes has no room: files with {self._bytes.held} bytes are kept, "
                f"{self._bytes.held_by(owner)} of them yours, and this server keeps {self._bytes.total} in all "
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
        if lent := self._lent.pop(file_id, None):
            lent.unlink(missing_ok=True)
        for ending in (_ABOUT, _CONTENT):
            (self.directory / (file_id + ending)).unlink(missing_ok=True)


def _make_private(directory: Path) -> None:
    """Let a folder be for its owner alone. One with files of others is left as it is.

    Raises:
        OptionsError: others can use it.
    """
    mode = stat.S_IMODE(directory.stat().st_mode)
    if not mode & 0o077:
        return
    words = f"--files-dir {str(directory)!r} can be used by others (mode {mode:o})"
    has_others = any(
        path.name not in _OWN_NAMES and not _OURS.fullmatch(path.name) for path in directory.iterdir()
    )
    if has_others:
        raise OptionsError(
            f"{words} and holds other files; run chmod 700 on it, or give a folder of its own, which is made so"
        )
    try:
        directory.chmod(0o700)
    except PermissionError as error:
        raise OptionsError(
            f"{words} and is not yours; give a folder below it, which is made for its owner alone"
        ) from error
    _LOG.warning("%s; it is mode 700 now", words)


def _taken_over(file: StoredFile, now_s: float) -> StoredFile:
    return replace(file, expires_at=int(taken_over(file.expires_at, now_s=now_s, lifetime_s=LIFETIME_S)))


def new_id(head: str) -> str:
    """Return an id that nobody can guess; ids sort as they were made."""
    return f"{head}{time.time_ns():016x}{secrets.token_hex(8)}"


def page_of(
    items: Iterable[Item],
    shown: Callable[[Item], dict[str, Any]],
    *,
    after: str | None,
    limit: int,
    newest_first: bool = True,
) -> dict[str, Any]:
    """Return a part of a list, as OpenAI's clients page through one.

    Args:
        after: an id; what comes behind it is returned, whether it still is there or not.
    """
    if after is not None and not re.fullmatch(r"[a-z]+[-_][0-9a-f]{32}", after):
        raise bad_request(f"after is {after!r}; it must be the id of the last object that you have.", "after")
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


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small file so that it is whole at any time.

    Raises:
        OSError: it cannot be written.
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
    """Read what `write_json` wrote; nothing, where it is something else."""
    with passing_over(path):
        return dict(json.loads(path.read_text()))
    return {}


@contextlib.contextmanager
def passing_over(path: Path) -> Iterator[None]:
    """Log what is wrong with a file of the folder, which stays as it is: another version may have written it."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        _LOG.error("%s is passed over: %s: %s", path, type(error).__name__, error)


def is_full(error: OSError) -> bool:
    """Whether a write failed because there is no room on the disk."""
    return error.errno in _FULL


def not_written(error: OSError) -> NoReturn:
    """Refuse what cannot be kept.

    Raises:
        ApiError: 507 or 500.
    """
    if is_full(error):
        raise ApiError(
            507, "The disk with this server's files (--files-dir) is full; delete some files, or try later."
        ) from error
    raise ApiError(500, f"This server's files (--files-dir) cannot be written: {error.strerror}.") from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def expiry_of(seconds: Any, param: str) -> int:
    """Read how long a file is to be kept.

    Raises:
        ApiError: 400, naming `param`.
    """
    text = str(seconds)
    if not text.isdecimal() or len(text) > 9 or not LEAST_LIFETIME_S <= int(text) <= LIFETIME_S:
        raise bad_request(
            f"{param} is {text[:80]!r}; it must be {LEAST_LIFETIME_S} (an hour) to {LIFETIME_S} (30 days).",
            param,
        )
    return int(text)
