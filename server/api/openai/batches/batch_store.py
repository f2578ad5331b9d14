"""Store OpenAI's batch objects in a folder next to the files, so that a restarted front can continue them.

A batch is one small JSON file, rewritten whenever its status changes, and two files of answers that grow while it runs
(`output_lines`): good answers, and the rest. These files, not this record, show which lines are done. Ended batches are kept
for the maximum lifetime of their files.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from server.api.openai.batches.file_store import (
    LIFETIME_S,
    new_id,
    not_written,
    passing_over,
    read_json,
    remove_expired,
    write_json,
)
from server.front.errors import ApiError
from server.http.shares import Shares
from server.machine.steady_clock import GRACE_S, SteadyClock, taken_over

WINDOW_S = 86_400  # the completion_window of 24h
MAX_OPEN = 100  # unfinished batches per owner
MAX_BATCHES = 10_000
_LOG = logging.getLogger("wideep.front")


class BatchStatus(StrEnum):
    """A batch's status, in OpenAI's terms."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


@dataclass(slots=True, kw_only=True)
class Batch:
    """The current state of a batch."""

    id: str
    owner: str  # digest of the API key, as for files
    endpoint: str
    input_file_id: str
    created_at: int  # seconds since 1970
    metadata: dict[str, str] | None
    answers_lifetime_s: int
    status: BatchStatus = BatchStatus.VALIDATING
    times: dict[str, int] = field(default_factory=dict)  # status -> time when it was entered
    outcome: BatchStatus | None = None  # the final status, once it is known
    errors: list[dict[str, Any]] = field(default_factory=list)  # why it failed
    num_lines: int = 0
    num_good: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    # End of the completion window. None if another version wrote the batch: then `created_at` determines it.
    closes_at: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the batch is in a final status."""
        return self.status in ENDED

    @property
    def expires_at(self) -> int:
        """End of the completion window, in seconds since 1970."""
        return self.created_at + WINDOW_S if self.closes_at is None else int(self.closes_at)

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id if self.has_ended else None,
            "error_file_id": self.error_file_id if self.has_ended else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{
                f"{each}_at": self.times.get(each)
                for each in BatchStatus
                if each is not BatchStatus.VALIDATING
            },
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_good,
                "failed": self.num_failed,
            },
            "metadata": self.metadata,
        }


class BatchStore:
    """Batches by id."""

    def __init__(
        self,
        directory: Path,
        *,
        max_open: int = MAX_OPEN,
        max_batches: int = MAX_BATCHES,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Load the batches in the folder."""
        self._directory, self._clock = directory, clock or SteadyClock()
        self._max_open, self._number = max_open, Shares(max_batches)
        self._batches: dict[str, Batch] = {}
        directory.mkdir(mode=0o700, exist_ok=True)
        now_s = self._clock()
        self._grace_until_s = now_s + GRACE_S
        for path in sorted(directory.glob("batch_*.json")):
            about = read_json(path)
            with passing_over(path):
                batch = _batch_of(about)
                if not batch.has_ended:
                    batch.closes_at = taken_over(batch.expires_at, now_s=now_s, lifetime_s=WINDOW_S)
                self._remember(batch)

    @property
    def open_batches(self) -> list[Batch]:
        """The unfinished batches, oldest first."""
        return [each for each in self._batches.values() if not each.has_ended]

    def create(
        self,
        *,
        owner: str,
        endpoint: str,
        input_file_id: str,
        metadata: dict[str, str] | None,
        answers_lifetime_s: int,
    ) -> Batch:
        """Create and store a batch.

        Raises:
            ApiError: 429 if the owner has too many unfinished batches; 507 or 500 if it cannot be written.
        """
        if sum(each.owner == owner for each in self.open_batches) >= self._max_open:
            raise ApiError(
                429,
                f"{self._max_open} of your batches are unfinished, which is the maximum; wait for one, or cancel it.",
            )
        created_at = int(self._clock())
        batch = Batch(
            id=new_id("batch_"),
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=created_at,
            metadata=metadata,
            answers_lifetime_s=answers_lifetime_s,
            closes_at=created_at + WINDOW_S,
        )
        try:
            write_json(self._path_of(batch), asdict(batch))
        except OSError as error:
            not_written(error)
        self._remember(batch)
        self.expire()
        return batch

    def find(self, batch_id: str, owner: str) -> Batch:
        """Return a batch.

        Raises:
            ApiError: 404 if it does not exist or has another owner.
        """
        found = self._batches.get(batch_id)
        if found is None or found.owner != owner:
            raise ApiError(404, f"No batch found with id {batch_id!r}.", param="batch_id")
        return found

    def all_of(self, owner: str) -> list[Batch]:
        """Return an owner's batches, unordered."""
        return [each for each in self._batches.values() if each.owner == owner]

    def reader_of(self, file_id: str) -> Batch | None:
        """Return an unfinished batch that reads this file."""
        return next((each for each in self.open_batches if each.input_file_id == file_id), None)

    def enter(self, batch: Batch, status: BatchStatus) -> None:
        """Set and write a batch's status. If it cannot be written, a restarted front repeats the preceding work."""
        try:
            self.record(batch, status)
        except OSError as error:
            _LOG.error("cannot write that %s is %s: %s", batch.id, status, error)

    def record(self, batch: Batch, status: BatchStatus) -> None:
        """Set and write a batch's status.

        Raises:
            OSError: The status cannot be written.
        """
        self.show(batch, status)
        write_json(self._path_of(batch), asdict(batch))

    def show(self, batch: Batch, status: BatchStatus) -> None:
        """Set a batch's status without writing it."""
        batch.status = status
        batch.times.setdefault(status, int(self._clock()))

    def record_outcome(self, batch: Batch) -> None:
        """Write a batch's outcome, regardless of its shown status: a restarted front then only creates its files.

        Raises:
            OSError: The outcome cannot be written.
        """
        write_json(self._path_of(batch), {**asdict(batch), "status": BatchStatus.FINALIZING})

    def paths_of(self, batch: Batch) -> tuple[Path, Path]:
        """Return the paths of a running batch's answers: the good ones, and the rest."""
        return self._directory / f"{batch.id}.output.jsonl", self._directory / f"{batch.id}.errors.jsonl"

    def expire(self) -> None:
        """Drop ended batches that have expired. While there are too many, drop the oldest of the owner with the most.

        Log those that cannot be removed; the next call tries again.
        """
        now_s = self._clock()
        if now_s >= self._grace_until_s:
            least_s = now_s - LIFETIME_S
            old = [
                each for each in self._ended() if max(each.times.values(), default=each.created_at) < least_s
            ]
            remove_expired("batches", old, self._drop)
        try:
            while self._number.is_over and (ended := self._ended()):
                # max returns the first, oldest batch of this owner.
                self._drop(max(ended, key=lambda each: self._number.held_by(each.owner)))
        except OSError as error:
            _LOG.error("an ended batch cannot be removed now: %s", error)

    def _ended(self) -> list[Batch]:
        return [each for each in self._batches.values() if each.has_ended]

    def _remember(self, batch: Batch) -> None:
        self._batches[batch.id] = batch
        self._number.take(batch.owner, 1)

    def _drop(self, batch: Batch) -> None:
        self._path_of(batch).unlink(missing_ok=True)
        del self._batches[batch.id]
        self._number.give_back(batch.owner, 1)

    def _path_of(self, batch: Batch) -> Path:
        return self._directory / f"{batch.id}.json"


def _batch_of(about: dict[str, Any]) -> Batch:
    outcome = about["outcome"]
    about |= {
        "status": BatchStatus(about["status"]),
        "outcome": None if outcome is None else BatchStatus(outcome),
    }
    return Batch(**about)
