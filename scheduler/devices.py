"""From the name of a device to how a model is built for it.

Names: `cpu`, `cuda` or `cuda:1`, and `interpreter`: the GPU path on CPU tensors, its kernels run by Triton's
interpreter, which is how it is tested where there is no GPU (the process must set TRITON_INTERPRET=1 before it
imports triton). Triton is an extra of the distribution, so the GPU path is imported when it is asked for.
"""

import importlib
from collections.abc import Callable
from typing import Any

from dispatch.dispatched import TokenDispatcher
from dispatch.errors import TransportUnavailable
from kvcache.paged_cache import PagedCache
from moe.backend import Backend
from moe.cpu_backend import CPU
from moe.model import Model
from scheduler.config import ConfigError
from scheduler.forward import Forward

INTERPRETER = "interpreter"


def backend_of(device: str, dtype: str, *, is_invariant: bool = False) -> Backend:
    """Return how a model is built for a device.

    Args:
        device: see the module.
        dtype: auto, float32 or bfloat16; what a GPU computes in (auto: bfloat16).
        is_invariant: whether a row's bits must not depend on the rows beside it on a GPU; on a CPU they never do.

    Raises:
        ConfigError: there is no such device.
    """
    if device == "cpu":
        return CPU
    if device.partition(":")[0] not in ("cuda", INTERPRETER):
        raise ConfigError(f"the device is {device!r}; it must be cpu, cuda, cuda:0 ... or {INTERPRETER}")
    gpu = importlib.import_module("moe.gpu.backend")
    backend: Backend = gpu.open_backend(device, dtype, is_invariant=is_invariant)
    return backend


def local_dispatcher(backend: Backend, world_size: int, slots: int) -> TokenDispatcher:
    """Return what moves tokens between the experts of one rank on a GPU.

    Raises:
        TransportUnavailable: there are more ranks.
    """
    if world_size > 1:
        raise TransportUnavailable(
            f"{world_size} ranks on GPUs cannot exchange tokens in this version; give --data-parallel-size 1, or "
            f"--device cpu"
        )
    gpu = importlib.import_module("dispatch.gpu.local")
    dispatcher: TokenDispatcher = gpu.LocalDispatcher(device=backend.device, slots=slots)
    return dispatcher


def open_forward(
    model: Model, cache: PagedCache, *, enforce_eager: bool, report: Callable[[str, float], None]
) -> Forward:
    """Return what runs a model's steps: on a GPU, graphs of those that only decode, unless `enforce_eager`."""
    if model.device.type != "cuda" or enforce_eager:
        return model.forward
    gpu = importlib.import_module("scheduler.gpu.graphs")
    step: Any = model.step  # the GPU's, which knows its sizes
    graphs = gpu.DecodeGraphs(model.forward, step, cache)
    graphs.capture(step.sizes, gpu.CudaRecorder(), lambda share: report("graphs", share))
    forward: Forward = graphs
    return forward
