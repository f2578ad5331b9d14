"""Which files below a folder have changed, from Linux's inotify. Subfolders that are created later are included.

Rejected: comparing the times of all files periodically, which is late and costs the more, the more files there are.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LIBC = ctypes.CDLL(None, use_errno=True)
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, number of bytes of the name
# From sys/inotify.h.
_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _IGNORED, _ONLY_FOLDERS, _IS_FOLDER = 0x4000, 0x8000, 0x1000000, 0x40000000
_MASK = _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLY_FOLDERS
_PARTIAL = "partial_"  # of `whole_files`


class Changes(NamedTuple):
    """Files that were written, created or removed, as paths relative to the folder."""

    # Whether a file was created, replaced or removed. Otherwise it was only written.
    is_new: dict[str, bool]
    is_overrun: bool = False  # there were too many changes, so other files may have changed, too


class FolderWatch:
    """The changes below one folder since the last look."""

    def __init__(self, folder: Path, *, left_out: frozenset[str] = frozenset()) -> None:
        """Begin to watch.

        Args:
            left_out: Names of subfolders that are not watched.

        Raises:
            OSError: The kernel permits no further watch.
        """
        self._folder, self._left_out = folder, left_out
        self.fd = _checked(_LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), folder)
        self._paths: dict[int, str] = {}  # relative paths of watched folders, by watch
        self._add("")

    def close(self) -> None:
        """Stop watching."""
        os.close(self.fd)

    def files(self) -> list[str]:
        """Return the regular files that exist now."""
        return list(self._files_of(""))

    def take(self) -> Changes:
        """Return the changes since the last call."""
        is_new: dict[str, bool] = {}
        is_overrun = False
        while content := self._read():
            at = 0
            while at < len(content):
                watch, mask, _, num_bytes = _EVENT.unpack_from(content, at)
                name = content[at + _EVENT.size : at + _EVENT.size + num_bytes].rstrip(b"\0").decode()
                at += _EVENT.size + num_bytes
                is_overrun |= self._take(watch, mask, name, is_new)
        if is_overrun:  # perhaps of new folders
            self._add("")
        return Changes(is_new, is_overrun)

    def _read(self) -> bytes:
        try:
            return os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return b""

    def _take(self, watch: int, mask: int, name: str, is_new: dict[str, bool]) -> bool:
        """Add an event to the changes. Returns whether others may be missing."""
        if mask & _OVERFLOW:
            return True
        if mask & _IGNORED:
            self._paths.pop(watch, None)
            return False
        folder = self._paths.get(watch)
        if folder is None or name.startswith(_PARTIAL):
            return False
        path = os.path.join(folder, name)
        if mask & _IS_FOLDER:
            if mask & (_CREATE | _MOVED_TO) and path not in self._left_out:
                self._add(path)
                is_new |= dict.fromkeys(self._files_of(path), True)
            return bool(mask & _MOVED_FROM)
        is_new[path] = is_new.get(path, False) or not mask & _MODIFY
        return False

    def _add(self, path: str) -> None:
        """Watch a folder and its subfolders."""
        found = _LIBC.inotify_add_watch(self.fd, os.fsencode(self._folder / path), _MASK)
        if found < 0 and path and ctypes.get_errno() in (2, 20):  # it was removed or replaced by a file
            return
        self._paths[_checked(found, self._folder / path)] = path
        for entry in self._entries(path):
            inner = os.path.join(path, entry.name)
            if entry.is_dir(follow_symlinks=False) and inner not in self._left_out:
                self._add(inner)

    def _entries(self, path: str) -> list[os.DirEntry[str]]:
        """Return what a folder has; nothing if it was removed meanwhile."""
        try:
            return list(os.scandir(self._folder / path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _files_of(self, path: str) -> Iterator[str]:
        for entry in self._entries(path):
            inner = os.path.join(path, entry.name)
            if entry.is_dir(follow_symlinks=False):
                if inner not in self._left_out:
                    yield from self._files_of(inner)
            elif not entry.name.startswith(_PARTIAL) and entry.is_file(follow_symlinks=False):
                yield inner


def status_of(path: Path) -> os.stat_result | None:
    """Return a regular file's status, or None if it is missing."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _checked(result: int, folder: Path) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot watch a folder for changes: {os.strerror(number)}", str(folder))
    return result
