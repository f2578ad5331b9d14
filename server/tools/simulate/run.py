"""Run `wideep simulate`: every router with every placement on one trace, side by side."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from expert_placement.files import LoadFileError
from moe.families import UnsupportedModelError
from scheduler.policy.config import ConfigError
from scheduler.policy.limits import SchedulerLimitsError
from server.clients.progress import RequestProgress
from server.front.routing.routers import ROUTERS
from server.http.client import ServiceClient, ServiceError, api_key_of
from server.options.flag import OptionsError
from server.options.pools import Pool, have_roles, in_words, num_ranks_of, pools_of
from server.options.reading import options_from_keywords
from server.serve.preflight.model import PreflightError
from server.tools.simulate.experts import (
    GENERATED_LAYERS,
    ExpertBalance,
    ExpertLoads,
    generated_loads,
    recorded_loads,
)
from server.tools.simulate.figures import SimulationReport, Slo
from server.tools.simulate.flags import SimulateOptions
from server.tools.simulate.service import (
    LOOK_STEPS,
    PoolSetup,
    PreemptedError,
    SimulatedService,
    SimulationError,
)
from server.tools.simulate.subject import CalibrationError, Subject, from_roofline, from_service, redundant
from server.tools.size.costs.devices import UnknownDeviceError
from server.tools.size.costs.fit import SizeError
from server.tools.traces import TracedRequest, TraceError, read_trace

_MOST_WINDOWS = 144  # of generated loads; after these they repeat
_REFUSED = (
    OptionsError, TraceError, LoadFileError, SimulationError, CalibrationError, SizeError, UnknownDeviceError,
    PreflightError, ConfigError, UnsupportedModelError, SchedulerLimitsError,
)  # fmt: skip


class SimulatedRun(NamedTuple):
    """The result for one router with one placement."""

    router: str
    placement: str
    pools: tuple[tuple[Pool, Subject], ...]
    report: SimulationReport

    @property
    def subject(self) -> Subject:
        """The first pool's service, which names the model and the source of step times."""
        return self.pools[0][1]

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all pools."""
        return num_ranks_of([pool for pool, _ in self.pools])


class _Extent(NamedTuple):
    """The size of a trace."""

    num_requests: int
    duration_s: float
    has_shared_prefixes: bool  # whether it has data about prefixes


def run_simulate(args: argparse.Namespace) -> int:
    """Run the command and return the exit status: 2 for invalid options or files, 1 for an error of the service."""
    try:
        asked = SimulateOptions.of(args)
        runs = simulate(asked)
    except ServiceError as error:
        print(f"wideep simulate: {error}", file=sys.stderr)
        return 1
    except _REFUSED as error:
        print(f"wideep simulate: {error}", file=sys.stderr)
        return 2
    print(json.dumps(to_json(runs, asked)) if args.json else text(runs, asked))
    return 0


def simulate(asked: SimulateOptions) -> list[SimulatedRun]:
    """Simulate the requested runs, and report each on stderr.

    Raises:
        ServiceError: A service for calibration cannot be reached.
        SimulationError and others: An option or file is invalid; the message gives the reason.
    """
    extent = _extent(asked)  # refuses a wrong file before a model is read
    slo = Slo(**{f"{name}_ms": bound for name, bound in asked.slo_ms.items()})
    runs = []
    measured = None if asked.calibrate is None else _measured(asked)
    for placement in asked.placements:
        pools = _pools(asked, placement, measured)
        subject = pools[0][1]
        loads = _loads(asked, subject)
        for router in asked.routers:
            begun_s = time.process_time()
            try:
                report = _serve(asked, pools, loads, router, placement, extent, slo)
            except PreemptedError as error:
                print(f"{error}: starting again, with prefixes remembered", file=sys.stderr)
                remembering = extent._replace(has_shared_prefixes=True)
                report = _serve(asked, pools, loads, router, placement, remembering, slo)
            runs.append(SimulatedRun(router, placement, tuple(pools), report))
            print(
                f"{router}, {placement}: {report.num_requests:,} requests in {report.num_steps:,} steps of "
                f"{runs[-1].num_ranks} ranks, {time.process_time() - begun_s:.1f} s of CPU time",
                file=sys.stderr,
            )
    return runs


def _extent(asked: SimulateOptions) -> _Extent:
    """Read the trace once, as it will be served.

    Raises:
        TraceError: The trace cannot be read.
    """
    num_requests, last_s, has_shared_prefixes = 0, 0.0, False
    for request in _trace(asked):
        num_requests, last_s = num_requests + 1, request.arrival_s
        has_shared_prefixes = has_shared_prefixes or bool(request.hash_ids)
    return _Extent(num_requests, last_s, has_shared_prefixes)


def _trace(asked: SimulateOptions) -> Iterator[TracedRequest]:
    return read_trace(asked.trace, rate_scale=asked.rate_scale, duration_s=asked.duration_s)


def _pools(asked: SimulateOptions, placement: str, measured: Subject | None) -> list[tuple[Pool, Subject]]:
    """Return the pools to simulate. `measured`: the running service, with --calibrate."""
    whole = measured or from_roofline(asked, placement)
    pools = pools_of(asked.served.get("pools"), whole.num_ranks)
    if measured is None and len(pools) == 1:
        return [(pools[0], whole)]
    found = []
    for pool in pools:
        if measured is None:
            subject = from_roofline(asked, placement, pool_ranks=pool.num_ranks)
        else:
            config = redundant(asked, measured.config, pool.num_ranks, placement)
            subject = replace(measured, config=config, num_ranks=pool.num_ranks)
        found.append((pool, subject))
    return found


def _serve(
    asked: SimulateOptions,
    pools: list[tuple[Pool, Subject]],
    loads: ExpertLoads,
    router: str,
    placement: str,
    extent: _Extent,
    slo: Slo,
) -> SimulationReport:
    """Serve the trace once and return the results.

    Raises:
        PreemptedError: The trace must be served with prefixes remembered.
    """
    setups = [
        PoolSetup(
            pool,
            subject.limits,
            subject.times,
            ExpertBalance(placement, subject.experts, loads, pool.num_ranks, subject.config, seed=asked.seed),
        )
        for pool, subject in pools
    ]
    threshold = options_from_keywords("demo", asked.served, environment={}).prefill_threshold
    with RequestProgress(extent.num_requests, f"{router}, {placement}", lines=True) as progress:

        def count(now_s: float) -> None:
            progress.step(note=f"{now_s:,.0f} of {extent.duration_s:,.0f} s simulated")

        service = SimulatedService(
            setups,
            ROUTERS[router](setups[-1].pool.ranks.stop, prefill_threshold=threshold),
            has_shared_prefixes=extent.has_shared_prefixes,
            transfer_tokens_per_s=asked.transfer_tokens_per_s,
            ended=count,
        )
        figures = service.run(_trace(asked))
    for setup in setups:
        if reason := setup.experts.last_reason:
            of_pool = "" if len(setups) == 1 else f" of {setup.pool.name}"
            print(f"{router}, {placement}: last decision about experts{of_pool}: {reason}", file=sys.stderr)
    return figures.report(slo, num_expert_moves=sum(setup.experts.num_moves for setup in setups))


def _measured(asked: SimulateOptions) -> Subject:
    assert asked.calibrate is not None, "the command line checks it"
    with ServiceClient(asked.calibrate, api_key_of(os.environ)) as client:
        print(f"watching {client.url} for {asked.calibrate_s:g} s", file=sys.stderr)
        return from_service(asked, client)


def _loads(asked: SimulateOptions, subject: Subject) -> ExpertLoads:
    """Return the load of experts.

    Raises:
        LoadFileError: A file is invalid.
        SimulationError: A file is for another model.
    """
    if not asked.expert_load:
        num_windows = math.ceil((asked.duration_s or 3600.0) / asked.load_window_s)
        return generated_loads(
            min(GENERATED_LAYERS, subject.experts.num_layers),
            subject.experts.num_experts,
            skew=asked.expert_skew,
            drift=asked.expert_drift,
            num_windows=min(_MOST_WINDOWS, num_windows + 1),
            window_s=asked.load_window_s,
            seed=asked.seed,
        )
    loads = recorded_loads(asked.expert_load, asked.load_window_s)
    if loads.windows.shape[2] != subject.experts.num_experts:
        raise SimulationError(
            f"--expert-load has {loads.windows.shape[2]} experts, but {subject.name} has "
            f"{subject.experts.num_experts}; give a load of this model"
        )
    return loads


def to_json(runs: list[SimulatedRun], asked: SimulateOptions) -> dict[str, Any]:
    """Return the runs as JSON values."""
    subject = runs[0].subject
    pools = [
        {"name": pool.name, "role": pool.role.value, "ranks": pool.num_ranks} for pool, _ in runs[0].pools
    ]
    return {
        "trace": asked.trace.name,
        "rate_scale": asked.rate_scale,
        "duration_s": asked.duration_s,
        "service": subject.name,
        "ranks": runs[0].num_ranks,
        "pools": pools,
        "step_times": subject.source,
        "slo_ms": asked.slo_ms,
        "runs": [
            {
                "router": run.router,
                "placement": run.placement,
                "kv_tokens_per_rank": run.subject.limits.num_blocks * run.subject.limits.block_tokens,
                **run.report.to_json(),
            }
            for run in runs
        ],
    }


def text(runs: list[SimulatedRun], asked: SimulateOptions) -> str:
    """Return a table with a column per run."""
    subject, slo = runs[0].subject, ", ".join(f"{name} {bound:g} ms" for name, bound in asked.slo_ms.items())
    head = [
        f"{subject.name}, {_ranks_in_words(runs[0])}, {asked.trace.name} at {asked.rate_scale:g} times its rate",
        f"step times: {subject.source}; simulated, not measured",
        "",
    ]
    names = [name for name, _ in _lines(runs[0], slo)]
    columns = [[value for _, value in _lines(run, slo)] for run in runs]
    widths = [max(map(len, each)) for each in (names, *columns)]
    rows = [
        "  ".join(
            [
                name.ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)),
            ]
        )
        for name, *cells in zip(names, *columns, strict=True)
    ]
    return "\n".join((*head, *rows))


def _ranks_in_words(run: SimulatedRun) -> str:
    pools = [pool for pool, _ in run.pools]
    return f"{run.num_ranks} ranks" + (f" ({in_words(pools)})" if len(pools) > 1 else "")


def _lines(run: SimulatedRun, slo: str) -> list[tuple[str, str]]:
    """Return a column's cells with the names of their rows."""
    report = run.report
    lines = [
        ("router", run.router),
        ("placement of experts", run.placement),
        ("requests", f"{report.num_requests:,}"),
        ("refused: too long for a sequence", f"{report.num_refused:,}"),
        ("requests/s", f"{report.requests_per_s:.2f}"),
        ("prompt tokens/s", f"{report.prompt_tokens_per_s:,.0f}"),
        ("output tokens/s", f"{report.output_tokens_per_s:,.0f}"),
        (f"goodput, requests/s ({slo})", f"{report.goodput_per_s:.2f}"),
        ("good requests", f"{report.good_share:.1%}"),
    ]
    for name, found in (
        ("TTFT", report.ttft_ms), ("TPOT", report.tpot_ms), ("ITL", report.itl_ms), ("whole response", report.e2e_ms),
    ):  # fmt: skip
        values = " / ".join(
            f"{found[each]:,.0f}" if found[each] >= 100 else f"{found[each]:.3g}" for each in found
        )
        lines.append((f"{name} mean / p50 / p90 / p99, ms", values))
    lines += [
        ("steps", f"{report.num_steps:,}"),
        ("mean step, ms", f"{report.step_ms:.2f}"),
        ("time in steps", f"{report.busy_share:.1%}"),
        ("ranks wait for slower ones", f"{report.waiting_share:.1%}"),
    ]
    lines += [
        (f"  time lost to uneven {name.replace('_', ' ')}", f"{share:.1%}")
        for name, share in report.waits_by_cause.items()
    ]
    lines += [
        (f"mean / fullest rank: {name.replace('_', ' ')}", f"{even:.3f}")
        for name, even in report.balancedness.items()
    ]
    kv = (
        f"{report.kv_usage['mean']:.1%} / {report.kv_usage['most']:.1%}"
        if report.kv_usage
        else f"no sample before step {LOOK_STEPS}"
    )
    return [
        *lines,
        ("waiting requests moved", f"{report.num_request_moves:,}"),
        ("running requests moved", f"{report.num_running_moves:,}"),
        *(_hand_over_lines(report) if have_roles([pool for pool, _ in run.pools]) else ()),
        ("experts moved", f"{report.num_expert_moves:,}"),
        ("KV blocks in use, mean / maximum", kv),
        ("preemptions", f"{report.num_preemptions:,}"),
        ("prompt tokens found cached", f"{report.prefix_hit_rate:.1%}"),
    ]


def _hand_over_lines(report: SimulationReport) -> list[tuple[str, str]]:
    """Return the rows about hand-overs between pools."""
    values = " / ".join(f"{value:.3g}" for value in report.hand_over_ms.values()) or "none"
    return [
        ("requests handed over", f"{report.num_hand_overs:,}"),
        ("first to second token then, mean / p50 / p90 / p99, ms", values),
        ("prompt tokens computed again, mean", f"{report.hand_over_computed_tokens:.1f}"),
    ]
