"""Why a process failed, one sentence in a file where torchrun and `wideep serve` look for it.

The fields are torchrun's own (torch.distributed.elastic.multiprocessing.errors), so that its table of failures shows
our sentence; `time_ns` is ours and tells which of several failures came first, to a nanosecond where torchrun's
stamp has seconds: ranks fail one after the other within milliseconds. Beside it a supervisor notes that its rank stays
away, which is no failure until all ranks do.
"""

import contextlib
import json
import time
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the variable with which torchrun gives every worker its file
FIRST = 0  # a time before all others
LAST = (1 << 63) - 1  # and one after them
_ABSENCES = "rank-*-stays-away"


def write_failure(path: Path, text: str, *, time_ns: int | None = None) -> None:
    """Write why this process fails, stamped with the present time unless told otherwise."""
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    stamp = time.time_ns() if time_ns is None else time_ns
    path.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}, "time_ns": stamp}))


def first_failure(directory: Path) -> str | None:
    """Return the sentence of the process that failed first, from all files below; None if there is none."""
    failures = []
    for path in directory.glob("**/error.json"):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half-written, or by another program
            content = json.loads(path.read_bytes())
            failures.append((int(content["time_ns"]), str(content["message"]["message"])))
    return min(failures)[1] if failures else None


def write_absence(path: Path, rank: int, text: str) -> None:
    """Note, beside this process' error file, that a rank will not be started again, and why."""
    path.with_name(_ABSENCES.replace("*", str(rank))).write_text(text)


def absences(directory: Path) -> list[str]:
    """Return why ranks stay away, one sentence for each that does, from all files below."""
    return [path.read_text() for path in sorted(directory.glob(f"**/{_ABSENCES}"))]
