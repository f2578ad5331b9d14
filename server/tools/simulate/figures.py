"""Results of a simulation: latencies, goodput, waits by cause, imbalance and caches, as values and as JSON.

Waits by cause: the time of a step is computed again with one cause after another made even (experts, prompt tokens, decode
rows, contexts); each reduction is the time that ranks waited for this cause. The sum is the total cost of uneven ranks. This
is done for one step in CAUSE_EVERY.
"""

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from scheduler.policy.scheduler import SchedulerStats
from server.front.routing.loads import MoveCause
from server.tools.simulate.rank import Rows
from server.tools.size.costs.step_times import StepCost, StepTimes

CAUSE_EVERY = 16
CAUSES = ("experts", "prefill", "decode_rows", "contexts")
_GAP_BINS = 200  # for times between tokens, per factor e: half a percent each
PERCENTILES = (50, 90, 99)


class RequestOutcome(NamedTuple):
    """The outcome of a request."""

    arrival_s: float
    first_s: float
    last_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int  # of the answer
    is_served: bool


@dataclass(frozen=True, kw_only=True)
class Slo:
    """The limits for a good request, in milliseconds. None sets no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """The results. Latencies are in milliseconds; shares are 0 to 1."""

    num_requests: int
    num_refused: int
    duration_s: float  # from the first arrival to the last token
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float  # requests within the limits of the SLO
    good_share: float
    ttft_ms: dict[str, float]  # mean and percentiles
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    num_steps: int
    step_ms: float  # mean
    busy_share: float  # share of the duration in steps
    step_parts: dict[str, float]  # shares of the steps' time
    waiting_share: float  # of all ranks' time in steps
    waits_by_cause: dict[str, float]  # shares of the steps' time
    balancedness: dict[str, float]  # mean over max of ranks, weighted by the amounts
    kv_usage: dict[str, float]  # mean and maximum; empty if the run ended before the first sample
    num_preemptions: int
    prefix_hit_rate: float  # share of prompt tokens
    num_request_moves: int  # waiting requests moved to another rank
    num_running_moves: int  # running requests moved to another rank, instead of preemptions
    num_expert_moves: int = 0
    num_hand_overs: int = 0
    hand_over_ms: dict[str, float] = field(
        default_factory=dict
    )  # from the first token to the second; empty without any
    hand_over_computed_tokens: float = 0.0  # mean prompt tokens that the second rank computed again

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


class SimulationFigures:
    """Collects the events of a run and makes the report."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.num_events = 0  # ended requests
        self.num_request_moves: Counter[MoveCause] = Counter()
        self._ttft_s, self._tpot_s, self._e2e_s = array("d"), array("d"), array("d")
        self._has_tpot = array("b")
        self._gaps: Counter[int] = Counter()
        self._gap_total_ns = 0  # an integer, so that the sum does not depend on the order
        self._num_refused = 0
        self._tokens = [0, 0, 0]  # prompt, cached, output
        self._hand_over_s, self._hand_over_tokens = array("d"), 0
        self._num_steps = 0
        self._step_s = 0.0
        self._parts = np.zeros(5)  # total, attention, experts, dispatch, other; of the mean rank
        self._waiting_s = 0.0  # mean over ranks
        self._causes = np.zeros(len(CAUSES))
        self._causes_of_s = 0.0
        self._most, self._mean = np.zeros(len(Rows._fields)), np.zeros(len(Rows._fields))
        self._balanced_s = 0.0
        self._kv: list[tuple[float, float]] = []
        self._end_s = self._first_arrival_s = 0.0
        self._stats: list[SchedulerStats] = []

    def note_step(self, rows: np.ndarray, cost: StepCost, balancedness: float, times: StepTimes) -> None:
        """Record a step.

        Args:
            rows: [fields of `Rows`, ranks of the pool].
            times: Model of step times that computed the cost.
        """
        self._num_steps += 1
        total_s, share = cost.total_s, rows.shape[1] / self._num_ranks
        self._step_s += total_s
        self._parts += share * np.array(
            (total_s, cost.attention_s, cost.experts_s, cost.dispatch_s, cost.other_s)
        )
        self._waiting_s += sum(cost.waiting_s) / self._num_ranks
        self._most += rows.max(axis=1)
        self._mean += rows.sum(axis=1) / rows.shape[1]
        self._balanced_s += balancedness * total_s * share
        if self._num_steps % CAUSE_EVERY == 0:
            self._causes += share * causes_of(rows, total_s, times)
            self._causes_of_s += share * total_s

    def note_gaps(self, seconds: float, count: int) -> None:
        """Record `count` tokens that arrived `seconds` after the previous ones."""
        if count:
            self._gaps[math.floor(math.log(max(seconds, 1e-9)) * _GAP_BINS)] += count
            self._gap_total_ns += round(seconds * 1e9) * count

    def note_hand_over(self, seconds: float, num_computed_tokens: int) -> None:
        """Record the time from the token of the rank that ran a prompt to the next one, and prompt tokens computed again."""
        self._hand_over_s.append(seconds)
        self._hand_over_tokens += num_computed_tokens

    def note_cache(self, usage: Sequence[float]) -> None:
        """Record the share of blocks in use on each rank."""
        self._kv.append((sum(usage) / len(usage), max(usage)))

    def note_end(self, outcome: RequestOutcome) -> None:
        """Record the end of a request."""
        self.num_events += 1
        if not outcome.is_served:
            self._num_refused += 1
            return
        for index, count in enumerate(
            (outcome.num_prompt_tokens, outcome.num_cached_tokens, outcome.num_tokens)
        ):
            self._tokens[index] += count
        self._ttft_s.append(outcome.first_s - outcome.arrival_s)
        self._tpot_s.append((outcome.last_s - outcome.first_s) / max(1, outcome.num_tokens - 1))
        self._has_tpot.append(outcome.num_tokens > 1)
        self._e2e_s.append(outcome.last_s - outcome.arrival_s)

    def end(self, now_s: float, stats: list[SchedulerStats]) -> None:
        """Record the end of the run, and the ranks' counters."""
        self._end_s, self._stats = now_s, stats

    def report(self, slo: Slo, *, num_expert_moves: int = 0) -> SimulationReport:
        """Return the results."""
        ttft_ms, tpot_ms, e2e_ms = (
            1e3 * np.frombuffer(each, dtype=np.float64) if each else np.zeros(0)
            for each in (self._ttft_s, self._tpot_s, self._e2e_s)
        )
        has_tpot = np.frombuffer(self._has_tpot, dtype=np.int8) > 0 if self._has_tpot else np.zeros(0, bool)
        good = np.ones(len(ttft_ms), dtype=bool)
        for bound, found in ((slo.ttft_ms, ttft_ms), (slo.tpot_ms, tpot_ms), (slo.e2e_ms, e2e_ms)):
            good &= found <= (math.inf if bound is None else bound)
        seconds, total_s = max(self._end_s, 1e-9), max(self._parts[0], 1e-9)
        steps, num_good = max(self._num_steps, 1), int(good.sum())
        queried = sum(each.prefix_query_tokens for each in self._stats)
        hits = sum(each.prefix_hit_tokens for each in self._stats)
        if self._hand_over_s:  # the second rank of a request finds what the first one has computed
            queried, hits = self._tokens[0], self._tokens[1]
        return SimulationReport(
            num_requests=self.num_events,
            num_refused=self._num_refused,
            duration_s=self._end_s,
            requests_per_s=len(ttft_ms) / seconds,
            prompt_tokens_per_s=self._tokens[0] / seconds,
            output_tokens_per_s=self._tokens[2] / seconds,
            goodput_per_s=num_good / seconds,
            good_share=num_good / max(1, self.num_events),
            ttft_ms=_summary(ttft_ms),
            tpot_ms=_summary(tpot_ms[has_tpot]),
            itl_ms=self._gap_summary(),
            e2e_ms=_summary(e2e_ms),
            num_steps=self._num_steps,
            step_ms=float(1e3 * self._step_s / steps),
            busy_share=float(self._parts[0] / seconds),
            step_parts=dict(
                zip(
                    ("attention", "experts", "dispatch", "other"),
                    (self._parts[1:] / total_s).tolist(),
                    strict=True,
                )
            ),
            waiting_share=float(self._waiting_s / total_s),
            waits_by_cause=dict(
                zip(CAUSES, (self._causes / max(self._causes_of_s, 1e-9)).tolist(), strict=True)
            ),
            balancedness={
                "experts": float(self._balanced_s / total_s),
                **dict(
                    zip(
                        ("prefill", "decode_rows", "contexts"),
                        np.divide(self._mean, self._most, out=np.ones_like(self._mean), where=self._most > 0)[
                            :3
                        ].tolist(),
                        strict=True,
                    )
                ),
            },
            kv_usage=self._kv_usage(),
            num_preemptions=sum(each.num_preemptions for each in self._stats),
            prefix_hit_rate=hits / max(1, queried),
            num_request_moves=self.num_request_moves[MoveCause.QUEUE],
            num_running_moves=self.num_request_moves[MoveCause.MEMORY],
            num_expert_moves=num_expert_moves,
            num_hand_overs=self.num_request_moves[MoveCause.HAND_OVER],
            hand_over_ms=_summary(1e3 * np.frombuffer(self._hand_over_s)) if self._hand_over_s else {},
            hand_over_computed_tokens=self._hand_over_tokens / max(1, len(self._hand_over_s)),
        )

    def _kv_usage(self) -> dict[str, float]:
        if not self._kv:
            return {}
        means, most = zip(*self._kv, strict=True)
        return {"mean": statistics.fmean(means), "most": max(most)}

    def _gap_summary(self) -> dict[str, float]:
        """Return the same as `_summary`, from bins."""
        bins = sorted(self._gaps.items())
        total = sum(count for _, count in bins)
        if not total:
            return _summary(np.zeros(0))
        until = np.cumsum([count for _, count in bins])
        found = {"mean": 1e-6 * self._gap_total_ns / total}
        for percent in PERCENTILES:
            index = int(np.searchsorted(until, percent / 100 * total))
            found[f"p{percent}"] = 1e3 * math.exp((bins[index][0] + 0.5) / _GAP_BINS)
        return found


def causes_of(rows: np.ndarray, total_s: float, times: StepTimes) -> np.ndarray:
    """Return the seconds by which a step shortens when the causes are made even one after another: [causes].

    Args:
        rows: [fields of `Rows`, ranks].
    """
    prefill, decode, attended, of_prompts = rows.astype(np.float64)
    even = np.ones(rows.shape[1])
    row_context = attended - of_prompts
    seconds = [total_s, times.step(rows.T, 1.0).total_s]
    mean_prompts = of_prompts.mean()
    prefill, of_prompts = even * prefill.mean(), even * mean_prompts
    seconds.append(_seconds(times, prefill, decode, row_context + of_prompts, of_prompts))
    # First the same number of rows on each rank, with its own mean context; then the same context.
    decodes = even * decode.mean()
    own_context = np.divide(
        row_context, decode, out=even * row_context.sum() / max(decode.sum(), 1.0), where=decode > 0
    )
    scaled = own_context * decodes
    scaled *= row_context.sum() / max(scaled.sum(), 1e-9)
    seconds.append(_seconds(times, prefill, decodes, scaled + of_prompts, of_prompts))
    context = even * row_context.mean()
    seconds.append(_seconds(times, prefill, decodes, context + of_prompts, of_prompts))
    result: np.ndarray = -np.diff(seconds)
    return result


def _seconds(times: StepTimes, *rows: np.ndarray) -> float:
    return times.step(np.stack(rows, axis=1), 1.0).total_s


def _summary(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys(("mean", *(f"p{percent}" for percent in PERCENTILES)), 0.0)
    found = np.percentile(values, PERCENTILES).tolist()
    mean = math.fsum(values) / len(values)  # exact: requests that end in one step come in any order
    return {"mean": mean} | {f"p{p}": v for p, v in zip(PERCENTILES, found, strict=True)}
