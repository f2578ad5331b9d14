"""What a public buffer exchanges through: where its tensors lie, a wire for normal mode, one thing for low latency.

On a machine without CUDA, and with a backend of the CPU anywhere, that is the CPU and `open_wire`. On a GPU it is
NCCL's collectives for normal mode and Triton kernels over symmetric memory for low-latency mode. What follows from
that choice on a GPU is tested with stand-ins on the CPU only, and was never run on one.
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
    """Opened by `open_wires`.

    Attributes:
        name: of the backend.
        mover: for normal mode.
        wire: of the CPU's low-latency mode; None where the device is none.
        device: where the tensors of all calls lie.
        group: the bootstrap group.
        provider: of symmetric memory between GPUs.
        timeout_s: how long a peer may keep this rank waiting.
        mask_lost: mask ranks that are lost in a low-latency call.
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
        """Open what low-latency calls go through. Collective on a GPU; see `low_latency.choose`."""
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
        backend: as `open_wire`; where there is a GPU auto means nccl, and nvshmem is nccl for normal mode.
        mask_lost: for low-latency mode; on the CPU its wire is opened so.

    Raises:
        as `open_wire`.
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
    """Say where a buffer's tensors lie; where there is no CUDA the wire's opening says what is missing."""
    return torch.device("cuda" if has_cuda and backend in _ON_GPU else "cpu")


def group_with_backend(
    group: dist.ProcessGroup, device_type: str, backend: str, *, timeout_s: float
) -> dist.ProcessGroup:
    """Return the group, or one of the same ranks that has `backend` for the device. Collective over the group.

    Callers of DeepEP often bring a gloo group: theirs only meets, and DeepEP's own kernels do the rest.
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
    """Open an exchange for the ranks of `group`. Collective where it is Triton's.

    Args:
        wire: for the CPU passes, where tokens lie there; not owned.
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


class Released:
    """Mixed into the buffers."""

    explicitly_destroy: bool
    runtime: Any
    _close: Callable[[], Any]

    def destroy(self) -> None:
        """Release the wire; peers that still wait for this rank get PeerLost. Local.

        Raises:
            ValueError: the buffer was made without explicitly_destroy=True.
        """
        if not self.explicitly_destroy:
            raise ValueError(
                "explicitly_destroy is False; a buffer that is made so is released with its last user"
            )
        self._close()
        self.runtime = None


def check_group(group: dist.ProcessGroup | None, comm: object) -> dist.ProcessGroup:
    """Return the group, or raise ValueError for what cannot take its place."""
    if comm is not None:
        raise ValueError(
            f"comm is {type(comm).__module__}.{type(comm).__name__}; ranks meet over torch.distributed here, "
            "pass a process group as group= and leave comm out"
        )
    if group is None:
        raise ValueError("group is None; it must be a torch.distributed process group over all ranks")
    return group
