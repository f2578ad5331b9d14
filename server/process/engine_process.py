"""The engine process of one rank: joins the job, loads its share, attaches to the front, and walks steps.

Started by the supervisor (`server.process.worker`) with torchrun's environment. The front's address comes in WIDEEP_FRONT
to the engine beside the front, which publishes it in the job's store; the others read it there. On WIDEEP_READY_FD
the engine tells its supervisor the HTTP address, how large its KV cache is, and when it serves.

A rank that is lost ends the others' steps, not their processes: they meet again as the front orders. An error here ends
this process with one line, and its supervisor starts it again, which WIDEEP_RESTARTS says: then it meets nobody at the
start, attaches with its share loaded, and serves from its first order on (D8 of the design).
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from dispatch.errors import DispatchError, WireUnavailable
from moe.families import UnsupportedModelError
from moe.load.checkpoint import CheckpointError
from scheduler.assembly import Assembled, assemble
from scheduler.policy.config import ConfigError, EngineConfig
from scheduler.policy.request import RankStats, RequestOutput
from scheduler.policy.scheduler import SchedulerLimitsError
from scheduler.step.groups import StoreDoorbell
from scheduler.step.lockstep import LockStepError
from scheduler.step.sizing import KVMemoryError
from scheduler.structure.compiler import StructureError, Vocabulary
from server.link.rank_link import LinkError
from server.options.command_line import Options
from server.process.engine_link import make_link, send_report, send_start
from server.process.engine_settings import engine_config
from server.process.engine_words import Progress, SupervisorPipe, silent
from server.process.front_probe import FRONT_IS_GONE, front_answers
from server.process.parent_death import die_with_parent
from server.process.preflight.machine import available_bytes
from server.process.rendezvous import Place, place_from

JOIN_TIMEOUT_S = 600.0  # other ranks may still read their weights
STATS_EVERY = 50  # steps without outputs between reports
FRONT_KEY = "front"
FAILURES = (
    CheckpointError, ConfigError, DispatchError, KVMemoryError, LinkError, LockStepError, SchedulerLimitsError,
    UnsupportedModelError, dist.DistError,
)  # fmt: skip


class FrontGoneError(ConnectionError):
    """An engine that was started again has nobody to serve for."""


def run_engine(options: Options, *, environment: Mapping[str, str] = os.environ) -> int:
    """Serve one rank until the front or the supervisor ends it; returns the exit status."""
    die_with_parent()
    place = place_from(environment)
    try:
        _serve(options, place, environment)
    except FrontGoneError:
        return FRONT_IS_GONE
    except FAILURES as error:
        print(f"rank {place.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _serve(options: Options, place: Place, environment: Mapping[str, str]) -> None:
    num_restarts = int(environment.get("WIDEEP_RESTARTS", "0"))
    store = _own_store(place, environment)
    front = _front(store, environment)
    supervisor = SupervisorPipe(environment)
    supervisor.tell(http=front["http"])
    if num_restarts:
        _check_front(front)
    else:
        _join(place, store)
    config = engine_config(options, place)
    supervisor.tell(kv_cache_bytes=config.kv_cache_bytes)
    built = assemble(
        config,
        StoreDoorbell(*(PrefixStore("doorbell", _store(place)) for _ in range(2))),
        Progress() if place.rank == 0 and not num_restarts else silent,
        lambda: _load_vocabulary(options.model),
        store=PrefixStore("membership", _own_store(place, environment)),
        is_joining=num_restarts > 0,
        available=available_bytes,
    )
    if place.rank == 0 and not num_restarts:
        print(f"Dispatch: {built.wire}; {built.dispatch}", file=sys.stderr, flush=True)
    try:
        _walk(built, config, front, supervisor, num_restarts)
    finally:
        built.engine.close()


def _check_front(front: dict[str, str]) -> None:
    """Make sure that there is a service to come back to.

    Raises:
        FrontGoneError: there is none.
    """
    if not front_answers(front["ranks_address"]):
        raise FrontGoneError


def _join(place: Place, store: Store) -> None:
    """Meet the other ranks; they may still be on their way."""
    if place.world_size == 1:
        return
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        )
    except RuntimeError as error:  # all that gloo says of a peer that is gone
        raise WireUnavailable(f"rank {place.rank} could not meet the others: {error}") from error


def _walk(
    built: Assembled,
    config: EngineConfig,
    front: dict[str, str],
    supervisor: SupervisorPipe,
    num_restarts: int,
) -> None:
    """Attach to the front, then walk steps until somebody ends it."""
    link = make_link(built, config, front, num_restarts)
    is_ready = num_restarts == 0

    def on_regrouped(epoch: int) -> None:
        nonlocal is_ready
        link.send_regrouped(epoch)
        if not is_ready:
            is_ready = True
            supervisor.tell(ready=True)

    built.engine.tell_membership(link.send_fault, on_regrouped)
    built.relocation.on_report = lambda report: send_report(report, built, link)
    if num_restarts:
        _check_front(front)
    link.open(JOIN_TIMEOUT_S)
    if is_ready:
        if config.rank == 0:
            send_start(built, link)
        supervisor.tell(ready=True)
    idle_steps = 0

    def on_step(outputs: list[RequestOutput], stats: RankStats) -> None:
        nonlocal idle_steps
        idle_steps = 0 if outputs or not stats.num_step_tokens else idle_steps + 1
        if outputs or not stats.num_step_tokens or idle_steps >= STATS_EVERY:
            idle_steps = 0
            link.send(outputs, stats)
        send_load_when_due()

    def send_load_when_due(*, is_sleeping: bool = False) -> None:
        now_s = time.monotonic()
        if built.telemetry.is_due(now_s, is_sleeping=is_sleeping):
            link.send_load(
                built.telemetry.report(built.engine.step, built.relocation.placement.version, now_s)
            )

    try:
        built.engine.run(on_step, lambda: send_load_when_due(is_sleeping=True))
    except FAILURES as error:
        link.close(f"{type(error).__name__}: {error}")
        raise
    link.close()


def _load_vocabulary(model: str) -> Vocabulary:
    """Read the tokenizer, which a rank needs for structures only: until then it costs neither time nor memory.

    Raises:
        StructureError: there is none, or it does not load.
    """
    slow = importlib.import_module("server.front.tokenizer")
    try:
        vocabulary: Vocabulary = slow.Tokenizer(model).vocabulary()
    except ValueError as error:  # TokenizerError: its class came with the slow import
        raise StructureError(str(error)) from error
    return vocabulary


def _own_store(place: Place, environment: Mapping[str, str]) -> Store:
    """A connection of its own to the store, below what this round of torchrun's workers has in it."""
    return PrefixStore(f"wideep/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", _store(place))


def _store(place: Place) -> Store:
    """A connection of its own to the store that torchrun's agent hosts."""
    return TCPStore(
        place.master_addr,
        place.master_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=JOIN_TIMEOUT_S),
    )


def _front(store: Store, environment: Mapping[str, str]) -> dict[str, str]:
    """The front's addresses: given by our supervisor and published, or read from the store."""
    given = environment.get("WIDEEP_FRONT")
    if given is not None:
        store.set(FRONT_KEY, given)
        return json.loads(given)  # type: ignore[no-any-return]
    return json.loads(store.get(FRONT_KEY))  # type: ignore[no-any-return]
