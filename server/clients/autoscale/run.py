"""`wideep autoscale`: resize a service with its load, or print what that would have done in the last hour (`--dry-run`).

The load comes from GET /throughput, which has the service's own history. The service itself checks sizes: a resize with `dry_run`
is refused like a real one, for example if a rank would have no expert or no memory.
"""

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from server.clients.autoscale.policy import LoadSample, Policy, SizeChange, State, decide, load_of, replay
from server.http.client import ServiceClient, ServiceError, api_key_of
from server.machine.interrupts import terminate_as_interrupt
from server.machine.lines import printable

HISTORY_S = 3600.0
EVERY_S = 5.0  # between two samples of a running autoscaler
POLL_S = 0.5  # between two queries of a resize
_NOT_NOW, _IMPOSSIBLE = 409, 400
_MILLI = 1e-3


class Sizes(NamedTuple):
    """The numbers of ranks to choose from."""

    accepted: tuple[int, ...]
    refused: Mapping[int, str]  # with the service's reasons
    note: str = ""  # why the sizes were not checked


def run_autoscale(
    args: argparse.Namespace,
    *,
    environment: Mapping[str, str] = os.environ,
    client: ServiceClient | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print the decisions for the last hour and return 0, or resize the service until Ctrl-C or SIGTERM."""
    try:
        with terminate_as_interrupt(), client or ServiceClient(args.url, api_key_of(environment)) as service:
            present = int(service.get_json("/is_scaling_elastic_ep")["effective_data_parallel_size"])
            sizes = _sizes(service, present, range(args.min_ranks, args.max_ranks + 1), is_dry=args.dry_run)
            policy = _policy(args, sizes.accepted)
            if args.dry_run:
                _show_history(policy, sizes, present, service.get_json("/throughput"), as_json=args.json)
            else:
                _Loop(service, policy, present, as_json=args.json, sleep=sleep).run()
    except (ServiceError, LookupError) as error:
        why = error if isinstance(error, ServiceError) else f"{args.url} did not return a state of WideEP"
        print(f"wideep autoscale: {why}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass  # the usual end of a loop
    return 0


def _policy(args: argparse.Namespace, sizes: tuple[int, ...]) -> Policy:
    return Policy(
        sizes=sizes,
        use=args.target_use,
        margin=args.margin,
        wait_s=_seconds(args.target_wait_ms),
        ttft_s=_seconds(args.target_ttft_ms),
        itl_s=_seconds(args.target_itl_ms),
        up_after_s=args.up_after,
        down_after_s=args.down_after,
        most_step=args.max_step,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds * _MILLI


def _sizes(service: ServiceClient, present: int, sizes: Iterable[int], *, is_dry: bool) -> Sizes:
    """Ask the service which sizes it accepts.

    Raises:
        ServiceError: It cannot be resized, and `is_dry` is false; or no size is accepted.
    """
    wanted, accepted, refused = tuple(sizes), list[int](), dict[int, str]()
    for size in wanted:
        try:
            service.post("/scale_elastic_ep", {"new_data_parallel_size": size, "dry_run": True})
            accepted.append(size)
        except ServiceError as error:
            if error.status == _IMPOSSIBLE:
                refused[size] = str(error)
            elif error.status is None or not is_dry:
                raise
            else:  # it is not the size's fault: ranks are missing, for example
                return Sizes(wanted, {}, f"sizes were not checked: {error}")
    if accepted and (accepted != [present] or not refused):
        return Sizes(tuple(accepted), refused)
    if not is_dry:
        raise ServiceError(next(iter(refused.values()), f"{present} ranks are the only choice"))
    return Sizes(
        wanted, refused, "the service accepts no other size; the decisions are those of another autoscaler"
    )


def _samples(speed: Mapping[str, Any]) -> list[LoadSample]:
    """Return the samples of a response of GET /throughput, without moments at which no rank served."""
    series = speed["series"]
    columns = zip(
        *(series[name] for name in ("time", "ranks", "seats", "running", "waiting", "kv_usage")),
        *(series[name] for name in ("predicted_wait_s", "ttft_p99_s", "itl_p99_s")),
        strict=True,
    )
    return [
        LoadSample(at_s, ranks, seats, running + waiting, kv_usage, wait_s, ttft_s, itl_s)
        for at_s, ranks, seats, running, waiting, kv_usage, wait_s, ttft_s, itl_s in columns
        if ranks and seats
    ]


def _show_history(
    policy: Policy, sizes: Sizes, present: int, speed: Mapping[str, Any], *, as_json: bool
) -> None:
    every = _samples(speed)
    samples = [sample for sample in every if sample.time_s >= every[-1].time_s - HISTORY_S]
    first = samples[0].ranks if samples else present
    decisions = list(replay(policy, first, samples))
    last = decisions[-1].after if decisions else first
    if as_json:
        report = {
            "decisions": [decision._asdict() for decision in decisions],
            "from": samples[0].time_s if samples else None,
            "to": samples[-1].time_s if samples else None,
            "samples": len(samples),
            "ranks_then": first,
            "ranks_now": present,
            "ranks_chosen": last,
            "most_needed": round(max((load_of(policy, sample) for sample in samples), default=0.0), 3),
            "accepted": list(sizes.accepted),
            "refused": {str(size): reason for size, reason in sizes.refused.items()},
            "note": sizes.note,
        }
        print(json.dumps(report))
        return
    for line in _history_lines(policy, sizes, present, samples, decisions, last):
        print(printable(line))


def _history_lines(
    policy: Policy,
    sizes: Sizes,
    present: int,
    samples: Sequence[LoadSample],
    decisions: Sequence[SizeChange],
    last: int,
) -> Iterable[str]:
    if not samples:
        yield "the service has no history yet"
        return
    yield from map(_sentence, decisions)
    minutes = (samples[-1].time_s - samples[0].time_s) / 60
    most = max(load_of(policy, sample) for sample in samples)
    change = "no change" if not decisions else f"{len(decisions)} change{'s' if len(decisions) > 1 else ''}"
    yield f"{change} in {minutes:.0f} minutes ({len(samples)} samples); the load needed at most {most:.1f} ranks"
    yield f"the service would have {last} ranks now, and has {present}"
    for size, reason in sizes.refused.items():
        if size > sizes.accepted[-1] or len(sizes.refused) == 1:
            yield f"not {size} ranks: {reason}"
            break
    if sizes.note:
        yield sizes.note


def _sentence(decision: SizeChange) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision.time_s))
    return f"{at}  {decision.before} -> {decision.after}  {decision.why}"


class _Loop:
    """A running autoscaler."""

    def __init__(
        self,
        service: ServiceClient,
        policy: Policy,
        present: int,
        *,
        as_json: bool,
        sleep: Callable[[float], None],
    ) -> None:
        self._service, self._policy, self._as_json, self._sleep = service, policy, as_json, sleep
        self._state = State(present)

    def run(self) -> None:
        """Take samples and resize the service, until a request fails or the user interrupts it."""
        while True:
            state = self._service.get_json("/is_scaling_elastic_ep")
            if not state["is_scaling_elastic_ep"]:  # an operator may resize the service, too
                self._state = self._state._replace(size=int(state["effective_data_parallel_size"]))
                self._take(_samples(self._service.get_json("/throughput"))[-1:])
            self._sleep(EVERY_S)

    def _take(self, newest: Sequence[LoadSample]) -> None:
        """Act on the newest sample, if there is one that was not seen before."""
        for sample in newest:
            if self._state.loads and sample.time_s <= self._state.loads[-1].time_s:
                return
            self._state, decision = decide(self._policy, self._state, sample)
            if decision is not None:
                self._say(decision)
                self._resize(decision)

    def _resize(self, decision: SizeChange) -> None:
        """Resize the service. If it refuses or fails, report this, and go on from the number of ranks that it has."""
        form = {
            "new_data_parallel_size": decision.after,
            "operation_id": uuid.uuid4().hex[:12],
            "wait": False,
        }
        try:
            state = dict(self._service.post("/scale_elastic_ep", form).json())
            while state["is_scaling_elastic_ep"]:
                self._sleep(POLL_S)
                state = self._service.get_json("/is_scaling_elastic_ep")
        except ServiceError as error:
            if error.status is None:
                raise
            print(f"wideep autoscale: {error}", file=sys.stderr)
            state = self._service.get_json("/is_scaling_elastic_ep")
        size = int(state["effective_data_parallel_size"])
        # A refused operation is not the newest one.
        is_own = state["operation_id"] == form["operation_id"]
        if size != decision.after and is_own and state["error"]:
            print(
                printable(f"wideep autoscale: {size} ranks serve as before: {state['error']}"),
                file=sys.stderr,
            )
        self._state = self._state._replace(size=size)

    def _say(self, decision: SizeChange) -> None:
        print(json.dumps(decision._asdict()) if self._as_json else printable(_sentence(decision)), flush=True)
