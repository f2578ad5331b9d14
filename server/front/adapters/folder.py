"""A watched folder of adapters (--lora-dir): its subfolders are loaded under their names, and follow changes of their files.

A subfolder counts once its two files have been unchanged between two looks, so that a copy in progress is not read. A subfolder
that is refused is reported once, and tried again when its files change. Names of adapters in other directories are left alone.
If files cannot be read, as on a network file system, the log has a line for each new cause, and the next look tries again.
"""

import asyncio
import logging
from pathlib import Path
from typing import NamedTuple

from moe.lora.adapter_config import CONFIG_NAME, WEIGHTS_NAME
from server.front.adapters.registry import Adapters, NamedAdapter
from server.front.errors import ApiError
from server.front.events import EventLog
from server.machine.tasks import logging_errors

LOOK_EVERY_S = 2.0
_LOG = logging.getLogger("wideep.front")


class _Stamp(NamedTuple):
    """What changes if a file is written again."""

    inode: int
    num_bytes: int
    modified_ns: int


_Stamps = tuple[_Stamp, ...]  # of the two files; () if they could never be read


class AdapterFolder:
    """Keeps the registered adapters equal to the subfolders of a folder."""

    def __init__(self, folder: Path, adapters: Adapters, events: EventLog) -> None:
        self._folder, self._adapters, self._events = folder, adapters, events
        self._seen: dict[str, _Stamps] = {}  # at the last look
        self._settled: dict[str, _Stamps] = {}  # loaded or refused
        self._troubles: set[str] = set()  # of the present look
        self._known_troubles: set[str] = set()  # of the look before

    async def run(self) -> None:
        """Look forever."""
        has_folder = False
        while True:
            with logging_errors("the adapters cannot follow --lora-dir"):
                try:
                    if not has_folder:
                        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
                        has_folder = True
                    await self.look()
                except OSError as error:
                    self._note_trouble(error)
            self._known_troubles, self._troubles = self._troubles, set()
            await asyncio.sleep(LOOK_EVERY_S)

    def _note_trouble(self, error: OSError) -> None:
        """Log an error, unless the look before had the same one."""
        if str(error) not in self._known_troubles | self._troubles:
            _LOG.error("--lora-dir cannot be read: %s; retrying", error)
        self._troubles.add(str(error))

    async def look(self) -> None:
        """Load new and changed subfolders, and unload those that are gone.

        Raises:
            OSError: The folder cannot be read. Nothing has changed.
        """
        found = await asyncio.to_thread(self._stamps)
        for name in sorted(set(self._adapters.names) - found.keys()):
            if self._loaded(name) is not None:
                self._adapters.unload(name)
        self._settled = {name: stamps for name, stamps in self._settled.items() if name in found}
        for name, stamps in found.items():
            is_stable = bool(stamps) and self._seen.get(name) == stamps
            if is_stable and self._settled.get(name) != stamps:
                await self._load(name, stamps)
        self._seen = found

    def _loaded(self, name: str) -> NamedAdapter | None:
        """Return the registered adapter of a subfolder, also if a former front registered it. None if the name is of another one."""
        named = self._adapters.find(name)
        return named if named is not None and Path(named.directory) == self._path(name) else None

    def _path(self, name: str) -> Path:
        return (self._folder / name).absolute()

    async def _load(self, name: str, stamps: _Stamps) -> None:
        replaces = self._loaded(name) is not None
        try:
            await self._adapters.load(name, str(self._path(name)), replaces=replaces)
        except OSError as error:
            self._note_trouble(error)
            return
        except ApiError as error:
            if error.status >= 500:  # the ranks are away: the next look tries again
                return
            if (unreadable := _reading_error(error)) is not None:
                self._note_trouble(unreadable)
                return
            _LOG.warning("--lora-dir: %s is not served: %s", name, error.message)
            self._events.note(
                "adapter_refused", f"the adapter {name} of --lora-dir is refused: {error.message}"
            )
        self._settled[name] = stamps

    def _stamps(self) -> dict[str, _Stamps]:
        found = {}
        for entry in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            files = [entry / CONFIG_NAME, entry / WEIGHTS_NAME]
            try:
                about = [file.stat() for file in files]
            except (FileNotFoundError, NotADirectoryError):  # not complete, or no adapter
                continue
            except OSError as error:
                self._note_trouble(error)
                found[entry.name] = self._seen.get(entry.name, ())
                continue
            found[entry.name] = tuple(_Stamp(each.st_ino, each.st_size, each.st_mtime_ns) for each in about)
        return found


def _reading_error(refusal: ApiError) -> OSError | None:
    """Return the cause of a refusal if a file could not be read, which may pass. Otherwise, return None."""
    cause = refusal.__cause__ and refusal.__cause__.__cause__
    return cause if isinstance(cause, OSError) else None
