"""What a public buffer exchanges through: where its tensors lie, a wire for normal mode, one thing for low latency.

On a machine without CUDA, and with a backend of the CPU anywhere, that is the CPU and `open_wire`. On a GPU it is
NCCL's collectives for normal mode and Triton kernels over symmetric memory for low-latency mode. What follows from
that choice on a GPU is tested with stand-ins on the CPU only, and was never run on one.
"""

from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from dispatch.low_latency.choose import open_low_latency
from dispatch.low_latency.exchange import LowLatencyExchange
from dispatch.wires.choose import open_wire
from dispatch.wires.wire import Wire

_ON_GPU = ("auto", "nccl", "nvshmem")


class Wires(NamedTuple):
    """Opened by `open_wires`.

    Attributes:
        wire: for normal mode, and on the CPU for low-latency mode.
        device: where the tensors of all calls lie.
        group: the bootstrap group.
        provider: of symmetric memory between GPUs.
        timeout_s: how long a peer may keep this rank waiting.
        mask_lost: mask ranks that are lost in a low-latency call.
    """

    wire: Wire
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
    else:
        device = torch.device(device.type, torch.cuda.current_device())
        collectives = group_with_backend(group, device.type, "nccl", timeout_s=timeout_s)
        wire = open_wire("nccl", collectives, timeout_s=timeout_s)
    return Wires(wire, device, group, provider, timeout_s, mask_lost)


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
