"""From the name of a device to how a model is built for it.

Names: `cpu`, `cuda` or `cuda:1`, and `interpreter`: the GPU path on CPU tensors, its kernels run by Triton's
interpreter, which is how it is tested where there is no GPU (the process must set TRITON_INTERPRET=1 before it
imports triton). Triton is an extra of the distribution, so the GPU path is imported when it is asked for.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dispatch.dispatched import TokenDispatcher
from dispatch.errors import WireUnavailable
from kvcache.paged_cache import PagedCache
from moe.backend import Backend
from moe.cpu.backend import CPU
from moe.model import Model
from scheduler.policy.config import ConfigError, EngineConfig
from scheduler.sampling.sampler import HostSampler, Sampler
from scheduler.step.forward import Forward

INTERPRETER = "interpreter"


def backend_of(config: EngineConfig) -> Backend:
    """Return how a model is built for a device.

    Raises:
        ConfigError: there is no such device.
    """
    if config.device == "cpu":
        return CPU
    if config.device.partition(":")[0] not in ("cuda", INTERPRETER):
        raise ConfigError(
            f"the device is {config.device!r}; it must be cpu, cuda, cuda:0 ... or {INTERPRETER}"
        )
    gpu = importlib.import_module("moe.gpu.backend")
    backend: Backend = gpu.open_backend(
        config.device, config.dtype, is_invariant=config.batch_invariant, compiler=config.compiler
    )
    return backend


def open_device_dispatcher(
    config: EngineConfig, backend: Backend, group: dist.ProcessGroup | None, slots_per_rank: int
) -> TokenDispatcher:
    """Return what moves tokens between experts on GPUs. Collective.

    Raises:
        WireUnavailable: what was asked for cannot work between these ranks.
    """
    if config.dispatch_node_size:
        raise WireUnavailable(
            f"--dispatch-node-size is {config.dispatch_node_size}; between GPUs every rank sends to every other: give 0"
        )
    gpu = importlib.import_module("dispatch.gpu.open")
    dispatcher: TokenDispatcher = gpu.open_gpu_dispatcher(
        config.all2all_backend,
        group,
        device=backend.device,
        slots_per_rank=slots_per_rank,
        rows=config.dispatch_dtype,
        timeout_s=config.timeout_s,
        epoch=config.epoch,
    )
    return dispatcher


def open_forward(
    model: Model, cache: PagedCache, *, replays: bool, report: Callable[[str, float], None]
) -> Forward:
    """Return what runs a model's steps: on a GPU, graphs of those that only decode, if it `replays`."""
    if model.device.type != "cuda" or not replays:
        return model.forward
    gpu = importlib.import_module("scheduler.step.graphs")
    step: Any = model.step  # a `DeviceStep`, as the backend made it
    graphs = gpu.DecodeGraphs(model.forward, step, cache)
    graphs.capture(step.graph_sizes, gpu.CudaRecorder(), lambda share: report("graphs", share))
    forward: Forward = graphs
    return forward


def open_sampler(config: EngineConfig, model: Model) -> Sampler:
    """Return what makes tokens of a model's logits: on a GPU its kernels, compiled now."""
    if config.device == "cpu":
        return HostSampler()
    gpu = importlib.import_module("scheduler.sampling.gpu.sampler")
    sampler = gpu.DeviceSampler(config.max_num_seqs, model.lm_head.shape[0], model.device)
    sampler.warm_up()
    opened: Sampler = sampler
    return opened
