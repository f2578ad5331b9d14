"""Transport of a public buffer: the device of its tensors, a wire for normal mode, an exchange for low latency.

On a machine without CUDA, or with a CPU backend, that is the CPU and `open_wire`. On a GPU it is NCCL's collectives for
normal mode and Triton kernels over symmetric memory for low-latency mode. The GPU path is tested with stand-ins on the
CPU only, and has never run on a GPU.
"""

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from dispatch.errors import WireUnavailable
from dispatch.gpu.nccl import GROUP_MARGIN_S, NcclRows
from dispatch.gpu.symmetric import open_memory_for
from dispatch.low_latency.calls import LowLatencyExchange
from dispatch.low_latency.cpu import CpuExchange
from dispatch.rows import HostRows, RowMover
from dispatch.wires.open import open_wire
from dispatch.wires.wire import Wire

_ON_GPU = ("auto", "nccl", "nvshmem")


class Wires(NamedTuple):
    """Result of `open_wires`.

    Attributes:
        name: Name of the backend.
        mover: Transport of normal mode.
        wire: Wire of the CPU's low-latency mode; None on other devices.
        device: Device of the tensors of all calls.
        group: The bootstrap group.
        provider: Provider of symmetric memory between GPUs.
        timeout_s: How long to wait for a peer.
        mask_lost: Whether ranks that are lost in a low-latency call are masked.
    """

    name: str
    mover: RowMover
    wire: Wire | None
    device: torch.device
    group: dist.ProcessGroup
    provider: Literal["CUDA", "NVSHMEM"]
    timeout_s: float
    mask_lost: bool

    def open_low_latency(self, kernels: str, num_bytes: int) -> LowLatencyExchange:
        """Open the exchange of low-latency calls. Collective on a GPU; see the function `open_low_latency`."""
        return open_low_latency(
            self.wire,
            self.group,
            self.device,
            kernels=kernels,
            provider=self.provider,
            num_bytes=num_bytes,
            timeout_s=self.timeout_s,
            mask_lost=self.mask_lost,
        )


def open_wires(backend: str, group: dist.ProcessGroup, *, timeout_s: float, mask_lost: bool) -> Wires:
    """Open the wire of a public buffer. Collective.

    Args:
        backend: As in `open_wire`. With a GPU, auto means nccl, and nvshmem uses nccl for normal mode.
        mask_lost: For low-latency mode. On the CPU, the wire is opened with it.

    Raises:
        As `open_wire`.
    """
    device = device_of(backend, has_cuda=torch.cuda.is_available())
    provider: Literal["CUDA", "NVSHMEM"] = "NVSHMEM" if backend == "nvshmem" else "CUDA"
    if device.type == "cpu":
        wire = open_wire(backend, group, timeout_s=timeout_s, mask_lost=mask_lost)
        return Wires(wire.name, HostRows(wire, device), wire, device, group, provider, timeout_s, mask_lost)
    device = torch.device(device.type, torch.cuda.current_device())
    collectives = group_with_backend(group, device.type, "nccl", timeout_s=timeout_s + GROUP_MARGIN_S)
    mover = NcclRows(collectives, device=device, timeout_s=timeout_s)
    return Wires("nccl", mover, None, device, group, provider, timeout_s, mask_lost)


def device_of(backend: str, *, has_cuda: bool) -> torch.device:
    """Return the device of a buffer's tensors. Without CUDA it is the CPU, and opening the wire raises the error."""
    return torch.device("cuda" if has_cuda and backend in _ON_GPU else "cpu")


def group_with_backend(
    group: dist.ProcessGroup, device_type: str, backend: str, *, timeout_s: float
) -> dist.ProcessGroup:
    """Return the group, or a new one of the same ranks with `backend` for the device. Collective over the group.

    Callers of DeepEP often pass a gloo group: DeepEP only connects with it, and its own kernels move the data.
    """
    config = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if config.get(device_type) == backend:
        return group
    ranks = dist.get_process_group_ranks(group)
    made: Any = dist.new_group(
        ranks, timeout=timedelta(seconds=timeout_s), backend=backend, use_local_synchronization=True
    )
    return made  # type: ignore[no-any-return]


Kernels = Literal["auto", "triton"]
KERNELS = ("auto", "triton")


def open_low_latency(
    wire: Wire | None,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    kernels: str = "auto",
    provider: Literal["CUDA", "NVSHMEM"] = "CUDA",
    num_bytes: int = 0,
    timeout_s: float = 30.0,
    mask_lost: bool = False,
) -> LowLatencyExchange:
    """Open an exchange for the ranks of `group`. Collective if it uses Triton.

    Args:
        wire: Wire for the CPU passes if tokens are on the CPU; not owned.
        device: Device of the tokens.
        kernels: "auto", or "triton" for the kernels' interpreter on the CPU.
        provider: Provider of memory between GPUs: "CUDA" maps memory of addressable peers, "NVSHMEM" reaches all.
        num_bytes: Initial size of symmetric memory.
        timeout_s, mask_lost: As the wire was opened with.

    Raises:
        ValueError: Unknown kernels.
        WireUnavailable: No Triton, no interpreter on the CPU, or no symmetric memory.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; it must be one of {', '.join(KERNELS)}")
    if wire is not None and kernels == "auto":
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
        WireUnavailable: Triton is not installed, or it compiles although it must interpret.
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


class Released:
    """Release of buffers, as a mixin."""

    explicitly_destroy: bool
    runtime: Any
    _close: Callable[[], Any]

    def destroy(self) -> None:
        """Release the wire; peers that still wait for this rank get PeerLost. Local.

        Raises:
            ValueError: The buffer was opened without explicitly_destroy=True.
        """
        if not self.explicitly_destroy:
            raise ValueError(
                "explicitly_destroy is False; open the buffer with explicitly_destroy=True to call destroy()"
            )
        self._close()
        self.runtime = None


def check_group(group: dist.ProcessGroup | None, comm: object) -> dist.ProcessGroup:
    """Return the group. Raises ValueError for an argument that is not a group."""
    if comm is not None:
        raise ValueError(
            f"comm is {type(comm).__module__}.{type(comm).__name__}; ranks connect over torch.distributed here: "
            "pass a process group as group= and no comm"
        )
    if group is None:
        raise ValueError("group is None; it must be a torch.distributed process group over all ranks")
    return group
