"""Control of the placement: plan, apply in stages, roll back, and rebalance automatically.

Runs in the front's event loop; planning runs in a thread. A change is split into stages that fit the ranks' spare slots.
Each stage is sent to all ranks, which move, verify and switch by themselves at one step. If a stage fails on any rank, it is
dropped on all. Earlier stages stay, because each is a complete placement. Version numbers are never reused.

`home` is the placement of all ranks. While a rank is away, the others serve with a placement derived from it, and no
change is allowed; a change in progress ends.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from expert_placement.config import EplbConfig
from expert_placement.control import PlacementDecision, Proposal, Situation, decide, propose
from expert_placement.forecast import calibrated, step_kinds
from expert_placement.history import History
from expert_placement.moves import align, stages
from expert_placement.nodes import rules_for_repair
from expert_placement.placement import Placement
from scheduler.epochs.orders import Order
from scheduler.moves.reports import Cause, MoveState, PlacementReport
from server.experts.load import ExpertsLoad
from server.front.errors import ApiError, bad_request, not_ready
from server.link.messages import DropPlacement, PlacementUpdate, Prepare
from server.machine.lines import say

POLL_S = 0.5  # interval of checks for a due decision
_NO_CHANGE = ("nothing", "measured")  # kinds of entries that change no placement
_ENDED = (MoveState.SERVING, MoveState.FAILED, MoveState.DROPPED)


class RankCalls(Protocol):
    """Messages to the ranks of a pool, implemented by `server.link.ranks.PoolRanks`."""

    num_ranks: int

    def resize(self, num_ranks: int) -> None:
        """Change the number of ranks."""

    def post_all(self, message: Prepare | DropPlacement) -> None:
        """Send a message to all ranks."""


class StageResult(NamedTuple):
    """The result of a stage."""

    moves: int
    num_bytes: int
    failed: str | None  # the reason, or None if the stage serves
    cause: Cause


class StageRunner:
    """Runs one stage at a time on all ranks, and collects their reports.

    Each rank moves, verifies, switches and reports by itself. If one fails, all ranks drop the stage.
    """

    def __init__(self, ranks: RankCalls) -> None:
        self._ranks = ranks
        self._version: int | None = None  # of the current stage
        self._reports: dict[int, PlacementReport] = {}  # on it
        self._reported = asyncio.Event()
        self._why_ended: str | None = None  # set if it ends early

    def take_report(self, report: PlacementReport) -> None:
        """Record a rank's report. Reports on earlier stages are ignored."""
        if report.version == self._version:
            self._reports[report.rank] = report
            self._reported.set()

    def end_epoch(self, reason: str) -> None:
        """End the current stage, because the ranks continue with another placement."""
        self._why_ended = reason
        self._reported.set()

    async def run(self, stage: Placement) -> StageResult:
        """Run a stage on all ranks until it serves or is dropped."""
        self._version, self._why_ended = stage.version, None
        self._reports.clear()
        self._ranks.post_all(Prepare(stage))
        is_dropped = False
        while self._why_ended is None and not self._have_all_ended():
            self._reported.clear()
            await self._reported.wait()
            if not is_dropped and self._failure() is not None:
                self._ranks.post_all(DropPlacement(stage.version))
                is_dropped = True
        self._version = None
        if self._why_ended is not None:  # even if all had switched: the new placement ignores this stage
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
        """Return the failed report to blame. A lost connection is usually only a consequence of another failure."""
        failed = [report for report in self._reports.values() if report.state is MoveState.FAILED]
        return min(failed, key=lambda report: report.cause is Cause.CHANNEL, default=None)

    def _have_all_ended(self) -> bool:
        ended = [report for report in self._reports.values() if report.state in _ENDED]
        return len(ended) == self._ranks.num_ranks


class PlacementControl:
    """Changes the placement of a pool, one change at a time."""

    def __init__(
        self,
        ranks: RankCalls,
        load: ExpertsLoad,
        config: EplbConfig,
        history: History,
        *,
        clock: Callable[[], float] = time.time,
        why_no_change: Callable[[], str | None] = lambda: None,
        pool: str = "",
    ) -> None:
        """Start without a placement, until the first rank reports the one that serves.

        Args:
            pool: The pool's name in messages; "" if it is the only one.
            why_no_change: Returns why nothing may change now, or None if all ranks serve.
        """
        self.current: Placement | None = None  # over the places of the members
        self.home: Placement | None = None  # over all ranks
        self.history = history
        load.history.extend(_shown(history))
        self._load, self._config, self._clock = load, config, clock
        self._ranks, self._num_ranks, self._stages = ranks, ranks.num_ranks, StageRunner(ranks)
        self.expert_bytes = 0  # of one expert of one layer
        self._unmeasured: _Change | None = None  # the last change, until its gain is measured
        self._left_out: tuple[str, ...] = ()  # omitted rules that were logged
        self._last_version = self._switched_at = self._decided_at = 0  # the last two in steps
        self._changing: asyncio.Task[dict[str, Any]] | None = None  # the last change
        self._under_way: _UnderWay | None = None
        self.num_changes = max((entry.get("change", 0) for entry in history.entries), default=0)
        self._why_no_change = why_no_change
        self._of_pool = f" of pool {pool}" if pool else ""

    def take_update(self, update: PlacementUpdate) -> None:
        """Record a rank's update."""
        # A rank that returns reports the placement that it began with.
        if update.placement is not None and self.home is None:
            self._go_on_from(update.placement)
            self.current = self.home = update.placement
            self.skip_versions(update.placement.version)
            self.expert_bytes = update.expert_bytes
        self._stages.take_report(update.report)

    def skip_versions(self, newest: int) -> None:
        """Skip version numbers that ranks know from an earlier front."""
        self._last_version = max(self._last_version, newest)

    def _go_on_from(self, start: Placement) -> None:
        """Forget the placements to roll back to, unless the service starts with the last one of the history."""
        if self.history.before and self.history.last_digest != start.digest():
            self._log(
                "the start is not the last placement of the history, so there is nothing to roll back to"
            )
            self._keep(self.history.forget_before)

    def serving(self) -> Placement:
        """Return the placement that serves.

        Raises:
            ApiError: Rank 0 has not attached yet.
        """
        if self.current is None:
            raise not_ready("the expert placement is not known yet")
        return self.current

    def next_version(self) -> int:
        """Return an unused version number."""
        self._last_version += 1
        return self._last_version

    def resize(self, home: Placement) -> None:
        """Change the number of ranks. `home` is the placement over all of them. An order follows."""
        self._num_ranks, self.home = home.num_ranks, home
        self._ranks.resize(home.num_ranks)

    def regroup(self, order: Order, reason: str) -> None:
        """Record the start of an epoch with another placement.

        Args:
            reason: The missing ranks and their reasons, or "" if no rank is away.
        """
        self._stages.end_epoch(f"the epoch ended ({reason})" if reason else "the epoch ended")
        self.current = order.placement
        if len(order.members) == self._num_ranks:
            self.home = order.placement
        self._switched_at = self._steps()

    async def propose(self, kind: str, config: EplbConfig) -> Proposal:
        """Plan for the load in the window, without changing anything.

        Args:
            kind: shares, repair, or plan (from scratch).

        Raises:
            ApiError: There was no load in the window, or too few slots for the request.
        """
        self._check_whole()
        situation = self.situation()
        if not situation.experts_s:
            raise bad_request("No tokens were served in the load window. Send requests, then plan.")
        self._say_left_out(situation)
        try:
            return await asyncio.to_thread(propose, kind, situation, config)
        except ValueError as error:
            raise bad_request(f"Such a plan is impossible: {error}.") from error

    async def apply(self, target: Placement, kind: str, reason: str, gain: float | None) -> dict[str, Any]:
        """Switch to a placement. Returns the history's entry; its "failed" has the reason if the change ended early.

        Raises:
            ApiError: As for `begin`.
        """
        return await asyncio.shield(self.begin(target, kind, reason, gain))

    def begin(
        self, target: Placement, kind: str, reason: str, gain: float | None
    ) -> "asyncio.Task[dict[str, Any]]":
        """Begin to switch to a placement. The task returns the history's entry, which has the number `num_changes`.

        Raises:
            ApiError: Another change is in progress, a rank is away, or the placement does not fit this service.
        """
        self._check_whole()
        if self.is_changing:
            raise ApiError(
                409, "Another change of the placement is in progress. Try again when it has ended."
            )
        before = self.serving()
        try:
            aligned = align(target, before)
            todo = stages(
                before.with_version(self._last_version), aligned, most_per_rank=before.slots_per_rank
            )
        except ValueError as error:
            raise bad_request(f"The placement does not fit this service: {error}.") from error
        self.num_changes += 1
        self._under_way = _UnderWay(self.num_changes, kind, len(todo))
        self._changing = asyncio.create_task(self._change(before, todo, kind, reason, gain))
        self._changing.add_done_callback(self._say_error)
        return self._changing

    def begin_rollback(self) -> "asyncio.Task[dict[str, Any]]":
        """Begin to switch back to the placement before the last change, like `begin`.

        Raises:
            ApiError: There is no earlier placement, or as for `begin`.
        """
        if not self.history.before:
            raise bad_request("There is no earlier placement to roll back to.")
        previous = self.history.before[-1]
        return self.begin(previous, "rollback", f"back to the placement of version {previous.version}", None)

    @property
    def is_changing(self) -> bool:
        """Whether a change is in progress."""
        return self._changing is not None and not self._changing.done()

    def progress(self) -> dict[str, Any] | None:
        """Return the change in progress as JSON: number, kind and stages (done, all). Returns None without one."""
        if not self.is_changing or self._under_way is None:
            return None
        number, kind, num_stages, done = self._under_way
        return {"change": number, "kind": kind, "stages": [done, num_stages]}

    async def _change(
        self, before: Placement, todo: list[Placement], kind: str, reason: str, gain: float | None
    ) -> dict[str, Any]:
        entry = await self._carry_out(before, todo, kind, reason, gain)
        if entry["stages"][0]:
            self._unmeasured = _Change(entry, before)
            if kind != "rollback":
                self._keep(lambda: self.history.push(before))
        if kind == "rollback" and entry["failed"] is None:
            self._keep(self.history.pop)
        return entry

    async def run(self) -> None:
        """Decide every `step_interval` steps, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            if self.current is None or self._load.totals is None or self.is_changing:
                continue
            if self._why_no_change() is not None:
                continue
            if self._steps() - self._decided_at >= self._config.step_interval:
                self._decided_at = self._steps()
                await self._decide()

    async def _decide(self) -> None:
        situation = self.situation()
        self._say_left_out(situation)
        decision: PlacementDecision = await asyncio.to_thread(decide, situation, self._config)
        self._load.changes.decisions["nothing" if decision.proposal is None else decision.proposal.kind] += 1
        self._log(decision.reason if decision.proposal else f"did nothing, because {decision.reason}")
        measured = self._measured_imbalance()
        if self._config.log_balancedness and measured:
            self._log(f"balancedness {1.0 / measured:.4f} (mean rank / fullest rank)")
        if situation.experts_s and situation.num_steps >= self._config.window_size:
            self._measure_last(situation)
        if decision.proposal is None:
            self._note({"kind": "nothing", "reason": decision.reason, "version": self.serving().version})
            return
        proposal = decision.proposal
        try:
            await self.apply(proposal.target, proposal.kind, decision.reason, proposal.gain)
        except ApiError as error:  # another change came first
            self._log(error.message)

    def _measure_last(self, situation: Situation) -> None:
        """Record the measured gain of the last change, from the load and times of a whole window since then."""
        if self._unmeasured is None:
            return
        last, replaced = self._unmeasured
        self._unmeasured = None
        saved_s = situation.forecast.step_s(replaced) - situation.experts_s
        last["measured_gain"] = round(saved_s / (situation.step_s + saved_s), 6)
        self._load.revision += 1
        said = (
            f"placement {last['version']} saves {1e3 * saved_s:.3f} ms per step ({last['measured_gain']:.2%}) "
            f"under the load since then"
        )
        self._log(said)
        measured = {"kind": "measured", "version": last["version"], "measured_gain": last["measured_gain"]}
        self._note({**measured, "reason": said})

    def situation(self) -> Situation:
        """Return the facts for a decision.

        Raises:
            ApiError: Rank 0 has not attached yet.
        """
        current, window = self.serving(), self._load.window
        if window is None:
            raise not_ready("the experts are not known yet")
        figures = window.figures
        return Situation(
            forecast=calibrated(step_kinds(window), current, self.expert_bytes),
            current=current,
            num_steps=self._steps() - self._switched_at,
            step_s=max(each.step_s for each in figures) / max(1, *(each.steps for each in figures)),
            expert_bytes=self.expert_bytes,
            hosts=tuple(
                self._load.hosts.get(self._load.first_rank + place, "?") for place in range(self._num_ranks)
            ),
        )

    def _check_whole(self) -> None:
        """Raise unless all ranks serve."""
        if (reason := self._why_no_change()) is not None:
            raise ApiError(409, f"The placement cannot change now: {reason}. Try again when all ranks serve.")

    def _say_left_out(self, situation: Situation) -> None:
        """Log once which rules about nodes this service cannot follow."""
        left_out = rules_for_repair(self._config, situation.hosts, situation.current).left_out
        if left_out != self._left_out:
            self._left_out = left_out
            for said in left_out:
                self._log(said)

    async def _carry_out(
        self, before: Placement, todo: list[Placement], kind: str, reason: str, gain: float | None
    ) -> dict[str, Any]:
        """Run stages. Returns the entry; its "failed" has the reason if the change ended early."""
        begun_s, imbalance_before = time.monotonic(), self._measured_imbalance()
        moves = num_bytes = done = 0
        failed, cause = None, Cause.NONE
        self._load.changes.is_under_way = True
        for stage in todo:
            if self.current is not before:  # an epoch ended before this task started
                failed, cause = "the epoch ended before it began", Cause.EPOCH
                break
            self._last_version = stage.version
            stage_moves, stage_bytes, failed, cause = await self._stages.run(stage)
            if failed is not None:
                break
            self.current = self.home = before = stage
            done += 1
            if self._under_way is not None:
                self._under_way = self._under_way._replace(done=done)
            moves, num_bytes = moves + stage_moves, num_bytes + stage_bytes
        self._load.changes.is_under_way = False
        self._switched_at = self._steps()
        assert self.home is not None, "a change begins at home"
        entry = {
            "change": self.num_changes,
            "kind": kind,
            "version": self.home.version,
            "digest": self.home.digest(),
            "reason": reason,
            "predicted_gain": gain,
            "measured_gain": None,
            "moves": moves,
            "bytes": num_bytes,
            "seconds": round(time.monotonic() - begun_s, 3),
            "stages": [done, len(todo)],
            "failed": failed,
            "cause": cause.value,
            "imbalance_before": imbalance_before,
        }
        return self._note(entry, self.home if done else None)

    def _measured_imbalance(self) -> float | None:
        """Return fullest rank over mean rank, of the tokens that ranks got in the window, or None without tokens."""
        if self._load.window is None:
            return None
        tokens = self._load.window.rank_tokens()
        mean = float(tokens.mean(axis=1).sum())
        return round(float(tokens.max(axis=1).sum()) / mean, 6) if mean else None

    def _note(self, entry: dict[str, Any], serving: Placement | None = None) -> dict[str, Any]:
        entry = {"time": round(self._clock(), 3), **entry}
        self._keep(lambda: self.history.add(entry, serving))
        if entry["kind"] not in _NO_CHANGE:
            self._load.note_change(entry)
            done, num_stages = entry["stages"]
            dropped = f"dropped after {done} of {num_stages} stages, because of {entry['failed']}; "
            self._log(
                f"{entry['kind']}: {dropped if entry['failed'] else ''}placement {entry['version']} serves, "
                f"{entry['moves']} moves, {entry['bytes'] / 1e6:.1f} MB in {entry['seconds']:.1f} s"
            )
        return entry

    def _keep(self, write: Callable[[], object]) -> None:
        """Write to the history. A full disk must not stop the service."""
        try:
            write()
        except OSError as error:
            self._log(f"cannot write the history: {error}")

    def _log(self, text: str) -> None:
        say(f"wideep experts{self._of_pool}: {text}", error=True, level="info")

    def _say_error(self, task: "asyncio.Task[dict[str, Any]]") -> None:
        """Log the error of a change, because no client may be waiting for it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log(f"a change of the placement failed with an internal error: {error!r}")

    def _steps(self) -> int:
        return 0 if self._load.totals is None else max(each.steps for each in self._load.totals.values())


class _UnderWay(NamedTuple):
    """The progress of a change."""

    number: int
    kind: str
    num_stages: int
    done: int = 0


class _Change(NamedTuple):
    """A change that serves."""

    entry: dict[str, Any]
    replaced: Placement


def _shown(history: History) -> list[dict[str, Any]]:
    """Return the changes of a history with their measured gains."""
    gains = {e["version"]: e["measured_gain"] for e in history.entries if e["kind"] == "measured"}
    changes = (entry for entry in history.entries if entry["kind"] not in _NO_CHANGE)
    return [
        {**entry, "measured_gain": gains.get(entry["version"], entry["measured_gain"])} for entry in changes
    ]
