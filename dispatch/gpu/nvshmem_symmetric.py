# mypy: disable-error-code="no-any-return"
"""`SymmetricMemory` between GPUs of any hosts, by NVSHMEM (nvshmem4py): peers behind a network are reached by puts.

NVSHMEM is started once per process, with the ranks of the first group, and lasts as long as the process; a process
uses no other provider beside it, because every kernel that writes to peers is then linked with NVSHMEM's device library
(`triton_nvshmem`) and initialised when it is loaded. Written against nvshmem4py 0.4; tested with a stand-in, never run.
"""

import importlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.errors import WireUnavailable
from dispatch.gpu.nvshmem import find_device_library

_LINKED = ("send_rows", "send_answers", "post_flags", "post_refusal")  # the kernels that call NVSHMEM
_started: list[list[int]] = []  # the ranks that NVSHMEM was started with in this process


class NvshmemMemory:
    """See `SymmetricMemory`. Opening and closing are collective over `group`.

    Args:
        group: brings NVSHMEM's unique id to all ranks.
        num_bytes: of each rank, on NVSHMEM's symmetric heap (NVSHMEM_SYMMETRIC_SIZE).
        core: the module nvshmem.core, or what stands in for it; None: it is imported.

    Raises:
        WireUnavailable: a package is missing, or NVSHMEM runs in this process with other ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, num_bytes: int, device: torch.device, core: Any = None
    ) -> None:
        self.rank, self.world_size, self.device = dist.get_rank(group), dist.get_world_size(group), device
        self._core = core or _load()
        _start(self._core, group, device)
        self._buffer = self._core.buffer(num_bytes)
        self.memory: Tensor = torch.utils.dlpack.from_dlpack(self._buffer).view(torch.uint8).zero_()
        self.base = self.memory.data_ptr()
        addresses = [self._address_of(peer) for peer in range(self.world_size)]
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.reach: dict[str, Any] = {"HAS_REMOTE": 0 in addresses}
        if 0 in addresses:
            self.reach["extern_libs"] = {"libnvshmem_device": find_device_library()}
            _initialise_loaded_kernels(self._core)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody writes before everybody's memory is zero

    def close(self) -> None:
        """See `SymmetricMemory`; all ranks close, as NVSHMEM frees together."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._core.free(self._buffer)

    def _address_of(self, peer: int) -> int:
        """Return a peer's base address, 0 if it cannot be addressed from here."""
        if peer == self.rank:
            return self.base
        try:
            return int(self._core.get_peer_buffer(self._buffer, peer).handle)
        except self._core.NvshmemError:
            return 0


def _load() -> Any:
    try:
        return importlib.import_module("nvshmem.core")
    except ImportError as error:
        raise WireUnavailable(
            f"nvshmem needs the package nvshmem4py-cu13 ({error}); pip install 'wideep[gpu]'"
        ) from error


def _start(core: Any, group: dist.ProcessGroup, device: torch.device) -> None:
    """Start NVSHMEM with the ranks of the group as its processing elements, once per process."""
    ranks = dist.get_process_group_ranks(group)
    if _started:
        if _started[0] != ranks:
            raise WireUnavailable(
                f"NVSHMEM runs in this process with ranks {_started[0]}, and cannot run with ranks {ranks} too"
            )
        return
    rank = dist.get_rank(group)
    unique_id = core.get_unique_id(empty=rank != 0)
    content = unique_id._data.view(np.uint8)
    sent = [content.tobytes()]
    dist.broadcast_object_list(sent, src=ranks[0], group=group)
    content[...] = np.frombuffer(sent[0], dtype=np.uint8).reshape(content.shape)
    core.init(
        device=_device_of(device), uid=unique_id, rank=rank, nranks=len(ranks), initializer_method="uid"
    )
    _started.append(ranks)


def _device_of(device: torch.device) -> Any:
    """Return cuda.core's object for the device, made current; None for a stand-in's."""
    if device.type != "cuda":
        return None
    found = importlib.import_module("cuda.core").Device(device.index)
    found.set_current()
    return found


def _initialise_loaded_kernels(core: Any) -> None:
    """Have NVSHMEM initialise each of our kernels that calls it, when Triton has loaded it."""
    knobs = importlib.import_module("triton").knobs

    def initialise(module: int, _function: int, name: str, *_: Any) -> None:
        if name in _LINKED:
            core.module_init(core.NvshmemKernelObject.from_handle(module))

    knobs.runtime.kernel_load_end_hook.add(initialise)
