"""One resize as an operation, and the file from which a restarted front knows of it."""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from expert_placement.files import from_json, to_json
from expert_placement.placement import Placement
from server.machine.whole_files import replace_text


class ResizePhase(Enum):
    """The state of an operation. A service without any is idle."""

    IDLE = "idle"
    PREPARING = "preparing"
    COMMITTING = "committing"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(kw_only=True)
class Operation:
    """One resize. Its fields change while it runs."""

    id: str
    former: int  # ranks before
    wanted: int  # ranks after
    drain_timeout_s: float
    timeout_s: float
    begun_s: float  # on the monotonic clock
    phase: ResizePhase = ResizePhase.PREPARING
    stage: str = ""  # what it waits for, as text
    error: str | None = None
    problem: str | None = None  # that ends it
    is_aborted: bool = False
    seconds: float = 0.0  # that it took; 0.0 while it runs
    version: int = -1  # of its placement

    @property
    def has_ended(self) -> bool:
        return self.phase in (ResizePhase.COMPLETED, ResizePhase.FAILED)

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Return the fields that responses show."""
        return {
            "operation_id": self.id,
            "phase": self.phase.value,
            "stage": self.stage,
            "error": self.error,
            "seconds": round(self.seconds if self.has_ended else now_s - self.begun_s, 3),
        }

    def leaving(self) -> range:
        """Return the ranks that leave."""
        return range(self.wanted, self.former)

    def coming(self) -> range:
        """Return the ranks that come."""
        return range(self.former, self.wanted)


class ResizeRecord:
    """The file from which a restarted front knows the number of ranks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        said = json.loads(path.read_text()) if path.exists() else {}
        self.num_ranks: int | None = said.get("num_ranks")
        self.operation: dict[str, Any] | None = said.get("operation")
        home = said.get("home")
        # Set if the earlier front ended while ranks met: their placement before.
        self.home: Placement | None = None if home is None else from_json(home)

    def write(self, num_ranks: int, operation: Operation, home: Placement | None = None) -> None:
        """Replace the file's content."""
        said = {
            "num_ranks": num_ranks,
            "operation": {"id": operation.id, "wanted": operation.wanted, "phase": operation.phase.value, "error": operation.error},
            "home": None if home is None else to_json(home),
        }  # fmt: skip
        replace_text(self._path, json.dumps(said))
