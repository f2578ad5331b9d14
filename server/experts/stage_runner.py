"""Let all ranks carry out one stage of a change, and hear how it ended on each.

Every rank moves, verifies and reports by itself; the switch is theirs too. One that fails makes all drop the stage.
"""

import asyncio
from typing import NamedTuple, Protocol

from expert_placement.placement import Placement
from scheduler.moves.reports import Cause, MoveState, PlacementReport

_ENDED = (MoveState.SERVING, MoveState.FAILED, MoveState.DROPPED)


class RankCalls(Protocol):
    """What is said to the ranks; `server.link.ranks.Ranks` says it."""

    num_ranks: int

    def prepare(self, placement: Placement) -> None:
        """Ask all to move and switch."""

    def drop_placement(self, version: int) -> None:
        """Ask all to give up."""


class StageResult(NamedTuple):
    """How a stage ended."""

    moves: int
    num_bytes: int
    failed: str | None  # None: it serves
    cause: Cause


class StageRunner:
    """Runs one stage at a time."""

    def __init__(self, ranks: RankCalls) -> None:
        self._ranks = ranks
        self._version: int | None = None  # of the stage under way
        self._reports: dict[int, PlacementReport] = {}  # on it
        self._reported = asyncio.Event()
        self._why_ended: str | None = None  # early

    def take_report(self, report: PlacementReport) -> None:
        """Take what a rank says; other stages than that under way are over."""
        if report.version == self._version:
            self._reports[report.rank] = report
            self._reported.set()

    def end_epoch(self, reason: str) -> None:
        """Give up the stage under way: the ranks go on with another placement."""
        self._why_ended = reason
        self._reported.set()

    async def run(self, stage: Placement) -> StageResult:
        """Let all ranks move and switch, or drop it."""
        self._version, self._why_ended = stage.version, None
        self._reports.clear()
        self._ranks.prepare(stage)
        is_dropped = False
        while self._why_ended is None and not self._have_all_ended():
            self._reported.clear()
            await self._reported.wait()
            if not is_dropped and self._failure() is not None:
                self._ranks.drop_placement(stage.version)
                is_dropped = True
        self._version = None
        if self._why_ended is not None:  # even if all had switched: what serves now was made without knowing
            return StageResult(0, 0, self._why_ended, Cause.EPOCH)
        if (failure := self._failure()) is not None:
            return StageResult(0, 0, f"rank {failure.rank}: {failure.reason}", failure.cause)
        reports = self._reports.values()
        return StageResult(
            sum(report.num_moves for report in reports),
            sum(report.num_bytes for report in reports),
            None,
            Cause.NONE,
        )

    def _failure(self) -> PlacementReport | None:
        """The first that failed, by what began it rather than by who lost a connection over it."""
        failed = [report for report in self._reports.values() if report.state is MoveState.FAILED]
        return min(failed, key=lambda report: report.cause is Cause.CHANNEL, default=None)

    def _have_all_ended(self) -> bool:
        ended = [report for report in self._reports.values() if report.state in _ENDED]
        return len(ended) == self._ranks.num_ranks
