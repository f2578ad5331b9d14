"""The engine process of one rank: joins the job, loads its share, attaches to the front, and walks steps.

Started by the supervisor (`server.processes.worker`) with torchrun's environment. The front's address comes in WIDEEP_FRONT
to the engine beside the front, which publishes it in the job's store; the others read it there. On WIDEEP_READY_FD
the engine tells its supervisor the HTTP address and when it serves. An error here ends the process with one line:
surviving it is the supervisors' business (D8 of the design).
"""

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from dispatch.errors import DispatchError, TransportUnavailable
from moe.checkpoint import CheckpointError
from moe.expert_weights import read_slot
from moe.families import UnsupportedModelError
from scheduler.assembly import Assembled, assemble
from scheduler.config import ConfigError
from scheduler.doorbell import StoreDoorbell
from scheduler.limits import SchedulerLimitsError
from scheduler.lockstep import LockStepError
from scheduler.placement_report import MoveState, PlacementReport
from scheduler.request import RankStats, RequestOutput
from scheduler.sizing import KVMemoryError
from scheduler.structure import StructureError
from scheduler.structure_vocabulary import Vocabulary
from server.options.command_line import Options
from server.processes.engine_settings import engine_config
from server.processes.engine_words import Progress, SupervisorPipe, silent
from server.processes.parent_death import die_with_parent
from server.processes.rendezvous import Place, place_from
from server.rank_streams.rank_link import LinkError, RankLink
from server.rank_streams.wire import RankFacts

JOIN_TIMEOUT_S = 600.0  # other ranks may still read their weights
STATS_EVERY = 50  # steps without outputs between reports
FRONT_KEY = "front"
FAILURES = (
    CheckpointError, ConfigError, DispatchError, KVMemoryError, LinkError, LockStepError, SchedulerLimitsError,
    UnsupportedModelError, dist.DistError,
)  # fmt: skip


def run_engine(options: Options, *, environment: Mapping[str, str] = os.environ) -> int:
    """Serve one rank until the front or the supervisor ends it; returns the exit status."""
    die_with_parent()
    place = place_from(environment)
    try:
        _serve(options, place, environment)
    except FAILURES as error:
        print(f"rank {place.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _serve(options: Options, place: Place, environment: Mapping[str, str]) -> None:
    store = PrefixStore(f"wideep/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", _store(place))
    front = _front(store, environment)
    supervisor = SupervisorPipe(environment)
    supervisor.tell(http=front["http"])
    _join(place, store)
    doorbell = StoreDoorbell(*(PrefixStore("doorbell", _store(place)) for _ in range(2)))
    progress = Progress() if place.rank == 0 else silent
    built = assemble(
        engine_config(options, place), doorbell, progress, lambda: _load_vocabulary(options.model)
    )
    if place.rank == 0:
        print(f"Dispatch: {built.transport}; {built.dispatch}", file=sys.stderr, flush=True)
    _walk(built, options, place, front, supervisor)


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
        raise TransportUnavailable(f"rank {place.rank} could not meet the others: {error}") from error


def _walk(
    built: Assembled, options: Options, place: Place, front: dict[str, str], supervisor: SupervisorPipe
) -> None:
    """Attach to the front, then walk steps until somebody ends it."""
    link = _make_link(built, options, place, front)
    link.open(JOIN_TIMEOUT_S)
    if place.rank == 0:
        link.send_experts(built.experts)
        _send_start(built, link)
    supervisor.tell(ready=True)
    built.relocation.on_report = lambda report: _send_report(report, built, link)
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


def _make_link(built: Assembled, options: Options, place: Place, front: dict[str, str]) -> RankLink:
    """Return what will join this rank to the front."""

    def on_lost(reason: str) -> None:
        # The step loop may be waiting for other ranks; the supervisors end the service all the same.
        print(f"rank {place.rank}: {reason}", file=sys.stderr, flush=True)
        os._exit(1)

    facts = RankFacts(
        rank=place.rank,
        world_size=place.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        max_model_len=built.max_model_len,
        num_blocks=built.num_blocks,
        block_tokens=built.runner.step.block_tokens,
        max_num_seqs=options.max_num_seqs or 0,
    )
    return RankLink(
        front["ranks_address"],
        front["token"],
        facts,
        on_submit=built.engine.submit,
        on_abort=built.engine.abort,
        on_stop=built.engine.stop,
        on_lost=on_lost,
        on_prepare=built.relocation.prepare,
        on_drop=built.relocation.drop,
    )


def _send_start(built: Assembled, link: RankLink) -> None:
    """Say what serves at the start."""
    placement = built.relocation.placement
    report = PlacementReport(
        rank=0, version=placement.version, state=MoveState.SERVING, digest=placement.digest()
    )
    link.send_placement(report, placement, read_slot(built.model.layers[0], 0).num_bytes)


def _send_report(report: PlacementReport, built: Assembled, link: RankLink) -> None:
    """Say what became of a placement, and rank 0 also where experts are now."""
    if report.state is MoveState.SERVING and report.rank == 0:
        slots = built.relocation.placement.slot_expert
        link.send_experts(built.experts._replace(version=report.version, slot_expert=slots))
    link.send_placement(report)


def _load_vocabulary(model: str) -> Vocabulary:
    """Read the tokenizer, which a rank needs for structures only: until then it costs neither time nor memory.

    Raises:
        StructureError: there is none, or it does not load.
    """
    slow = importlib.import_module("server.text.tokenizer")
    try:
        vocabulary: Vocabulary = slow.Tokenizer(model).vocabulary()
    except ValueError as error:  # TokenizerError: its class came with the slow import
        raise StructureError(str(error)) from error
    return vocabulary


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
