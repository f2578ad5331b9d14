"""The speed and load of the service, for a log line and for GET /throughput, which the dashboard displays.

Rates cover the last ten seconds. The line has the content of vLLM's, and is written every ten seconds while there is traffic.
Prometheus has the same figures from `metrics`; this is for services without Prometheus. `Metrics` feeds the counts.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvcache.tiers.figures import TierFigures
from scheduler.policy.request import NO_DRAFTS, RankStats
from server.front.admission import predicted_wait_s
from server.http.observability.percentiles import WindowedPercentiles
from server.http.observability.series import EVERY_S, Series
from server.link.messages import RankFacts

_OF_FRONT = ("prompt_tokens", "output_tokens", "refused", "busy", "failed")  # counted by each front
WINDOW_S = 10.0  # for rates, and between log lines
_LOG = logging.getLogger("wideep.throughput")


class LatencyTargets(NamedTuple):
    """Times in milliseconds that requests should meet. None disables a target."""

    ttft_ms: float | None = None  # to the first token
    itl_ms: float | None = None  # between two tokens


NO_TARGETS = LatencyTargets()


class Speed(NamedTuple):
    """The service at one moment. Rates and shares cover the last `WINDOW_S`."""

    prompt_tokens_per_s: float  # of requests that got their first token
    generation_tokens_per_s: float
    running: int  # requests on all ranks
    waiting: int
    kv_usage: float  # share of used KV blocks on all ranks
    ttft_s: float | None  # mean, or None without a first token
    ttft_max_s: float | None
    prefix_hit_rate: float | None  # share of looked-up prompt tokens, or None without any
    # Parts of `prefix_hit_rate` that tiers contributed, or None without tiers.
    host_hit_rate: float | None = None
    disk_hit_rate: float | None = None
    peer_hit_rate: float | None = None  # from other nodes
    draft_acceptance: float | None = None  # share of drafted tokens, or None without any
    # Percentiles, accurate to 5 %, or None if nothing was counted.
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None  # between two tokens of a choice
    itl_p99_s: float | None = None
    e2e_p50_s: float | None = None  # of choices that ended
    e2e_p99_s: float | None = None
    refused_per_s: float = 0.0  # HTTP answers with 4xx except 429
    busy_per_s: float = 0.0  # 429
    failed_per_s: float = 0.0  # 5xx
    ranks: int = 0  # that serve
    seats: int = 0  # requests that they run at once
    predicted_wait_s: float = 0.0  # until all waiting requests have begun, at the pace of the window
    # Shares of first tokens and of times between tokens within the targets; 1 if nothing was counted, None without a target.
    ttft_attainment: float | None = None
    itl_attainment: float | None = None


class PeriodOfFront(NamedTuple):
    """What the requests of one front added to the figures between two calls of `Throughput.tick`."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    refused: int = 0
    busy: int = 0
    failed: int = 0
    first_tokens_s: tuple[float, ...] = ()  # latencies of first tokens
    # Buckets of `WindowedPercentiles`, with their counts.
    ttft: Mapping[int, int] = {}
    itl: Mapping[int, int] = {}
    e2e: Mapping[int, int] = {}


class _Counts(NamedTuple):
    """Counters since the start, at one moment of time.monotonic()."""

    at_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    peer_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    refused: int = 0
    busy: int = 0
    failed: int = 0

    @property
    def work(self) -> tuple[int, int]:
        """Counters that grow while there is traffic."""
        return self.prompt_tokens, self.output_tokens


class Throughput:
    """Records events; call `tick` every `EVERY_S`."""

    def __init__(
        self,
        targets: LatencyTargets = NO_TARGETS,
        *,
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        """Args: clock is monotonic; calendar returns seconds since 1970."""
        self._targets, self._clock, self._calendar = targets, clock, calendar
        self._ranks: dict[int, RankStats] = {}  # of serving ranks
        self._counted: dict[int, RankStats] = {}  # by engine, including one that may return
        self._has_tiers = False
        self._now = _Counts(clock())
        self._before: deque[_Counts] = deque([self._now])  # one per tick
        self._first_tokens: deque[tuple[float, float]] = deque()  # (time, latency) in the last window
        self._line_s = clock()  # when the last line was due
        self._line_counts = self._now
        self._series: Series[Speed] = Series()
        self._begun_s = calendar()
        # By serving rank, with the time.time() of its arrival.
        self._facts: dict[int, tuple[RankFacts, float]] = {}
        periods = round(WINDOW_S / EVERY_S)
        self._ttft, self._itl, self._e2e = (WindowedPercentiles(periods) for _ in range(3))
        self.last_period = PeriodOfFront()  # the one that the last `tick` ended

    def note_first_token(self, ttft_s: float, *, num_prompt_tokens: int) -> None:
        """Record a choice's first token."""
        self._now = self._now._replace(prompt_tokens=self._now.prompt_tokens + num_prompt_tokens)
        self._first_tokens.append((self._clock(), ttft_s))
        self._ttft.note(ttft_s)

    def note_tokens(self, num_tokens: int, gaps_s: Mapping[float, int]) -> None:
        """Record a step's tokens. `gaps_s` has the times since the tokens before, and how many tokens waited as long."""
        self._now = self._now._replace(output_tokens=self._now.output_tokens + num_tokens)
        for gap_s, count in gaps_s.items():
            self._itl.note(gap_s, count)

    def note_end(self, e2e_s: float) -> None:
        """Record a choice's end."""
        self._e2e.note(e2e_s)

    def note_elsewhere(self, period: PeriodOfFront) -> None:
        """Add what the requests of another front added there."""
        now, now_s = self._now, self._clock()
        self._now = now._replace(**{name: getattr(now, name) + getattr(period, name) for name in _OF_FRONT})
        self._first_tokens.extend((now_s, wait_s) for wait_s in period.first_tokens_s)
        for times, buckets in ((self._ttft, period.ttft), (self._itl, period.itl), (self._e2e, period.e2e)):
            times.note_buckets(buckets)

    def note_status(self, status: int) -> None:
        """Record the status of an HTTP answer."""
        now = self._now
        if status == 429:
            self._now = now._replace(busy=now.busy + 1)
        elif status >= 500:
            self._now = now._replace(failed=now.failed + 1)
        elif status >= 400:
            self._now = now._replace(refused=now.refused + 1)

    def note_rank(self, facts: RankFacts) -> None:
        """Record an attached rank's facts."""
        self._facts[facts.rank] = (facts, self._calendar())

    def note_stats(self, stats: RankStats, tiers: TierFigures | None = None) -> None:
        """Record a rank's state after a step. `tiers`: growth of its tiers' counters since the last one; None without tiers."""
        last = self._counted.get(stats.rank)
        query = stats.prefix_query_tokens - (last.prefix_query_tokens if last else 0)
        hit = stats.prefix_hit_tokens - (last.prefix_hit_tokens if last else 0)
        drafts, before = stats.drafts, last.drafts if last else NO_DRAFTS
        tried = drafts.num_draft_tokens - before.num_draft_tokens
        accepted = drafts.num_accepted_tokens - before.num_accepted_tokens
        self._has_tiers = self._has_tiers or tiers is not None
        tiers = tiers or TierFigures()
        self._now = self._now._replace(
            host_tokens=self._now.host_tokens + tiers.host_hit_tokens,
            disk_tokens=self._now.disk_tokens + tiers.disk_hit_tokens,
            peer_tokens=self._now.peer_tokens + tiers.peer_hit_tokens,
            draft_tokens=self._now.draft_tokens + max(0, tried),
            accepted_tokens=self._now.accepted_tokens + max(0, accepted),
            query_tokens=self._now.query_tokens + max(0, query),
            hit_tokens=self._now.hit_tokens + max(0, hit),
        )
        self._ranks[stats.rank] = self._counted[stats.rank] = stats

    def note_lost(self, rank: int) -> None:
        """Record the loss of a rank: it runs and holds nothing. The same engine may return."""
        self._ranks.pop(rank, None)
        self._facts.pop(rank, None)

    def note_new_engine(self, rank: int) -> None:
        """Record that a rank has a new engine, which counts from 0."""
        self._counted.pop(rank, None)

    def tick(self, *, logs: bool = True) -> None:
        """Add a point to the series. With `logs`, also write the line if its time has come and there was traffic."""
        now_s, last = self._clock(), self._before[-1]
        self._now = self._now._replace(at_s=now_s)
        while len(self._before) > 1 and self._before[1].at_s <= now_s - WINDOW_S:
            self._before.popleft()
        while self._first_tokens and self._first_tokens[0][0] < now_s - WINDOW_S:
            self._first_tokens.popleft()
        speed = self.speed()
        grown = {name: getattr(self._now, name) - getattr(last, name) for name in _OF_FRONT}
        self.last_period = PeriodOfFront(
            **grown,
            first_tokens_s=tuple(wait_s for at_s, wait_s in self._first_tokens if at_s >= last.at_s),
            ttft=self._ttft.turn(),
            itl=self._itl.turn(),
            e2e=self._e2e.turn(),
        )
        self._before.append(self._now)
        self._series.note(self._calendar(), speed)
        if now_s - self._line_s >= WINDOW_S - EVERY_S / 2:
            if logs and (speed.running or speed.waiting or self._now.work != self._line_counts.work):
                _LOG.info("%s", in_words(speed), extra={"fields": _rounded(speed)})
            self._line_s, self._line_counts = now_s, self._now

    def speed(self) -> Speed:
        """Return the service's current figures."""
        since, now = self._before[0], self._now
        seconds = max(self._clock() - since.at_s, EVERY_S)
        num_queried = now.query_tokens - since.query_tokens
        of_tiers = num_queried if self._has_tiers else 0
        num_tried = now.draft_tokens - since.draft_tokens
        waits_s = [wait_s for _, wait_s in self._first_tokens]
        ranks = self._ranks.values()
        num_blocks, num_waiting = (
            sum(rank.num_blocks for rank in ranks),
            sum(rank.num_waiting for rank in ranks),
        )
        ttft, itl, e2e = (times.of(0.5, 0.99) for times in (self._ttft, self._itl, self._e2e))
        return Speed(
            prompt_tokens_per_s=(now.prompt_tokens - since.prompt_tokens) / seconds,
            generation_tokens_per_s=(now.output_tokens - since.output_tokens) / seconds,
            running=sum(rank.num_running for rank in ranks),
            waiting=num_waiting,
            kv_usage=1 - sum(rank.num_free_blocks for rank in ranks) / num_blocks if num_blocks else 0.0,
            ttft_s=sum(waits_s) / len(waits_s) if waits_s else None,
            ttft_max_s=max(waits_s, default=None),
            prefix_hit_rate=(now.hit_tokens - since.hit_tokens) / num_queried if num_queried else None,
            host_hit_rate=(now.host_tokens - since.host_tokens) / of_tiers if of_tiers else None,
            disk_hit_rate=(now.disk_tokens - since.disk_tokens) / of_tiers if of_tiers else None,
            peer_hit_rate=(now.peer_tokens - since.peer_tokens) / of_tiers if of_tiers else None,
            draft_acceptance=(now.accepted_tokens - since.accepted_tokens) / num_tried if num_tried else None,
            ttft_p50_s=ttft[0],
            ttft_p99_s=ttft[1],
            itl_p50_s=itl[0],
            itl_p99_s=itl[1],
            e2e_p50_s=e2e[0],
            e2e_p99_s=e2e[1],
            refused_per_s=(now.refused - since.refused) / seconds,
            busy_per_s=(now.busy - since.busy) / seconds,
            failed_per_s=(now.failed - since.failed) / seconds,
            ranks=len(self._facts),
            seats=sum(facts.max_num_seqs for facts, _ in self._facts.values()),
            predicted_wait_s=self._predicted_wait_s(num_waiting),
            ttft_attainment=_attainment(self._ttft, self._targets.ttft_ms),
            itl_attainment=_attainment(self._itl, self._targets.itl_ms),
        )

    def _predicted_wait_s(self, num_waiting: int) -> float:
        begun = self._first_tokens
        if not num_waiting or not begun:
            return WINDOW_S if num_waiting else 0.0  # none began in the window, so the wait is longer
        return predicted_wait_s(num_waiting, len(begun), min(WINDOW_S, self._clock() - begun[0][0]))

    def to_json(self) -> dict[str, Any]:
        """Return the response of GET /throughput."""
        points = self._series.points()
        return {
            "window_s": WINDOW_S,
            "now": _rounded(self.speed()),
            "since": round(self._begun_s, 3),
            "http_errors": {
                "4xx": self._now.refused,
                "429": self._now.busy,
                "5xx": self._now.failed,
            },
            "ranks": [
                self._rank(rank, self._ranks.get(rank)) for rank in sorted({*self._ranks, *self._facts})
            ],
            "series": {
                "time": [point.time_s for point in points],
                **{name: [_round(getattr(point.value, name)) for point in points] for name in Speed._fields},
            },
        }

    def _rank(self, rank: int, stats: RankStats | None) -> dict[str, Any]:
        """Return a serving rank, with the figures of its last step."""
        found: dict[str, Any] = {"rank": rank, "running": 0, "waiting": 0, "kv_usage": 0.0}
        if stats is not None:
            used = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
            found |= {"running": stats.num_running, "waiting": stats.num_waiting, "kv_usage": _round(used)}
        if rank in self._facts:
            facts, since_s = self._facts[rank]
            found |= {
                "host": facts.host,
                "pid": facts.pid,
                "restarts": facts.num_restarts,
                "since": round(since_s, 3),
            }
        return found


def _attainment(times: WindowedPercentiles, target_ms: float | None) -> float | None:
    if target_ms is None:
        return None
    share = times.share_within(target_ms / 1000)
    return 1.0 if share is None else share


def in_words(speed: Speed) -> str:
    """Return the log line."""
    drafts = "" if speed.draft_acceptance is None else f", drafts accepted {speed.draft_acceptance:.1%}"
    hits = "-" if speed.prefix_hit_rate is None else f"{speed.prefix_hit_rate:.1%}"
    if speed.host_hit_rate is not None:
        of_peers = f", other nodes {speed.peer_hit_rate:.1%}" if speed.peer_hit_rate else ""
        hits += f" (host {speed.host_hit_rate:.1%}, disk {speed.disk_hit_rate or 0:.1%}{of_peers})"
    return (
        f"prompts {speed.prompt_tokens_per_s:.1f} tokens/s, generation {speed.generation_tokens_per_s:.1f} tokens/s, "
        f"running {speed.running}, waiting {speed.waiting}, KV cache {speed.kv_usage:.1%}, prefix hits {hits}{drafts}"
    )


def _rounded(speed: Speed) -> dict[str, float | None]:
    return {name: _round(value) for name, value in speed._asdict().items()}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
