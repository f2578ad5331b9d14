"""The front's hand on the placement: plan, carry out stage by stage, roll back, and decide by itself now and then.

Lives in the front's event loop; planning runs in a thread. A change is cut into stages that the ranks' spare slots
can take; each is told to all ranks, which move, verify and switch by themselves at one step. One that fails on any
rank is dropped on all; the stages before it stay, since each is a whole placement. Versions are never used twice.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from expert_placement.controller import Decision, decide, propose
from expert_placement.eplb_config import EplbConfig
from expert_placement.forecast import calibrated, step_kinds
from expert_placement.history import History
from expert_placement.moves import align
from expert_placement.node_rules import rules_for_repair
from expert_placement.placement import Placement
from expert_placement.proposal import Proposal, Situation, describe
from expert_placement.transfers import stages
from scheduler.placement_report import MoveState, PlacementReport
from server.errors import ApiError, bad_request, not_ready
from server.experts_load import ExpertsLoad
from server.placement_wire import PlacementWord

POLL_S = 0.5  # between looks at whether a decision is due
_NO_CHANGE = ("nothing", "measured")  # kinds of entries that change no placement
_ENDED = (MoveState.SERVING, MoveState.FAILED, MoveState.DROPPED)


class RankCalls(Protocol):
    """What is said to the ranks; `server.ranks.Ranks` says it."""

    num_ranks: int

    def prepare(self, placement: Placement) -> None:
        """Ask all to move and switch."""

    def drop_placement(self, version: int) -> None:
        """Ask all to give up."""


class PlacementControl:
    """Changes the placement of a service, one change at a time."""

    def __init__(
        self,
        ranks: RankCalls,
        load: ExpertsLoad,
        config: EplbConfig,
        history: History,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Start without a placement; rank 0 says which serves."""
        self.current: Placement | None = None
        self.history = history
        load.history = [entry for entry in history.entries if entry["kind"] not in _NO_CHANGE]
        self._ranks, self._load, self._config, self._clock = ranks, load, config, clock
        self._expert_bytes = 0
        self._replaced: Placement | None = None  # by the last change; to measure what it brought
        self._left_out: tuple[str, ...] = ()  # wishes that were said to be left out
        self._last_version = self._switched_at = self._decided_at = 0  # the latter in steps
        self._reports: dict[int, PlacementReport] = {}  # of the stage under way
        self._reported = asyncio.Event()
        self._changing = asyncio.Lock()

    def take_word(self, word: PlacementWord) -> None:
        """Take what a rank says."""
        if word.placement is not None:
            if self.current is None:
                self._go_on_from(word.placement)
            self.current = word.placement
            self._last_version = word.placement.version
            self._expert_bytes = word.expert_bytes
        self._reports[word.report.rank] = word.report
        self._reported.set()

    def _go_on_from(self, start: Placement) -> None:
        """See whether the history's end is where the service starts: only then there is a way back."""
        if self.history.before and self.history.last_digest != start.digest():
            _log(
                "the start is not the placement that the history ends with, so there is nothing to roll back to"
            )
            self._keep(self.history.forget_before)

    def serving(self) -> Placement:
        """The placement that serves.

        Raises:
            ApiError: rank 0 has not attached yet.
        """
        if self.current is None:
            raise not_ready("rank 0 has not said yet where the experts are")
        return self.current

    async def propose(self, kind: str, config: EplbConfig) -> Proposal:
        """Plan by the load seen; nothing changes.

        Args:
            kind: shares, repair, or plan (from nothing).

        Raises:
            ApiError: no load was seen yet, or there are too few slots for what is wished.
        """
        situation = self.situation()
        if not situation.experts_s:
            raise bad_request("No token was served in the window yet, so there is nothing to plan by.")
        self._say_left_out(situation)
        try:
            return await asyncio.to_thread(propose, kind, situation, config)
        except ValueError as error:
            raise bad_request(f"There is no such plan: {error}.") from error

    async def apply(self, target: Placement, kind: str, reason: str, gain: float | None) -> dict[str, Any]:
        """Make a placement serve; returns the history's entry.

        Raises:
            ApiError: another change is under way, or the placement does not fit this service.
        """
        if self._changing.locked():
            raise ApiError(409, "Another change of placement is under way; try again when it has ended.")
        async with self._changing:
            before = self.serving()
            try:
                aligned = align(target, before)
                todo = stages(
                    before.with_version(self._last_version), aligned, most_per_rank=before.slots_per_rank
                )
            except ValueError as error:
                raise bad_request(f"The placement does not fit this service: {error}.") from error
            entry = await self._carry_out(todo, kind, reason, gain)
            if self.current is not before:
                self._replaced = before
                if kind != "rollback":
                    self._keep(lambda: self.history.push(before))
            return entry

    async def rollback(self) -> dict[str, Any]:
        """Make the placement before the last change serve again; returns the history's entry.

        Raises:
            ApiError: there is none, or as `apply`.
        """
        if not self.history.before:
            raise bad_request("There is no placement to go back to: nothing has been changed.")
        previous = self.history.before[-1]
        entry = await self.apply(
            previous, "rollback", f"back to the placement of version {previous.version}", None
        )
        if entry["failed"] is None:
            self._keep(self.history.pop)
        return entry

    async def run(self) -> None:
        """Decide every `step_interval` steps, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            if self.current is None or self._load.totals is None or self._changing.locked():
                continue
            if self._steps() - self._decided_at >= self._config.step_interval:
                self._decided_at = self._steps()
                await self._decide()

    async def _decide(self) -> None:
        situation = self.situation()
        self._say_left_out(situation)
        decision: Decision = await asyncio.to_thread(decide, situation, self._config)
        _log(decision.reason if decision.proposal else f"did nothing, because {decision.reason}")
        measured = self._measured_imbalance()
        if self._config.log_balancedness and measured:
            _log(f"balancedness {1.0 / measured:.4f} (mean rank / fullest rank)")
        if situation.experts_s and situation.num_steps >= self._config.window_size:
            self._measure_last(situation)
        if decision.proposal is None:
            self._note({"kind": "nothing", "reason": decision.reason, "version": self.serving().version})
            return
        proposal = decision.proposal
        try:
            await self.apply(proposal.target, proposal.kind, decision.reason, proposal.gain)
        except ApiError as error:  # somebody else's change came first
            _log(error.message)

    def _measure_last(self, situation: Situation) -> None:
        """Say what the last change brings, by the load and the seconds of a whole window under it."""
        last = self._load.history[-1] if self._load.history else None
        if last is None or last["measured_gain"] is not None or self._replaced is None:
            return
        saved_s = situation.forecast.step_s(self._replaced) - situation.experts_s
        last["measured_gain"] = round(saved_s / (situation.step_s + saved_s), 6)
        said = (
            f"placement {last['version']} saves {1e3 * saved_s:.3f} ms of a step ({last['measured_gain']:.2%}), "
            f"by the load since"
        )
        _log(said)
        measured = {"kind": "measured", "version": last["version"], "measured_gain": last["measured_gain"]}
        self._note({**measured, "reason": said})

    def situation(self) -> Situation:
        """What is known now.

        Raises:
            ApiError: rank 0 has not attached yet.
        """
        current, window = self.serving(), self._load.window
        if window is None:
            raise not_ready("rank 0 has not said yet which experts there are")
        figures = window.figures
        return Situation(
            forecast=calibrated(step_kinds(window), current, self._expert_bytes),
            current=current,
            num_steps=self._steps() - self._switched_at,
            step_s=float(figures.step_s.max()) / max(int(figures.steps.max()), 1),
            expert_bytes=self._expert_bytes,
            hosts=tuple(self._load.hosts.get(rank, "?") for rank in range(self._ranks.num_ranks)),
        )

    def _say_left_out(self, situation: Situation) -> None:
        """Say once which wishes about nodes cannot be granted here."""
        left_out = rules_for_repair(self._config, situation.hosts, situation.current).left_out
        if left_out != self._left_out:
            self._left_out = left_out
            for said in left_out:
                _log(said)

    async def _carry_out(
        self, todo: list[Placement], kind: str, reason: str, gain: float | None
    ) -> dict[str, Any]:
        """Go through stages; returns the entry, whose "failed" says what ended it early."""
        begun_s, imbalance_before = time.monotonic(), self._measured_imbalance()
        moves = num_bytes = done = 0
        failed: str | None = None
        for stage in todo:
            failed = await self._carry_out_stage(stage)
            moves += sum(report.num_moves for report in self._reports.values() if failed is None)
            num_bytes += sum(report.num_bytes for report in self._reports.values() if failed is None)
            if failed is not None:
                break
            self.current, done = stage, done + 1
        self._switched_at = self._steps()
        entry = {
            "kind": kind,
            "version": self.serving().version,
            "digest": self.serving().digest(),
            "reason": reason,
            "predicted_gain": gain,
            "measured_gain": None,
            "moves": moves,
            "bytes": num_bytes,
            "seconds": round(time.monotonic() - begun_s, 3),
            "stages": [done, len(todo)],
            "failed": failed,
            "imbalance_before": imbalance_before,
        }
        return self._note(entry, self.serving() if done else None)

    async def _carry_out_stage(self, stage: Placement) -> str | None:
        """Let all ranks move and switch; returns why it was dropped, None if it serves."""
        self._last_version = stage.version
        self._reports.clear()
        self._ranks.prepare(stage)
        failure: str | None = None
        while not self._have_all_ended():
            self._reported.clear()
            await self._reported.wait()
            failed = [report for report in self._reports.values() if report.state is MoveState.FAILED]
            if failed and failure is None:
                failure = f"rank {failed[0].rank}: {failed[0].reason}"
                _log(f"placement {stage.version} is dropped, because of {failure}")
                self._ranks.drop_placement(stage.version)
        return failure

    def _have_all_ended(self) -> bool:
        ended = [report for report in self._reports.values() if report.state in _ENDED]
        return len(ended) == self._ranks.num_ranks

    def _measured_imbalance(self) -> float | None:
        """Fullest rank over mean rank, of the tokens that ranks really got in the window; None without any."""
        if self._load.window is None:
            return None
        tokens = self._load.window.rank_tokens()
        mean = float(tokens.mean(axis=1).sum())
        return round(float(tokens.max(axis=1).sum()) / mean, 6) if mean else None

    def _note(self, entry: dict[str, Any], serving: Placement | None = None) -> dict[str, Any]:
        entry = {"time": round(self._clock(), 3), **entry}
        self._keep(lambda: self.history.add(entry, serving))
        if entry["kind"] not in _NO_CHANGE:
            self._load.history.append(entry)
            _log(
                f"{entry['kind']}: placement {entry['version']} serves, {entry['moves']} moves, "
                f"{entry['bytes'] / 1e6:.1f} MB in {entry['seconds']:.1f} s"
            )
        return entry

    def _keep(self, write: Callable[[], object]) -> None:
        """Write to the history; a full disk is no reason to stop."""
        try:
            write()
        except OSError as error:
            _log(f"the history cannot be written: {error}")

    def _steps(self) -> int:
        return 0 if self._load.totals is None else int(self._load.totals.steps.max())


def summary(proposal: Proposal) -> dict[str, Any]:
    """A proposal as JSON, but for its placement."""
    return {
        "kind": proposal.kind,
        "imbalance_before": round(proposal.imbalance_before, 6),
        "imbalance_after": round(proposal.imbalance_after, 6),
        "predicted_gain": round(proposal.gain, 6),
        "predicted_saved_s": round(proposal.saved_s, 9),  # of a step
        "experts_s": {
            now.name: {
                "share": round(now.share, 6),
                "before": round(now.seconds, 9),
                "after": round(then.seconds, 9),
            }
            for now, then in zip(proposal.before, proposal.after, strict=True)
        },
        "moves": proposal.moves,
        "bytes": proposal.num_bytes,
        "seconds": round(proposal.seconds, 3),
        "reason": describe(proposal),
    }


def _log(text: str) -> None:
    print(f"wideep experts: {text}", file=sys.stderr, flush=True)
