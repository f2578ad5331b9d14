"""The engine process of one rank: join the job, load its share of the model, attach to the front, and run steps.

The supervisor (`server.serve.supervisor`) starts it with torchrun's environment. The engine on the front's node gets the front's
address in WIDEEP_FRONT and publishes it in the job's store; the others read it there. The engine writes
the HTTP address, the size of its KV cache and its readiness to its supervisor, on WIDEEP_READY_FD.

If a rank is lost, the others' steps fail but their processes stay, and form a new group when the front orders it. An error
here ends the process with one line, and its supervisor restarts it. WIDEEP_RESTARTS marks a restart: such an engine skips the
meeting at the start, attaches with its share loaded, and serves from its first order on.
"""

import gc
import importlib
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from dispatch.compiled.turns import compile_in_turn
from dispatch.errors import DispatchError, WireUnavailable
from expert_placement.placement import Placement
from kvcache.tiers.peers import PeerNetwork
from moe.families import UnsupportedModelError, import_model
from moe.load.checkpoint import CheckpointError
from moe.load.loader import EXPERTS, WEIGHTS
from scheduler.assembly import Assembled, assemble
from scheduler.epochs.heartbeat import Heartbeat
from scheduler.epochs.meeting import newest_epoch
from scheduler.epochs.orders import by_rank
from scheduler.policy.config import ConfigError, EngineConfig
from scheduler.policy.limits import SchedulerLimitsError
from scheduler.policy.request import RankStats, RequestOutput
from scheduler.sampling import draw
from scheduler.step.graphs import GraphError
from scheduler.step.lockstep import LockStepError
from scheduler.step.sizing import KVMemoryError
from scheduler.structure.compiler import StructureError, Vocabulary
from server.front.several.front_map import LEADING_NODE
from server.link.messages import Fault, Regrouped
from server.link.rank_link import LinkError, RefusedError, find_return, reach
from server.link.seal import mac
from server.machine.interfaces import find_interfaces, gloo_takes
from server.machine.lines import say
from server.machine.parent_death import die_with_parent
from server.options.flag import OptionsError
from server.options.pools import Pool
from server.options.reading import options_from_json
from server.options.table import PER_NODE, Options
from server.serve.child_messages import (
    Beat,
    CacheBytes,
    Leaving,
    Ready,
    ServiceUrl,
    SupervisorPipe,
)
from server.serve.children import (
    FRONT_IS_GONE,
    FRONT_VARIABLE,
    KEPT_VARIABLE,
    NODE_FRONTS_VARIABLE,
    STANDBY_VARIABLE,
)
from server.serve.greeting import address_elsewhere
from server.serve.node_fronts import map_of
from server.serve.preflight.adapter_room import rank_adapter_bytes
from server.serve.preflight.equal import computing_facts, file_digests
from server.serve.preflight.kv_share import cpu_cache_bytes, gpu_cache_bytes, gpu_share
from server.serve.preflight.memory import (
    attention_heads,
    available_bytes,
    rank_bytes,
    resident_bytes,
    spare_bytes,
)
from server.serve.preflight.model import PreflightError
from server.serve.rank.front_stream import FrontStream, StandbyFront, num_restarts_of
from server.serve.rank.front_streams import front_stream
from server.serve.rank.loading import Loading, loading_of
from server.serve.spare import ENGINE, leave_spare
from server.serve.standby.first_front import leave_first
from server.serve.store.job_store import FRONT_KEY, JobStore, NodeFrontsError, NoStandbyError
from server.serve.store.moving_store import JOIN_TIMEOUT_S
from server.serve.store.node_check import NodesDifferError, check_newcomer, check_nodes_together
from server.serve.store.rendezvous import Place, place_from
from server.serve.supervisor import UNDER_SERVE

RETURN_TIMEOUT_S = 20.0  # for the front's answer
STATS_EVERY = 50  # steps without outputs between two reports
FAILURES = (
    CheckpointError, ConfigError, DispatchError, GraphError, KVMemoryError, LinkError, LockStepError, NodesDifferError,
    NodeFrontsError, NoStandbyError, OptionsError, PreflightError, SchedulerLimitsError, UnsupportedModelError, dist.DistError,
)  # fmt: skip
# Failures that name ranks as the service counts them. All others are the engine's, which counts the ranks of its pool.
OF_SERVICE = (LinkError, NodeFrontsError, NodesDifferError, NoStandbyError, OptionsError, PreflightError)


class FrontGoneError(ConnectionError):
    """A restarted engine cannot reach the front, so it has no service to join."""


def run_engine(options: Options, *, environment: Mapping[str, str] = os.environ) -> int:
    """Run one rank until the front or the supervisor ends it; return the exit status."""
    _prepare_to_fork(options)
    while (order := leave_spare(environment, ENGINE)) is not None:  # returns in the spare when it takes over
        options, environment = options_from_json(order.options, order.environment), order.environment
    die_with_parent()
    place = place_from(environment)
    has_pools = options.pools or options.has_own_pool or place.pool
    pool = place.pool_in(options) if has_pools else None
    try:
        _serve(options, place, environment)
    except FrontGoneError:
        return FRONT_IS_GONE
    except FAILURES as error:
        text = str(error)
        if pool is not None and not isinstance(error, OF_SERVICE):
            text = by_rank(text, pool.ranks)
        say(f"rank {place.rank}: {type(error).__name__}: {text}", error=True)
        return 1
    return 0


def _prepare_to_fork(options: Options) -> None:
    """Import and compile what each engine of this model needs, so that the copy that replaces this one has it already.

    Not for GPUs: modules of some packages use the device when they are imported, and a fork cannot use it any more.
    """
    if options.device != "cpu":
        return
    with suppress(OSError, UnsupportedModelError):  # reported when the model is built
        import_model(Path(options.model))
    for kernel in draw.KERNELS:  # with the first one, numba registers its types and functions
        compile_in_turn(kernel.name, kernel.compile, waits=False)


def _serve(options: Options, place: Place, environment: Mapping[str, str]) -> None:
    """Serve one rank. `place` has its number in the service; the engine gets its number in the pool."""
    num_restarts, key = num_restarts_of(environment), options.cluster_key
    recovery_s = options.engine.front_recovery_timeout_s
    jobs = JobStore(place, environment, key, standby=options.standby, recovery_s=recovery_s)
    if num_restarts:
        jobs.move_if_lost()
    store, home = jobs.open(), None
    front, standby = _fronts(jobs, store, place, options, environment, is_start=num_restarts == 0)
    if num_restarts:
        _check_front(front, options.engine.front_recovery_timeout_s)
        place, home = _return_to(place, front, options, environment)
    pool = place.pool_in(options)
    in_pool, prefix = _place_in(pool, place), f"pool/{pool.name}"
    supervisor = SupervisorPipe(environment)
    supervisor.send(ServiceUrl(_http_address(front, environment)))
    loading = loading_of(
        place.rank, is_restart=num_restarts > 0, in_bytes=(WEIGHTS, EXPERTS), environment=environment
    )
    node = PrefixStore("nodes", store), place, Path(options.model), key, socket.gethostname()
    if num_restarts:
        if options.join is not None:
            check_newcomer(*node, pools=options.pools, has_own_pool=options.has_own_pool)
    else:
        if place.world_size > 1:
            loading.note("Waiting for the other ranks")
        check_nodes_together(*node, environment, pools=options.pools, may_grow=options.has_own_pool)
        _join(in_pool, PrefixStore(prefix, store))
    loading.note(f"Building the model {options.model} and testing its layers", stage="the model's layers")
    config = engine_config(options, in_pool)
    if config.memory_bytes is None:
        supervisor.send(CacheBytes(config.kv_cache_bytes))
    meetings = PrefixStore(f"{prefix}/membership", jobs.open())
    built = assemble(
        config,
        jobs.open_doorbell(f"{prefix}/doorbell"),
        loading,
        lambda: _load_vocabulary(options.model),
        store=meetings,
        host_store=PrefixStore("host", store),
        is_joining=num_restarts > 0,
        placement=home,
        available=available_bytes,
        network=_peer_network(options, place, front, environment),
    )
    if config.memory_bytes is not None:
        supervisor.send(CacheBytes(built.kv_cache_bytes))
    _tell_decisions(built, loading)
    # A full collection takes 0.2 s with torch and a model loaded, and every rank waits for it. Exclude all of this.
    gc.collect()
    gc.freeze()
    try:
        stream = front_stream(
            built,
            config,
            front,
            environment,
            pool=pool,
            num_ranks=place.world_size,
            cluster_key=key,
            standby=None if standby is None else StandbyFront(standby, jobs.move),
            newest_epoch=newest_epoch(meetings) if num_restarts else 0,
        )
        _walk(built, config, front, supervisor, stream, num_restarts)
    finally:
        built.engine.close()


def _return_to(
    place: Place, front: dict[str, str], options: Options, environment: Mapping[str, str]
) -> tuple[Place, Placement | None]:
    """Return the place of an engine that did not start with the service, and the placement to load: a resize may have changed
    the number of ranks since its supervisor started.

    Raises:
        FrontGoneError: The front is gone.
        RefusedError: The service does not want this rank.
    """
    timeout_s = options.engine.front_recovery_timeout_s or RETURN_TIMEOUT_S
    try:
        found = find_return(
            front["ranks_address"], front["token"], place.rank, timeout_s, cluster_key=options.cluster_key
        )
    except RefusedError:
        raise
    except LinkError as error:
        raise FrontGoneError from error
    if not found.num_ranks:  # its pool keeps its size
        return place, found.placement
    # Under serve all ranks are here. Under torchrun the number of this node's ranks does not change.
    num_local_ranks = found.num_ranks if UNDER_SERVE in environment else place.local_world_size
    place = replace(place, world_size=found.num_ranks, local_world_size=num_local_ranks, pool=None)
    return place, found.placement


def _place_in(pool: Pool, place: Place) -> Place:
    """Return a rank's place among the ranks of its pool. The place on its node stays the same."""
    return replace(place, rank=place.rank - pool.first_rank, world_size=pool.num_ranks)


def _tell_decisions(built: Assembled, loading: Loading) -> None:
    """Report decisions that do not follow from the options alone."""
    quantisation = built.model.skeleton.quantisation
    loading.note(f"Dispatch: {built.wire}; {built.dispatch}")
    if quantisation is not None:
        described = quantisation.described(fp8_rows=built.model.skeleton.backend.fp8_rows)
        loading.note(f"Weights: {described}")
    if built.memory:
        loading.note(f"Memory: {built.memory}")
    if built.num_states:
        loading.note(f"States: {built.states}")
    experts = built.experts
    loading.tell(
        model_type=built.model.skeleton.model.config.model_type,
        num_experts=experts.num_experts,
        moe_layers=len(experts.layers),
        layers=experts.num_hidden_layers,
        slots_per_rank=experts.slot_expert.shape[1] // experts.num_ranks,
        num_slots=int((experts.slot_expert[:1] >= 0).sum()),
        dispatch=built.wire,
        kv_cache_bytes=built.kv_cache_bytes,
        stored="" if quantisation is None else quantisation.names,
    )


def _check_front(front: dict[str, str], timeout_s: float) -> None:
    """Raise if the front of a running service is unreachable.

    Raises:
        FrontGoneError: The front does not answer in time.
    """
    try:
        reach(front["ranks_address"], timeout_s)
    except LinkError as error:
        raise FrontGoneError from error


def _join(place: Place, store: Store) -> None:
    """Form the process group with the other ranks, which may still be starting."""
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
    except RuntimeError as error:  # gloo raises nothing more specific if a peer is gone
        raise WireUnavailable(f"rank {place.rank} could not connect to the other ranks: {error}") from error


def _walk(
    built: Assembled,
    config: EngineConfig,
    front: dict[str, str],
    supervisor: SupervisorPipe,
    stream: FrontStream,
    num_restarts: int,
) -> None:
    """Attach to the front and run steps until the front or a failure ends them."""
    is_ready = num_restarts == 0

    def on_regrouped(epoch: int) -> None:
        nonlocal is_ready
        stream.link.send(Regrouped(epoch))
        if not is_ready:
            is_ready = True
            supervisor.send(Ready())

    def on_fault(epoch: int, reason: str, *, is_final: bool = False) -> None:
        stream.link.send(Fault(epoch, reason, is_final))

    def on_heartbeat(heartbeat: Heartbeat) -> None:
        supervisor.send_if_read(Beat(heartbeat.step))
        stream.link.send(heartbeat)
        stream.send_memory(resident_bytes())

    built.engine.tell_membership(on_fault, on_regrouped, on_heartbeat)
    built.relocation.on_report = stream.report
    if num_restarts:
        _check_front(front, config.front_recovery_timeout_s)
    stream.attach(JOIN_TIMEOUT_S, is_restart=num_restarts > 0)
    if is_ready:
        if config.rank == 0:
            stream.send_start()
        supervisor.send(Ready())
    idle_steps = 0

    def on_step(outputs: list[RequestOutput], stats: RankStats) -> None:
        nonlocal idle_steps
        idle_steps = 0 if outputs or not stats.num_step_tokens else idle_steps + 1
        if outputs or not stats.num_step_tokens or idle_steps >= STATS_EVERY:
            idle_steps = 0
            stream.send(outputs, stats)
        send_load_when_due()

    def send_load_when_due(*, is_sleeping: bool = False) -> None:
        now_s = time.monotonic()
        if built.telemetry.is_due(now_s, is_sleeping=is_sleeping):
            stream.link.send(
                built.telemetry.report(built.engine.step, built.relocation.placement.version, now_s)
            )

    try:
        built.engine.run(on_step, lambda: send_load_when_due(is_sleeping=True))
    except FAILURES as error:
        stream.close(f"{type(error).__name__}: {error}")
        raise
    finally:
        supervisor.send(Leaving())  # no heartbeats from here on; the shutdown may take a while
    stream.close()


def _load_vocabulary(model: str) -> Vocabulary:
    """Load the tokenizer. Ranks need it for structured outputs only, so it costs no time or memory before the first one.

    Raises:
        StructureError: The tokenizer is missing or does not load.
    """
    slow = importlib.import_module("server.front.tokenizer")
    try:
        vocabulary: Vocabulary = slow.Tokenizer(model).vocabulary()
    except ValueError as error:  # TokenizerError; its class is part of the slow import
        raise StructureError(str(error)) from error
    return vocabulary


def _http_address(front: dict[str, str], environment: Mapping[str, str]) -> str:
    """Return the URL of this node's front, or as other nodes see it, that of the leading one."""
    further = environment.get(NODE_FRONTS_VARIABLE)
    if further is not None:
        return str(json.loads(further)["http"])
    return front["http"] if FRONT_VARIABLE in environment else address_elsewhere(front)


def _fronts(
    jobs: JobStore,
    store: Store,
    place: Place,
    options: Options,
    environment: Mapping[str, str],
    *,
    is_start: bool,
) -> tuple[dict[str, str], dict[str, str] | None]:
    """Return the addresses of the front and of its standby, if there is one. Those that the supervisor has are published.

    If every node has fronts, their addresses are published together, and left for the fronts of this node.
    """
    if options.fronts == PER_NODE and options.join is None and not place.is_alone(options):
        return _fronts_of_nodes(jobs, store, place, environment, is_start=is_start), None
    bound = environment.get(STANDBY_VARIABLE)
    if bound is not None and is_start:
        first = jobs.publish_standby(json.loads(bound), store)
        leave_first(Path(environment[KEPT_VARIABLE]), first, jobs.first)
    given = environment.get(FRONT_VARIABLE)
    if given is not None:
        jobs.publish(json.loads(given), store)
    front: dict[str, str] = json.loads(given or store.get(FRONT_KEY))
    return front, jobs.find_standby(store, is_start=is_start)


def _fronts_of_nodes(
    jobs: JobStore, store: Store, place: Place, environment: Mapping[str, str], *, is_start: bool
) -> dict[str, str]:
    leading, further = (environment.get(each) for each in (FRONT_VARIABLE, NODE_FRONTS_VARIABLE))
    node = LEADING_NODE
    if leading is not None and is_start:
        num_nodes = int(environment.get("GROUP_WORLD_SIZE", place.world_size // place.local_world_size))
        jobs.publish(jobs.gather_fronts(json.loads(leading), store, num_nodes), store)
    elif further is not None and is_start:
        node = jobs.publish_further(json.loads(further), store)
    front: dict[str, str] = json.loads(store.get(FRONT_KEY))
    if (leading or further) is not None and is_start:
        map_of(front, node).write(Path(environment[KEPT_VARIABLE]))
    return front


def _peer_network(
    options: Options, place: Place, front: dict[str, str], environment: Mapping[str, str]
) -> PeerNetwork | None:
    """Return how other nodes fetch prefixes from this rank: on gloo's interface. None if there are no others."""
    if not options.engine.kv_offloading_bytes or place.is_alone(options):
        return None
    taken = gloo_takes(environment, find_interfaces(), socket.gethostname())
    if not taken.address:
        return None  # gloo connects no ranks there either
    secret = mac(options.cluster_key or b"", b"wideep prefixes", front["token"].encode())
    return PeerNetwork(taken.address, secret, options.engine.kv_transfer_backend == "nixl")


def engine_config(options: Options, place: Place) -> EngineConfig:
    """Return one rank's settings. The KV cache defaults to a share of the memory that is free now; a GPU's is measured later."""
    engine = options.engine
    assert engine.max_num_seqs and engine.max_num_batched_tokens, "the supervisor fills in the limits"
    num_bytes, memory_bytes = engine.kv_cache_bytes, None
    if num_bytes is None and options.device == "cuda":
        num_bytes, memory_bytes = _estimate_gpu(options, place)
    own = {
        "kv_cache_bytes": num_bytes or _default_cache_bytes(options, place),
        "memory_bytes": memory_bytes,
        "threads": engine.threads or 1,
    }
    return EngineConfig(
        **{**vars(engine), **own},
        directory=Path(options.model),
        rank=place.rank,
        world_size=place.world_size,
        num_local_ranks=place.local_world_size,
        device=f"cuda:{place.local_rank}" if options.device == "cuda" else "cpu",
        checkpoint_facts=json.dumps(file_digests(Path(options.model))) if engine.has_kv_tiers else "",
        software_facts=computing_facts() if engine.has_kv_tiers else "",
    )


def _estimate_gpu(options: Options, place: Place) -> tuple[int, int]:
    """Return an estimate of a GPU's KV cache, and all the memory that the rank may take."""
    free_bytes, _ = torch.cuda.mem_get_info(place.local_rank)
    adapters = rank_adapter_bytes(options, place.world_size)  # loaded while serving
    estimate = gpu_cache_bytes(
        options,
        attention_heads(options),
        free_bytes=free_bytes,
        weight_bytes=rank_bytes(options, place.world_size) + adapters,
    )
    return estimate, int(free_bytes * gpu_share(options)) - adapters


def _default_cache_bytes(options: Options, place: Place) -> int:
    """Return this rank's share of a machine's free memory, less the memory for moving experts."""
    return cpu_cache_bytes(
        options,
        free_bytes=available_bytes(),
        num_local_ranks=place.local_world_size,
        spare_bytes=spare_bytes(options, place.world_size),
    )
