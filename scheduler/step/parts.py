"""Build an engine's parts from its settings: backend, weights, dispatcher, lock-step, forward and sampler.

Devices are `cpu`, `cuda` or `cuda:1`, and `interpreter`: the GPU path on CPU tensors, with kernels run by Triton's
interpreter, for tests on machines without a GPU (set TRITON_INTERPRET=1 before the process imports triton). Triton is
an optional dependency, so the GPU path is imported only when it is used. Dispatcher and lock-step belong to an epoch
and are opened again for the next one.
"""

import importlib
import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dispatch.dispatched import TokenDispatcher
from dispatch.dispatcher import Dispatcher
from dispatch.errors import WireUnavailable
from dispatch.hierarchical import open_hierarchical
from dispatch.row_formats import row_format
from dispatch.wires.mailbox import open_mailbox
from dispatch.wires.open import open_wire
from kvcache.paged_cache import PagedCache
from moe.backend import Backend
from moe.cpu.backend import CPU
from moe.families import read_config
from moe.load.checkpoint import Checkpoint
from moe.load.loader import Report
from moe.load.random_checkpoint import RandomCheckpoint
from moe.load.random_quantised import RandomQuantised
from moe.model import Model, Skeleton
from scheduler.policy.config import (
    ConfigError,
    DispatchMode,
    EngineConfig,
    why_no_adapters,
    why_no_fp8_rows,
    why_no_nodes,
)
from scheduler.sampling.device_sampler import DeviceSampler
from scheduler.sampling.sampler import HostSampler, Sampler
from scheduler.step.device_memory import DeviceMemory, GraphBytes, some_sizes
from scheduler.step.lockstep import Header, LockStep
from scheduler.step.runner import Forward

INTERPRETER = "interpreter"

log = logging.getLogger(__name__)


def backend_of(config: EngineConfig) -> Backend:
    """Return the backend that builds a model for the configured device.

    Raises:
        ConfigError: The device is unknown, or does not support a setting.
    """
    backend_name = config.all2all_backend
    if config.enable_lora and (problem := why_no_adapters(config.device, config.world_size, backend_name)):
        raise ConfigError(problem)
    if config.device == "cpu":
        if problem := why_no_fp8_rows(config.activation_dtype):
            raise ConfigError(problem)
        return CPU
    if config.device.partition(":")[0] not in ("cuda", INTERPRETER):
        raise ConfigError(
            f"the device is {config.device!r}; it must be cpu, cuda, cuda:0 ... or {INTERPRETER}"
        )
    gpu = importlib.import_module("moe.gpu.backend")
    backend: Backend = gpu.open_backend(
        config.device,
        config.dtype,
        is_invariant=config.batch_invariant,
        compiler=config.compiler if config.enable_torch_compile else "",
        activation_dtype=config.activation_dtype,
        has_adapters=config.enable_lora,
    )
    return backend


def open_device_dispatcher(
    config: EngineConfig, backend: Backend, group: dist.ProcessGroup | None, slots_per_rank: int
) -> TokenDispatcher:
    """Open the dispatcher of tokens between experts on GPUs. Collective.

    Raises:
        WireUnavailable: The requested wire cannot work between these ranks.
    """
    if config.dispatch_node_size:
        raise WireUnavailable(why_no_nodes(config.dispatch_node_size))
    gpu = importlib.import_module("dispatch.gpu.open")
    dispatcher: TokenDispatcher = gpu.open_gpu_dispatcher(
        config.all2all_backend,
        group,
        device=backend.device,
        slots_per_rank=slots_per_rank,
        rows=config.dispatch_dtype,
        timeout_s=config.distributed_timeout_s,
        epoch=config.epoch,
    )
    return dispatcher


def open_forward(model: Model, cache: PagedCache, *, replays: bool, report: Report) -> Forward:
    """Return the function that runs steps. On a GPU with `replays`, it replays steps from graphs: decode-only ones, and a
    lone rank's short steps with prompts."""
    if model.device.type != "cuda" or not replays:
        return model.forward
    gpu = importlib.import_module("scheduler.step.graphs")
    step: Any = model.step  # the backend's `DeviceStep`
    graphs = gpu.StepGraphs(model.forward, step, cache)
    graphs.capture(
        step.graph_sizes, gpu.CudaRecorder(), partial(report, "graphs"), prompt_sizes=step.replayable_prompts
    )
    if graphs.why_no_prompts is not None:
        log.warning(
            "steps with prompts of %s run without CUDA graphs, which makes short prompts slower: %s",
            model.net.config.model_type,
            graphs.why_no_prompts,
        )
    log.info("CUDA graphs of %d sizes take %d MiB", graphs.num_graphs, graphs.num_bytes >> 20)
    forward: Forward = graphs
    return forward


def estimate_graphs(model: Model, cache: PagedCache, memory: DeviceMemory | None, *, replays: bool) -> int:
    """Return the bytes that the graphs of `open_forward` take, by the memory of a few that are captured and dropped."""
    if memory is None or model.device.type != "cuda" or not replays:
        return 0
    gpu = importlib.import_module("scheduler.step.graphs")
    step: Any = model.step
    return int(
        estimate_captures(gpu.StepGraphs(model.forward, step, cache), step, gpu.CudaRecorder(), memory)
    )


def estimate_captures(graphs: Any, step: Any, recorder: Any, memory: DeviceMemory) -> int:
    """Capture a few graphs, and estimate the bytes of all of the step's sizes."""
    taken = GraphBytes(memory)
    prompts = step.replayable_prompts
    graphs.capture(
        some_sizes(step.graph_sizes),
        recorder,
        taken.note,
        prompt_sizes=some_sizes(prompts) if prompts else (),
    )
    count = (len(step.graph_sizes) + len(prompts)) * (2 if step.num_adapters else 1)
    num_bytes = taken.of_all(count)
    step.fix_prompts(())
    return num_bytes


def open_sampler(config: EngineConfig, model: Model) -> Sampler:
    """Return the sampler for a model's logits, with its kernels loaded. On a GPU it runs there."""
    if config.device == "cpu":
        host = HostSampler(model.step.team)
        host.warm_up()
        return host
    gpu = importlib.import_module("scheduler.sampling.gpu.draws")
    sampler = DeviceSampler(model.device, gpu.KernelChoice(model.device))
    if config.device != INTERPRETER:  # it has nothing to compile
        sampler.warm_up(model.lm_head.shape[0])
    return sampler


def open_checkpoint(config: EngineConfig, skeleton: Skeleton) -> Checkpoint:
    """Open the model's checkpoint, or a source of random weights.

    Raises:
        ConfigError: The load format is unknown.
        CheckpointError: The directory has no readable weights.
    """
    if config.load_format == "auto":
        return Checkpoint(config.directory)
    if config.load_format != "dummy":
        raise ConfigError(f"load_format is {config.load_format!r}; it must be auto or dummy")
    about: dict[str, Any] = {"device": skeleton.backend.device, "dtype": _drawn_dtype(skeleton)}
    if skeleton.quantisation is not None:
        return RandomQuantised(config.directory, skeleton.model, skeleton.quantisation, **about)
    return RandomCheckpoint(config.directory, skeleton.model, **about)


def _drawn_dtype(skeleton: Skeleton) -> torch.dtype:
    """Return the type of random weights. A CPU stores weights as published, although it computes in float32."""
    if skeleton.backend is not CPU:
        return skeleton.backend.model_dtype
    config = read_config(skeleton.directory)
    published = config.dtype or config.get_text_config(decoder=True).dtype
    return torch.bfloat16 if published == torch.bfloat16 else CPU.model_dtype


def open_lockstep(
    config: EngineConfig, group: dist.ProcessGroup | None, placement_version: int, step: int = 0
) -> LockStep:
    """Open this rank's part in the lock-step. `step` is the number of the first step. Collective."""
    width = len(Header._fields)
    mailbox = open_mailbox(config.all2all_backend, group, width=width, timeout_s=config.distributed_timeout_s)
    return LockStep(
        mailbox,
        epoch=config.epoch,
        timeout_s=config.distributed_timeout_s,
        mode=config.dispatch_mode,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prompt_capacity=config.prompt_capacity,
        placement_version=placement_version,
        step=step,
    )


def can_replay(config: EngineConfig, dispatcher: TokenDispatcher) -> bool:
    """Whether decode steps may be replayed. Several ranks replay only in low-latency mode."""
    has_steps = config.world_size == 1 or config.dispatch_mode is not DispatchMode.NORMAL
    return dispatcher.is_replayable and has_steps and not config.enforce_eager


def open_dispatcher(
    config: EngineConfig, backend: Backend, group: dist.ProcessGroup | None, slots_per_rank: int
) -> TokenDispatcher:
    """Open the dispatcher that takes a step's rows to their experts and back. Collective.

    Raises:
        WireUnavailable: The requested wire cannot work between these ranks.
    """
    if config.device != "cpu":
        return open_device_dispatcher(config, backend, group, slots_per_rank)
    slots_per_rank *= 1 + config.num_adapters  # see `moe.cpu.experts.PackedExpertLayer.num_groups`
    name, timeout_s, epoch = config.all2all_backend, config.distributed_timeout_s, config.epoch
    if config.dispatch_node_size:
        return open_hierarchical(
            name,
            group,
            node_size=config.dispatch_node_size,
            slots_per_rank=slots_per_rank,
            timeout_s=timeout_s,
            epoch=epoch,
            rows=config.dispatch_dtype,
        )
    wire = open_wire(name, group, timeout_s=timeout_s, epoch=epoch)
    return Dispatcher(wire, slots_per_rank=slots_per_rank, rows=row_format(config.dispatch_dtype))
