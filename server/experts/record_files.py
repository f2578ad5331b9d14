"""Records of expert loads as files: private to their owner, and limited to the newest few.

A client may dump records again and again, and a record may have hundreds of megabytes. So a folder keeps the newest
MAX_DUMPS of them, of all services that write to it. Each has three files: SGLang's .pt, the same as .json (SGLang's
`--init-expert-location` reads both), and WideEP's .npz with a time axis. A short-lived child process writes the .pt,
because the front does not import torch.
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
    """Return the default folder for a user's dumps."""
    return Path(tempfile.gettempdir()) / f"wideep_records_{os.getuid()}"


def dump(record: Record, directory: Path) -> list[Path]:
    """Write a record in all formats, and remove the oldest dumps. Returns the paths.

    Raises:
        ApiError: 500 if a file cannot be written.
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
        raise ApiError(500, f"{as_json} was written, but {as_pt.name} was not: {last}.")
    return [as_pt, as_json, as_npz]


def remove_old(directory: Path) -> None:
    """Remove all dumps except the newest; other files stay.

    Raises:
        OSError: A file cannot be removed.
    """
    found = [(match, path) for path in directory.iterdir() if (match := _OURS.fullmatch(path.name))]
    newest = sorted({float(match[1]) for match, _ in found})[-MAX_DUMPS:]
    for match, path in found:
        if float(match[1]) not in newest:
            path.unlink(missing_ok=True)


def _make(directory: Path) -> None:
    """Create a private folder. In a temporary directory, another user may have created it first.

    Raises:
        OSError: It cannot be created, or belongs to another user.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if directory == default_folder() and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid()):
        raise PermissionError(1, "another user created it")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
