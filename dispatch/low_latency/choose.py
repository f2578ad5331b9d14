"""Pick what moves low-latency calls: compiled CPU passes over a wire, or Triton kernels over symmetric memory.

By the device of the buffer: Triton on a GPU, CPU passes on the CPU. Triton on the CPU runs in its interpreter, which is
for tests: it must be asked for, and be switched on before Python starts. Triton is an optional package and imported
only where it is needed.
"""

import importlib
from typing import Any, Literal

import torch
import torch.distributed as dist

from dispatch.errors import WireUnavailable
from dispatch.gpu.symmetric import open_memory_for
from dispatch.low_latency.cpu_exchange import CpuExchange
from dispatch.low_latency.exchange import LowLatencyExchange
from dispatch.wires.wire import Wire

Kernels = Literal["auto", "triton"]
KERNELS = ("auto", "triton")


def open_low_latency(
    wire: Wire,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    kernels: str = "auto",
    provider: Literal["CUDA", "NVSHMEM"] = "CUDA",
    num_bytes: int = 0,
    timeout_s: float = 30.0,
    mask_lost: bool = False,
) -> LowLatencyExchange:
    """Open an exchange for the ranks of `group`. Collective where it is Triton's.

    Args:
        wire: for the CPU passes; not owned.
        device: where tokens lie.
        kernels: "auto", or "triton" for the kernels' interpreter on the CPU.
        provider: of memory between GPUs: "CUDA" maps that of peers which can be addressed, "NVSHMEM" reaches all.
        num_bytes: of symmetric memory to begin with.
        timeout_s, mask_lost: as the wire was opened with.

    Raises:
        ValueError: unknown kernels.
        WireUnavailable: no Triton, no interpreter on the CPU, or no symmetric memory.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; it must be one of {', '.join(KERNELS)}")
    if device.type == "cpu" and kernels == "auto":
        return CpuExchange(wire)
    kernels_module = load_triton(device)
    kind = "shared" if device.type == "cpu" else provider
    open_memory = open_memory_for(kind, group, device, timeout_s=timeout_s)
    exchange: LowLatencyExchange = kernels_module.LowLatencyBlocks(
        open_memory, dist.get_world_size(group), num_bytes=num_bytes, timeout_s=timeout_s, mask_lost=mask_lost
    )
    return exchange


def load_triton(device: torch.device) -> Any:
    """Import `dispatch.gpu.exchange`.

    Raises:
        WireUnavailable: Triton is not installed, or compiles where it should interpret.
    """
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        raise WireUnavailable(
            f"low-latency mode on {device} needs Triton, which cannot be imported ({error}); "
            "pip install 'wideep[gpu]'"
        ) from error
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise WireUnavailable(
            "kernels is 'triton' on the CPU, where only Triton's interpreter runs; set TRITON_INTERPRET=1 before "
            "Python starts, or leave kernels='auto'"
        )
    return importlib.import_module("dispatch.gpu.exchange")
