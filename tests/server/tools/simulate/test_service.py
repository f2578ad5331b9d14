"""A simulated service: fast-forward equals step by step, every request ends once, and every block is freed."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from expert_placement.config import EplbConfig
from scheduler.policy.skipping import SkippingScheduler
from server.front.routing.routers import ROUTERS
from server.options.pools import read_pools, single_pool
from server.options.table import ROUTER_NAMES
from server.tools.simulate import service
from server.tools.simulate.experts import ExpertBalance, ExpertLoads, ExpertModel, generated_loads
from server.tools.simulate.figures import SimulationReport, Slo, causes_of
from server.tools.simulate.measured import MeasuredTimes
from server.tools.simulate.rank import RankLimits
from server.tools.simulate.service import PoolSetup, PreemptedError, SimulatedService
from server.tools.size.costs.step_times import RankRows, StepCost
from server.tools.traces import TracedRequest

TIMES = MeasuredTimes(step_s=0.01, prefill_token_s=2e-5, decode_row_s=3e-4, attended_token_s=1e-6)
LIMITS = RankLimits(
    num_blocks=160, block_tokens=16, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2048
)
SLO = Slo(ttft_ms=500, tpot_ms=30)


def _trace(seed: int, num_requests: int, *, mean_gap_s: float = 0.05) -> list[TracedRequest]:
    """Return requests. Some share prefixes, some come after pauses in which all ranks sleep, and one is too long."""
    draw, now_s, requests = random.Random(seed), 0.0, []
    for number in range(num_requests):
        now_s += draw.expovariate(1 / mean_gap_s) + (3.0 if draw.random() < 0.02 else 0.0)
        tokens = 2200 if number == 5 else draw.choice([3, 40, 300, 700, 1200])
        ids = tuple(draw.choice([1, 2]) * 10 + each for each in range(-(-tokens // 512)))
        answer = draw.choice([1, 2, 17, 60, 280])
        requests.append(TracedRequest(now_s, tokens, answer, ids if draw.random() < 0.6 else ()))
    return requests


def _loads() -> ExpertLoads:
    return generated_loads(2, 16, skew=1.0, drift=0.3, num_windows=4, window_s=2.0, seed=1)


def _service(
    num_ranks: int,
    router: str,
    limits: RankLimits = LIMITS,
    *,
    placement: str = "linear",
    is_stepwise: bool = False,
    has_shared_prefixes: bool = True,
    ended: Callable[[float], None] | None = None,
    pools: str | None = None,
    **how: float,
) -> SimulatedService:
    """`pools`: as `--pools`, instead of one pool of `num_ranks` ranks."""
    model = ExpertModel(num_layers=2, num_experts=16, top_k=2, expert_bytes=1000)
    setups = []
    for pool in single_pool(num_ranks) if pools is None else read_pools(pools):
        config = EplbConfig(
            num_redundant_experts=pool.num_ranks, step_interval=200, window_size=100, min_gain=0.0
        )
        experts = ExpertBalance(placement, model, _loads(), pool.num_ranks, config)
        setups.append(PoolSetup(pool, limits, TIMES, experts))
    return SimulatedService(
        setups,
        ROUTERS[router](setups[-1].pool.ranks.stop),
        is_stepwise=is_stepwise,
        has_shared_prefixes=has_shared_prefixes,
        ended=ended,
        **how,
    )


def _run(trace: Sequence[TracedRequest], simulated: SimulatedService) -> SimulationReport:
    report = simulated.run(iter(trace)).report(SLO)
    assert simulated.num_held_blocks == 0, "every block is freed"
    return report


def _growing() -> list[TracedRequest]:
    """Return requests that begin together and grow until blocks run out."""
    return [TracedRequest(0.01 * number, 30, 200 + number, ()) for number in range(20)]


@pytest.mark.crossed("changes", every=3)
@pytest.mark.parametrize(
    ("router", "changes"),
    [
        ("prefix", {}),
        ("fewest", {"enable_prefix_caching": False}),
        ("round-robin", {"is_paced": False}),
        ("prefix", {"max_num_seqs": 2}),
        ("prefix", {"num_blocks": 130, "max_num_seqs": 16}),
    ],
)
def test_fast_forward_equals_step_by_step(router: str, changes: dict[str, int]) -> None:
    limits = LIMITS._replace(**changes)
    for trace in (_trace(1, 24, mean_gap_s=0.02), _trace(2, 24, mean_gap_s=0.15), _growing()):
        fast = _run(trace, _service(2, router, limits))
        slow = _run(trace, _service(2, router, limits, is_stepwise=True))
        assert fast == slow


@pytest.mark.parametrize(
    "pools",
    [
        "prefill:1,decode:1",
        "both:1,both:1",
        pytest.param("prefill:1,decode:2,both:1", marks=pytest.mark.slow),
    ],
)
def test_fast_forward_equals_step_by_step_with_pools(pools: str) -> None:
    """Except for samples of the cache: a step of another pool may be planned or not."""
    for trace in (_trace(1, 20, mean_gap_s=0.02), _growing()):
        fast, slow = (
            replace(_run(trace, _service(0, "prefix", pools=pools, is_stepwise=is_stepwise)), kv_usage={})
            for is_stepwise in (False, True)
        )
        assert fast == slow
        assert not fast.num_hand_overs or pools.startswith("prefill")


def _beside_prompts() -> list[TracedRequest]:
    """Return streams with short prompts, and long prompts with short answers that arrive meanwhile."""
    streams = [TracedRequest(0.01 * number, 30, 250, ()) for number in range(6)]
    return streams + [TracedRequest(0.5 + 0.4 * number, 1200, 2, ()) for number in range(8)]


def test_prompts_of_another_pool_delay_no_stream() -> None:
    apart = _run(_beside_prompts(), _service(0, "prefix", pools="prefill:1,decode:1"))
    mixed = _run(_beside_prompts(), _service(2, "prefix"))
    assert apart.num_hand_overs > 4 and apart.num_requests == mixed.num_requests == 14
    assert apart.itl_ms["p99"] < 0.8 * mixed.itl_ms["p99"]
    assert apart.hand_over_computed_tokens < 16


def test_a_hand_over_takes_the_time_of_its_transfer_and_computes_less_than_a_block_again() -> None:
    def hand_over_ms(transfer_tokens_per_s: float) -> float:
        report = _run(
            [TracedRequest(1.0, 1000, 3, ())],
            _service(0, "prefix", pools="prefill:1,decode:1", transfer_tokens_per_s=transfer_tokens_per_s),
        )
        assert report.num_hand_overs == 1 and report.hand_over_computed_tokens == 1000 % 16
        return report.hand_over_ms["mean"]

    step_ms = 1e3 * (0.01 + 9 * 2e-5)
    assert step_ms < hand_over_ms(1e9) < 5 * step_ms
    assert 480 < hand_over_ms(2e3) - hand_over_ms(1e9) < 500


def test_a_request_without_a_place_in_the_other_pool_goes_on_where_it_is() -> None:
    """One seat per rank: a second request waits for it at the rank that ran its prompt."""
    trace = [TracedRequest(0.1 * number, 200, 60, ()) for number in range(4)]
    limits = LIMITS._replace(max_num_seqs=1)
    report = _run(trace, _service(0, "prefix", limits, pools="prefill:1,decode:1"))
    assert report.num_requests == 4 and 0 < report.num_hand_overs < 8


def test_a_trace_without_shared_prefixes_comes_out_the_same_where_none_is_remembered() -> None:
    limits, ends = LIMITS._replace(num_blocks=2000), list[float]()
    trace = [request._replace(hash_ids=()) for request in _trace(2, 24, mean_gap_s=0.15)]
    remembered = _run(trace, _service(2, "prefix", limits))
    forgotten = _run(trace, _service(2, "prefix", limits, has_shared_prefixes=False, ended=ends.append))
    assert forgotten == remembered
    assert len(ends) == 24
    assert ends == sorted(ends)


def test_a_preemption_is_refused_where_prefixes_are_not_remembered() -> None:
    scarce = LIMITS._replace(num_blocks=130, max_num_seqs=16)
    with pytest.raises(PreemptedError, match="a request was preempted"):
        _run(_growing(), _service(2, "prefix", scarce, has_shared_prefixes=False))


def test_runs_with_preemptions_hits_moves_and_refusals_are_among_those_compared() -> None:
    report = _run(_trace(2, 24, mean_gap_s=0.15), _service(2, "prefix"))
    assert report.prefix_hit_rate > 0.05
    assert report.num_request_moves > 0
    assert report.num_refused == 1
    assert report.busy_share < 1, "ranks slept at times"
    scarce = LIMITS._replace(num_blocks=130, max_num_seqs=16)
    assert _run(_growing(), _service(2, "prefix", scarce)).num_preemptions > 0


def test_what_waits_is_moved_to_ranks_with_room_and_begins_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    def ttft_ms() -> tuple[float, int]:
        reports = [_run(_trace(seed, 60), _service(4, "prefix")) for seed in (1, 2, 3)]
        assert all(report.num_requests == 60 for report in reports)
        return sum(r.ttft_ms["mean"] for r in reports), sum(r.num_request_moves for r in reports)

    moved_ms, num_moves = ttft_ms()
    monkeypatch.setattr(service, "MOVE_EVERY_S", float("inf"))
    stays_ms, none = ttft_ms()
    assert num_moves > 10
    assert none == 0
    assert moved_ms < 0.9 * stays_ms


def _uneven() -> list[TracedRequest]:
    """Return requests with answers of very different lengths, so that some ranks run out of blocks before others."""
    draw, now_s, requests = random.Random(5), 0.0, []
    for number in range(60):
        now_s += draw.expovariate(8)
        requests.append(TracedRequest(now_s, draw.choice([20, 60]), 1200 if number % 9 == 0 else 30, ()))
    return requests


def test_running_requests_move_instead_of_waiting_after_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    scarce = LIMITS._replace(num_blocks=130, max_num_seqs=16)
    fast, slow = (
        _run(_uneven(), _service(4, "prefix", scarce, is_stepwise=is_stepwise))
        for is_stepwise in (False, True)
    )
    assert fast == slow and fast.num_running_moves > 0
    monkeypatch.setattr(ROUTERS["prefix"], "plan_relief", lambda _self, _prompt_of: {})
    stays = _run(_uneven(), _service(4, "prefix", scarce))
    assert stays.num_running_moves == 0 < stays.num_preemptions
    assert fast.tpot_ms["p99"] < stays.tpot_ms["p99"]


@pytest.mark.parametrize("num_ranks", [1, 2, 7])
def test_every_request_ends_once_with_all_its_tokens(num_ranks: int) -> None:
    trace = _trace(3, 40)
    service = _service(num_ranks, "prefix")
    report = _run(trace, service)
    served = [each for each in trace if each.input_tokens < LIMITS.max_model_len]
    wanted = [min(each.output_tokens, LIMITS.max_model_len - each.input_tokens) for each in served]
    assert report.num_requests == len(trace)
    assert report.output_tokens_per_s * report.duration_s == pytest.approx(sum(wanted))
    assert report.prompt_tokens_per_s * report.duration_s == pytest.approx(
        sum(each.input_tokens for each in served)
    )


def test_ranks_that_only_decode_cost_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts calls instead of seconds: steps of long answers are skipped."""
    calls, plan = Counter[str](), SkippingScheduler.schedule_rest

    def counted(self: SkippingScheduler, **given: Any) -> Any:
        calls["planned"] += 1
        return plan(self, **given)

    monkeypatch.setattr(SkippingScheduler, "schedule_rest", counted)
    trace = [TracedRequest(0.5 * number, 100, 500, ()) for number in range(16)]
    report = _run(trace, _service(8, "round-robin"))
    assert report.num_steps > 1000
    assert calls["planned"] < 6 * len(trace)


def test_a_lone_request_takes_what_its_steps_take() -> None:
    report = _run([TracedRequest(1.0, 100, 3, ())], _service(2, "prefix"))
    prompt_s = 0.01 + 100 * 2e-5 + 1e-6 * 100 * 101 / 2
    decodes_s = [0.01 + 3e-4 + 1e-6 * context for context in (101, 102)]
    assert report.ttft_ms["mean"] == pytest.approx(1e3 * prompt_s)
    assert report.tpot_ms["mean"] == pytest.approx(1e3 * np.mean(decodes_s))
    assert report.e2e_ms["mean"] == pytest.approx(1e3 * (prompt_s + sum(decodes_s)))


def test_routers_that_know_prefixes_find_more_of_them() -> None:
    groups = [2 * (number % 3) for number in range(40)]
    trace = [TracedRequest(0.2 * at, 1024, 2, (group, group + 1)) for at, group in enumerate(groups)]
    rates = {name: _run(trace, _service(4, name)).prefix_hit_rate for name in ROUTER_NAMES}
    assert rates["prefix"] > 0.7
    assert rates["prefix"] > rates["round-robin"] + 0.1


def test_goodput_counts_requests_that_keep_every_bound() -> None:
    service = _service(2, "prefix")
    figures = service.run(iter(_trace(4, 40)))
    assert figures.report(Slo()).good_share == pytest.approx(39 / 40), "all but the refused one"
    shares = [figures.report(Slo(ttft_ms=bound)).good_share for bound in (1, 40, 400, 1e9)]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert figures.report(replace(SLO, ttft_ms=1)).good_share == 0


def test_waits_are_told_apart_by_what_is_uneven() -> None:
    class Times:
        """Step times with a different cost for each kind of work and for experts."""

        def step(self, ranks: Sequence[RankRows] | np.ndarray, balancedness: float) -> StepCost:
            rows = np.asarray(ranks, dtype=np.float64)
            own = rows @ np.array([1e-3, 1e-2, 1e-4, 0.0])
            return StepCost(float(own.max()) + 0.5 / balancedness, 0, 0, 0, 0, ())

    def causes(*ranks: tuple[int, int, int, int], balancedness: float = 1.0) -> list[float]:
        rows, times = np.array(ranks).T, Times()
        return list(causes_of(rows, times.step(rows.T, balancedness).total_s, times))

    assert causes((0, 2, 100, 0), (0, 2, 100, 0), balancedness=0.5) == pytest.approx([0.5, 0, 0, 0])
    assert causes((200, 0, 0, 0), (0, 0, 0, 0)) == pytest.approx([0, 0.1, 0, 0])
    assert causes((0, 4, 0, 0), (0, 0, 0, 0)) == pytest.approx([0, 0, 0.02, 0])
    assert causes((0, 2, 300, 0), (0, 2, 100, 0)) == pytest.approx([0, 0, 0, 0.01])


@pytest.mark.parametrize("placement", ["even", "repair"])
def test_placements_that_follow_the_load_are_more_even_than_one_that_does_not(placement: str) -> None:
    def even(name: str) -> tuple[float, int]:
        model = ExpertModel(num_layers=2, num_experts=16, top_k=2, expert_bytes=1000)
        loads = generated_loads(2, 16, skew=1.0, drift=0.1, num_windows=4, window_s=2.0, seed=1)
        config = EplbConfig(num_redundant_experts=4, step_interval=50, window_size=50, min_gain=0.0)
        experts, now_s, found = ExpertBalance(name, model, loads, 4, config), 0.0, []
        for _ in range(400):
            now_s += 0.01
            found.append(experts.balancedness(now_s, 100_000))
            experts.note_step(0, 100_000, StepCost(0.01, 0.0, 0.01, 0.0, 0.0, ()), found[-1], now_s)
        return float(np.mean(found)), experts.num_moves

    (follows, moves), (linear, none) = even(placement), even("linear")
    assert follows > linear + 0.1
    assert moves > 0
    assert none == 0


def test_few_tokens_are_less_even_than_many() -> None:
    model = ExpertModel(num_layers=2, num_experts=16, top_k=2, expert_bytes=1000)
    loads = generated_loads(2, 16, skew=0.0, drift=0.0, num_windows=1, window_s=1.0, seed=1)
    experts = ExpertBalance("linear", model, loads, 4, EplbConfig())
    few, many = (experts.balancedness(0.0, count) for count in (2, 1 << 20))
    assert few < 0.8
    assert many > 0.98


def test_a_trace_is_read_while_it_is_served() -> None:
    taken = 0

    def counted() -> Iterator[TracedRequest]:
        nonlocal taken
        for taken in range(1, 100):
            yield TracedRequest(float(taken), 10, 2, ())
            if taken == 50:
                raise ValueError("line 50")

    with pytest.raises(ValueError, match="line 50"):
        _service(2, "prefix").run(counted())
    assert taken == 50
