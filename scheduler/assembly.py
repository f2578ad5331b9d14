"""Assemble one rank's engine (composition root). Settings, model and memory are checked before any weight is read."""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch.distributed import Store

from dispatch.compiled.turns import compile_in_turns
from dispatch.dispatched import TokenDispatcher
from dispatch.mode import fitting_capacity
from dispatch.wires.segment import available_bytes
from expert_placement.placement import Placement
from kvcache.blocks import BlockPool
from kvcache.memory import give_back
from kvcache.paged_cache import BLOCK_TOKENS, PagedCache
from kvcache.states import StatePool
from kvcache.step import Step
from kvcache.tiers.jobs import PeerAddress
from kvcache.tiers.peers import PeerNetwork
from kvcache.unit import block_parts, state_parts
from moe.backend import Backend
from moe.load.checkpoint import CheckpointError
from moe.load.loader import Report
from moe.long_rotary import limit_of
from moe.model import Model, Skeleton
from scheduler.drafts.drafter import Drafter, MadeDrafts, TextSource
from scheduler.engine import Engine
from scheduler.epochs.connections import EPOCH_PART, EpochConnections, break_silent
from scheduler.epochs.follower import EpochFollower, EpochLinks, RankParts, Regrouping
from scheduler.epochs.heartbeat import Heart
from scheduler.moves.adapters import AdapterLoads
from scheduler.moves.channel import NoPeers, Pace, PeerChannel
from scheduler.moves.expert_transfer import MovableLayer
from scheduler.moves.read_ahead import ReadAhead
from scheduler.moves.relocation import Relocation
from scheduler.moves.reports import ExpertMap
from scheduler.moves.telemetry import Telemetry, expert_map
from scheduler.policy.config import ConfigError, DispatchMode, EngineConfig, model_length, why_no_compiler
from scheduler.policy.scheduler import Scheduler
from scheduler.policy.state_tables import STATES_OF_ONE
from scheduler.sampling import draw
from scheduler.sampling.sampler import Sampler
from scheduler.start import Start, channel_of, meet, stay_alone
from scheduler.step.cache_tiers import open_tiers
from scheduler.step.device_memory import DeviceMemory, Measurement, device_memory, free_bytes, told_shortage
from scheduler.step.draft_passes import DraftPasses
from scheduler.step.lockstep import Doorbell, describe_modes
from scheduler.step.memory_switch import MemoryParts, MemorySwitch
from scheduler.step.parts import (
    backend_of,
    can_replay,
    open_checkpoint,
    open_forward,
    open_lockstep,
    open_sampler,
)
from scheduler.step.plan_time import PlanTime
from scheduler.step.prefill_pace import PrefillPace
from scheduler.step.rank_memory import CacheShare, measure, share_out, size_of_cache
from scheduler.step.runner import Runner
from scheduler.step.sizing import CacheSize
from scheduler.structure.compiler import LoadVocabulary, StructureCompiler, no_vocabulary
from scheduler.weights.loading import VersionLoader
from scheduler.weights.preparation import Preparation
from scheduler.weights.updates import RankWeights

ORDER_MARGIN_S = 60.0  # a rank waits this much longer for an order than the front waits for a rank to return
SWITCH_S = 0.5e-3  # CPython's default is 5 ms

KERNELS = "kernels, which a machine's first start compiles"  # a stage of loading


class Assembled(NamedTuple):
    """An engine, its parts and the facts that its service reports."""

    engine: Engine
    scheduler: Scheduler
    runner: Runner
    model: Model
    max_model_len: int
    num_blocks: int
    num_states: int
    wire: str  # the chosen wire and the reason
    dispatch: str  # the dispatch mode of each kind of step, and the row format
    telemetry: Telemetry
    experts: ExpertMap
    relocation: Relocation
    structures: StructureCompiler
    num_drafts: int  # most drafts per sequence and step
    kv_cache_bytes: int  # of this rank
    memory: str  # measured parts of a GPU's memory, for people; "" if nothing was measured
    read_ahead: ReadAhead
    kv_peer: PeerAddress | None = None  # where other nodes fetch prefixes; None if they cannot

    @property
    def states(self) -> str:
        """Describe the memory of recurrent states, for people."""
        shapes = self.model.skeleton.cache_shapes
        num_bytes = sum(shape.state.num_bytes for shape in shapes if shape.state)
        return (
            f"{num_bytes / 2**20:.2f} MiB per sequence, in {self.num_states} slots: {STATES_OF_ONE + self.num_drafts} for each running "
            f"request, the others for snapshots of cached prefixes"
        )


def assemble(
    config: EngineConfig,
    doorbell: Doorbell,
    report: Report = lambda _stage, _done, _total: None,
    load_vocabulary: LoadVocabulary = no_vocabulary,
    *,
    store: Store | None = None,
    host_store: Store | None = None,
    is_joining: bool = False,
    placement: Placement | None = None,
    available: Callable[[], int] = available_bytes,
    memory: DeviceMemory | None = None,
    network: PeerNetwork | None = None,
) -> Assembled:
    """Build one rank's engine. Collective over the default group if there are several ranks.

    Args:
        config: Settings of this rank.
        doorbell: Wakes the ranks of this job.
        report: Called with (stage, done, total) while weights load (in bytes), kernels compile and graphs are captured.
        load_vocabulary: Loads the vocabulary for structured output; called when the first such request arrives.
        store: The job's store, on a connection used for nothing else, where ranks meet in later epochs. With None they
            cannot meet, and the loss of a rank ends the others.
        host_store: Where the ranks of this host find the memory that they share, also ranks of other expert groups. None:
            `store`.
        is_joining: Do not meet other ranks now. The engine loads its share of weights as at a first start; `run` waits
            for an order to join an epoch. The call is then local and needs a store.
        placement: Which share of the experts a joining rank loads, over all ranks. None means the one of a first start.
        available: Returns the free memory in bytes; called before this rank takes over a lost rank's experts.
        memory: Counters of the device's memory, for tests. None: a GPU's own. With counters, the largest step runs before
            the cache is sized, unless the rank is joining.
        network: How ranks of other nodes fetch prefixes from this rank's host memory. None: they cannot.

    Raises:
        UnsupportedModelError, ConfigError, KVMemoryError, SchedulerLimitsError, CheckpointError,
        WireUnavailable: The message names what to change.
    """
    # The step loop releases the interpreter in every kernel. If another thread (moves, arriving requests) then runs
    # Python, the loop gets it back only after this interval. 5 ms would be a large part of a step, several times over.
    sys.setswitchinterval(SWITCH_S)
    check_compiler(config)
    torch.set_num_threads(1)  # torch's own operations are too small to share; kernels have their own threads
    prepared = _prepare(config, memory, is_joining=is_joining)
    backend, skeleton = prepared.backend, prepared.skeleton
    length, drafter = prepared.length, prepared.drafter
    _compile_kernels(config, skeleton, partial(report, KERNELS))
    connections = EpochConnections()
    with connections.opening():
        start = stay_alone(config, skeleton, placement) if is_joining else meet(config, skeleton)
    placement, dispatcher, mailbox_group, _ = start
    with told_shortage(prepared.memory, "the weights"):
        model = _load_model(config, prepared, start, report)
        sampler = open_sampler(config, model)
    found = _share_cache(config, prepared, start, model, sampler, report)
    size, scheduler = found.size, prepared.scheduler
    if size != prepared.size:
        scheduler = _make_scheduler(config, skeleton, length, size, drafter)
    with told_shortage(prepared.memory, "the KV cache and the graphs of steps"):
        cache = backend.make_cache(skeleton.cache_shapes, *size, prepared.step)
        if not (is_joining and backend.warms_up_together):  # otherwise its first steps warm it up
            progress = partial(report, KERNELS) if prepared.measurement is None else _ignore
            backend.warm_up(model, cache, progress)
        runner = _make_runner(config, prepared, dispatcher, model, cache, sampler, report)
    with connections.opening():
        channel = NoPeers() if is_joining else channel_of(config)
    relocation = _make_relocation(config, placement, model, channel, backend)
    lockstep = None if is_joining else open_lockstep(config, mailbox_group, placement.version)
    structures = StructureCompiler(load_vocabulary)
    tiers = open_tiers(config, cache, backend.device, host_store or store, backend.enter_thread, network)
    if tiers is not None:
        scheduler.use_tiers(tiers)
    telemetry = Telemetry(config.rank, model.load_counts, runner)
    weights = _make_weights(config, prepared, model, relocation, available)
    adapters = None
    if model.adapters is not None:
        adapters = AdapterLoads(config.rank, model.adapters, max_rank=config.max_lora_rank)
    read_ahead = ReadAhead(model, relocation, available, num_local_ranks=config.num_local_ranks)
    parts = None if store is None else RankParts(
        config=config, backend=backend, model=model, cache=cache, runner=runner, relocation=relocation,
        read_ahead=read_ahead, telemetry=telemetry, store=store, available=available, weights=weights, adapters=adapters,
        connections=connections,
    )  # fmt: skip
    links = None if lockstep is None else EpochLinks(dispatcher, lockstep)
    epochs = None if parts is None else _make_epochs(config, parts, links)
    heart = _make_heart(config, connections)
    # On GPUs a prompt's chunk is short, so nothing is measured without a target.
    pace = PrefillPace(
        config.target_itl_s, is_limited=config.device == "cpu" or config.target_itl_s is not None
    )
    engine = Engine(
        config.rank,
        scheduler,
        runner,
        lockstep,
        doorbell,
        relocation,
        structures,
        heart,
        epochs,
        memory=MemorySwitch(_memory_parts(scheduler, cache, model, relocation)),
        prefill_pace=pace,
        drafter=drafter,
        overlaps=_overlaps(config, drafter, size),
        plan_time=PlanTime() if backend.device.type == "cuda" else None,
        tiers=tiers,
        weights=weights,
        preparation=_make_preparation(config, prepared, scheduler, runner, model, size),
        adapters=adapters,
    )
    chosen = f"{dispatcher.name}, as {dispatcher.reason}"
    dispatch = f"{_describe_steps(config)}; tokens travel {dispatcher.row_format}"
    return Assembled(
        engine, scheduler, runner, model, length, *size, chosen, dispatch, telemetry,
        _map_experts(skeleton, placement), relocation, structures, config.num_drafts, found.kv_cache_bytes, found.memory,
        read_ahead, None if tiers is None or tiers.peers is None else tiers.peers.address,
    )  # fmt: skip


def _compile_kernels(config: EngineConfig, skeleton: Skeleton, report: Callable[[int, int], None]) -> None:
    """Compile kernels now, while all ranks of a machine need the same ones, so that they share the work.

    After the weights, ranks would need them one by one.
    """
    kernels = skeleton.backend.kernels(
        skeleton.model, skeleton.cache_shapes, config.num_adapters, config.world_size
    )
    if kernels:
        by_name = {kernel.name: kernel.compile for kernel in (*draw.KERNELS, *kernels)}
        compile_in_turns(by_name, lambda done: report(done, len(by_name)))


class _Prepared(NamedTuple):
    """The parts that are made and checked before any weight is read and any rank is met."""

    backend: Backend
    skeleton: Skeleton
    length: int  # most tokens of a sequence
    memory: DeviceMemory | None
    measurement: Measurement | None  # begun before anything was allocated
    size: CacheSize  # on a GPU an upper bound, until the largest step was measured
    made: MadeDrafts
    drafter: Drafter | None
    scheduler: Scheduler  # for `size`
    step: Step


def _prepare(config: EngineConfig, memory: DeviceMemory | None, *, is_joining: bool) -> _Prepared:
    backend = backend_of(config)
    skeleton = Skeleton(
        config.directory, backend, has_mtp=config.has_mtp, kv_cache_dtype=config.kv_cache_dtype
    )
    length = model_length(skeleton.model.config.get_text_config(decoder=True), config.max_model_len)
    memory = memory or device_memory(backend.device)
    measurement = None if memory is None or is_joining else Measurement(memory)
    size = size_of_cache(config, skeleton, length, config.memory_bytes or config.kv_cache_bytes)
    made = MadeDrafts()
    drafter = _make_drafter(config, skeleton, length, made)
    scheduler = _make_scheduler(config, skeleton, length, size, drafter)
    step = _make_step(config, length, backend)
    return _Prepared(backend, skeleton, length, memory, measurement, size, made, drafter, scheduler, step)


def _overlaps(config: EngineConfig, drafter: Drafter | None, size: CacheSize) -> bool:
    """Whether steps overlap where the dispatcher allows it.

    Drafts need the newest token. With recurrent states, steps of several ranks could not be run again after a loss.
    """
    wanted = config.device.startswith("cuda") if config.overlaps_steps is None else config.overlaps_steps
    can_run_again = config.world_size == 1 or not size.num_states
    return wanted and drafter is None and can_run_again


def _memory_parts(
    scheduler: Scheduler, cache: PagedCache, model: Model, relocation: Relocation
) -> MemoryParts:
    def free_cache() -> None:
        scheduler.free_cached()
        give_back([*block_parts(cache), *state_parts(cache)])

    def read_experts(is_over: Callable[[], bool]) -> bool:
        held = relocation.placement.local(relocation.place).tolist()
        try:
            return model.read_experts(held, is_over)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"the experts could not be read again: {error}") from error

    return MemoryParts(free_cache, lambda: model.release_experts(relocation.spare), read_experts)


def _make_weights(
    config: EngineConfig,
    prepared: _Prepared,
    model: Model,
    relocation: Relocation,
    available: Callable[[], int],
) -> RankWeights:
    """Return the part of updates of the base weights."""
    backend = prepared.backend
    if prepared.memory is not None:
        available = partial(free_bytes, prepared.memory)
    make_step = partial(_make_step, config, prepared.length, backend)
    loader = VersionLoader(config, model, relocation, make_step=make_step, available=available)
    return RankWeights(config.rank, loader.parts, enter_thread=backend.enter_thread)


def _make_preparation(
    config: EngineConfig,
    prepared: _Prepared,
    scheduler: Scheduler,
    runner: Runner,
    model: Model,
    size: CacheSize,
) -> Preparation | None:
    """Return the preparation of open requests for new weights. None if requests must be computed after the switch."""
    is_possible = (
        not prepared.backend.keeps_addresses  # otherwise only the serving model's captured steps can run
        and config.enable_prefix_caching
        and (config.keeps_snapshots or not size.num_states)
        and not config.has_mtp  # the layers that draft write the cache after a step
        and not _overlaps(config, prepared.drafter, size)
    )
    if not is_possible:
        return None
    is_bounded = config.dispatch_mode is DispatchMode.LOW_LATENCY
    agreed_tokens = fitting_capacity(config.max_num_batched_tokens) if is_bounded else 0
    return Preparation(scheduler, runner, model, agreed_tokens=agreed_tokens)


def _make_epochs(config: EngineConfig, parts: RankParts, links: EpochLinks | None) -> EpochFollower:
    return EpochFollower(Regrouping(parts, links), timeout_s=config.rank_recovery_timeout_s + ORDER_MARGIN_S)


def _make_heart(config: EngineConfig, connections: EpochConnections) -> Heart:
    def look() -> None:
        connections.break_silent(EPOCH_PART * config.heartbeat_timeout_s)
        break_silent(config.heartbeat_timeout_s)

    return Heart(
        config.rank,
        timeout_s=config.heartbeat_timeout_s,
        most_patience_s=config.distributed_timeout_s,
        look=look,
    )


def _map_experts(skeleton: Skeleton, placement: Placement) -> ExpertMap:
    num_layers = int(
        getattr(skeleton.model.config.get_text_config(decoder=True), "num_hidden_layers", 0) or 0
    )
    return expert_map(placement, list(skeleton.experts), num_layers)


def _ignore(_done: int, _total: int) -> None:
    """Report nothing."""


def _describe_steps(config: EngineConfig) -> str:
    return describe_modes(
        config.dispatch_mode, config.max_decode_tokens, config.max_num_batched_tokens, config.prompt_capacity
    )


def _make_scheduler(
    config: EngineConfig,
    skeleton: Skeleton,
    max_model_len: int,
    size: CacheSize,
    drafter: Drafter | None,
) -> Scheduler:
    return Scheduler(
        BlockPool(size.num_blocks, block_tokens=BLOCK_TOKENS),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        states=StatePool(size.num_states) if size.num_states else None,
        keeps_snapshots=config.keeps_snapshots,
        rotary_limit=limit_of(skeleton.model.config),
        keeps_images_whole=any(shape.sees_images for shape in skeleton.cache_shapes),
        repeats_decodes=config.repeats_decodes,
        drafter=drafter,
        overlaps=_overlaps(config, drafter, size),
    )


def _make_drafter(
    config: EngineConfig, skeleton: Skeleton, max_model_len: int, made: MadeDrafts
) -> Drafter | None:
    speculative = config.speculative_config
    if speculative is None:
        return None
    layers = skeleton.num_mtp_layers
    if 1 < layers < speculative.num_drafts:
        raise ConfigError(
            f"num_speculative_tokens is {speculative.num_drafts}, but this model has {layers} layers for multi-token "
            f"prediction, which draft one token each: give {layers} or less"
        )
    source, num_ahead = (made, speculative.num_drafts) if layers else (TextSource(speculative), 0)
    return Drafter(source, speculative.num_drafts, max_model_len=max_model_len, num_ahead=num_ahead)


def _make_step(config: EngineConfig, max_model_len: int, backend: Backend) -> Step:
    step = backend.make_step(
        max_tokens=config.max_num_batched_tokens,
        max_sequences=config.max_decode_tokens,  # on a GPU every draft counts as a sequence
        max_blocks=-(-max_model_len // BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        threads=config.threads,
        num_ranks=config.world_size,
    )
    step.num_adapters, step.max_adapter_rank = config.num_adapters, config.max_lora_rank
    return step


def _share_cache(
    config: EngineConfig, prepared: _Prepared, start: Start, model: Model, sampler: Sampler, report: Report
) -> CacheShare:
    """Return the size of the cache. On a GPU the largest step runs first, and the cache gets what it leaves."""
    if prepared.memory is not None and prepared.measurement is not None:
        memory, measurement = prepared.memory, prepared.measurement
        replays = can_replay(config, start.dispatcher)
        measured = measure(
            config, model, sampler, memory, measurement, replays=replays, report=partial(report, KERNELS)
        )
        return share_out(config, prepared.skeleton, prepared.length, measured, start.group)
    size = prepared.size
    if config.memory_bytes is not None:
        size = size_of_cache(config, prepared.skeleton, prepared.length, config.kv_cache_bytes)
    return CacheShare(config.kv_cache_bytes, size, "")


def _load_model(config: EngineConfig, prepared: _Prepared, start: Start, report: Report) -> Model:
    return Model(
        prepared.skeleton,
        dispatcher=start.dispatcher,
        placement=start.placement,
        rank=config.rank,
        step=prepared.step,
        dtype=config.dtype,
        quantization=config.quantization,
        num_spare=_num_spare(config, start.placement),
        most_adapters=config.most_adapters,
        lora_dtype=config.lora_dtype,
        checkpoint=open_checkpoint(config, prepared.skeleton),
        report=report,
    )


def _make_runner(
    config: EngineConfig,
    prepared: _Prepared,
    dispatcher: TokenDispatcher,
    model: Model,
    cache: PagedCache,
    sampler: Sampler,
    report: Report,
) -> Runner:
    forward = open_forward(model, cache, replays=can_replay(config, dispatcher), report=report)
    passes = None
    if prepared.drafter is not None and config.has_mtp:
        passes = DraftPasses(model, cache, sampler, prepared.drafter, prepared.made)
    return Runner(model, cache, dispatcher, forward, sampler, passes)


def _num_spare(config: EngineConfig, placement: Placement) -> int:
    """Return the number of spare expert slots. One layer's worth suffices for any plan; a single rank needs none."""
    if config.num_spare is not None:
        return config.num_spare
    return placement.slots_per_rank if config.world_size > 1 else 0


def check_compiler(config: EngineConfig) -> None:
    """Raise if the compiler cannot be used with the other settings.

    Raises:
        ConfigError: The message names the conflict and what to do.
    """
    problem = why_no_compiler(on_gpus=config.device != "cpu", is_invariant=config.batch_invariant)
    if config.enable_torch_compile and problem:
        raise ConfigError(problem)


def _make_relocation(
    config: EngineConfig, placement: Placement, model: Model, channel: PeerChannel, backend: Backend
) -> Relocation:
    places = [MovableLayer(layer, module) for layer, module in zip(model.layers, model.modules, strict=True)]
    pace = Pace(config.eplb_config.max_bytes_per_step)
    return Relocation(
        config.rank,
        placement,
        places,
        channel,
        pace,
        adapters=model.adapters,
        enter_thread=backend.enter_thread,
    )
