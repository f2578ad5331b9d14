"""Write and read the reason for a process's failure: one sentence in a file that torchrun and `wideep serve` read.

The fields are torchrun's (torch.distributed.elastic.multiprocessing.errors), so its table of failures shows our sentence.
`time_ns` is an addition that orders failures: ranks fail within milliseconds of each other, and torchrun's timestamp
counts seconds. A second file in the same folder records that a rank stays away, which is not a failure until all ranks do.
A third one marks a rank that a resize adds: it does not belong to the service yet, and its failures are no failures of the service.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the variable in which torchrun gives every worker its file
FIRST = 0  # before every other time
LAST = (1 << 63) - 1  # after every other time
_ABSENCES = "rank-*-stays-away"
_JOINING = "joining"


def write_failure(path: Path, text: str, *, time_ns: int | None = None) -> None:
    """Write why this process fails. The time defaults to now."""
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    stamp = time.time_ns() if time_ns is None else time_ns
    path.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}, "time_ns": stamp}))


def read_failure(path: Path) -> str | None:
    """Return the sentence in a process's file. None without one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_bytes())["message"]["message"])
    return None


def first_failure(directory: Path) -> str | None:
    """Return the sentence of the first process that failed, from the folder of a launcher; None without failures."""
    failures = []
    for path in _files(directory, "error.json"):
        if (path.parent / _JOINING).exists():
            continue
        # Removed meanwhile, half-written, or by another program.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_bytes())
            failures.append((int(content["time_ns"]), str(content["message"]["message"])))
    return min(failures)[1] if failures else None


def mark_joining(directory: Path) -> None:
    """Mark the folder of a rank that does not belong to the service yet."""
    (directory / _JOINING).touch()


def mark_joined(directory: Path) -> None:
    """Remove the mark of `mark_joining`."""
    (directory / _JOINING).unlink(missing_ok=True)


def write_absence(path: Path, rank: int, text: str) -> None:
    """Record next to this process's error file that a rank will not be restarted, and why."""
    path.with_name(_ABSENCES.replace("*", str(rank))).write_text(text)


def absences(directory: Path) -> list[str]:
    """Return the reason of each rank that stays away, from the folder of a launcher."""
    found = []
    for path in sorted(_files(directory, _ABSENCES)):
        with contextlib.suppress(FileNotFoundError):
            found.append(path.read_text())
    return found


def _files(directory: Path, pattern: str) -> Iterator[Path]:
    """Yield the files of a name in a folder and its subfolders, which may be removed meanwhile.

    Deeper folders have no such files. A front keeps files there that come and go, perhaps many.
    """
    with contextlib.suppress(FileNotFoundError):
        entries = list(os.scandir(directory))
        for folder in (directory, *(Path(entry.path) for entry in entries if entry.is_dir())):
            with contextlib.suppress(FileNotFoundError):
                names = os.listdir(folder)
                yield from (folder / name for name in names if fnmatch(name, pattern))
