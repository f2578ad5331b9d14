"""Records of experts' loads as files: for their owner alone, and no more than the last few.

Whoever may dump a record may do so again and again, and a record may have hundreds of megabytes. So a folder keeps the newest
MAX_DUMPS of them, whichever service wrote them. Three files each: SGLang's own .pt, the same as .json (its
`--init-expert-location` reads both), and ours, .npz with a time axis. The .pt is written by a short-lived child process, because
the front keeps torch out.
"""

import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from server.experts.recorder import Record
from server.front.errors import ApiError

MAX_DUMPS = 16
_STEM = "expert_distribution_recorder_"  # SGLang's
_OURS = re.compile(_STEM + r"(\d+\.\d+)\.(?:npz|json|pt)")
_PT_WRITER = Path(__file__).with_name("record_to_pt.py")
_PT_TIMEOUT_S = 120.0


def default_folder() -> Path:
    """Return where a user's dumps go, if nothing else is said."""
    return Path(tempfile.gettempdir()) / f"wideep_records_{os.getuid()}"


def dump(record: Record, directory: Path) -> list[Path]:
    """Write a record in all formats, and remove the oldest dumps; returns the paths.

    Raises:
        ApiError: 500, a file cannot be written.
    """
    stem = directory / f"{_STEM}{time.time():.6f}"
    as_npz, as_json, as_pt = (stem.with_name(stem.name + ending) for ending in (".npz", ".json", ".pt"))
    try:
        _make(directory)
        with open(as_npz, "xb", opener=_private) as file:
            record.write_npz(file)
        with open(as_json, "x", opener=_private) as text:
            text.writelines(record.sglang_json())
        remove_old(directory)
    except OSError as error:
        raise ApiError(500, f"The record cannot be written to {directory}: {error.strerror}.") from error
    command: list[Any] = [sys.executable, "-P", _PT_WRITER, as_json, as_pt]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PT_TIMEOUT_S, umask=0o077)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ApiError(500, f"{as_json} is written, {as_pt.name} could not be: {last}.")
    return [as_pt, as_json, as_npz]


def remove_old(directory: Path) -> None:
    """Remove all dumps but the newest; other files stay.

    Raises:
        OSError: one cannot be removed.
    """
    found = [(match, path) for path in directory.iterdir() if (match := _OURS.fullmatch(path.name))]
    newest = sorted({float(match[1]) for match, _ in found})[-MAX_DUMPS:]
    for match, path in found:
        if float(match[1]) not in newest:
            path.unlink(missing_ok=True)


def _make(directory: Path) -> None:
    """Make a folder for its owner alone. In a temporary directory somebody else may have made it first.

    Raises:
        OSError: it cannot be made, or is somebody else's.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if directory == default_folder() and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid()):
        raise PermissionError(1, "somebody else made it")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
