"""Open the service's dispatcher between device tensors: the requested one or the best available, with the reason.

Two things are chosen: a wire for steps with prompts, and, if available, memory that kernels write to for decode steps.
Ranks exchange what they have, and all make the same decision from it (`decide`). The interpreter of kernels on
the CPU uses shared memory for both; the tests use it.
"""

import importlib
import logging
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dispatch.dispatched import TokenDispatcher
from dispatch.errors import WireUnavailable
from dispatch.gathered import gather_values
from dispatch.gpu.dispatcher import DeviceDispatcher, LocalPairs
from dispatch.gpu.exchange import LowLatencyPairs
from dispatch.gpu.nccl import GROUP_MARGIN_S, NcclRows
from dispatch.gpu.normal import NormalPairs
from dispatch.gpu.symmetric import open_memory_for
from dispatch.row_formats import describe_rows
from dispatch.rows import HostRows, RowMover
from dispatch.wires.availability import why_unavailable
from dispatch.wires.open import open_wire
from dispatch.wires.segment import identify_process

_HOST_WIRES = ("gloo", "shm")
_ASKED = "it was requested"
_INTERPRETER = "interpreter"


log = logging.getLogger(__name__)


class RankDevice(NamedTuple):
    """Device and libraries of one rank."""

    host: tuple[str, ...]
    gpu: str  # a unique name; "interpreter" on the CPU
    has_nccl: bool
    has_nvshmem: bool


class WireChoice(NamedTuple):
    """The choice for all ranks."""

    wire: str  # nccl, gloo, shm or auto
    memory: str  # for kernels: CUDA, NVSHMEM or shared; "" for none
    reason: str


def open_gpu_dispatcher(
    backend: str,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    slots_per_rank: int,
    rows: str = "auto",
    timeout_s: float = 30.0,
    epoch: int = 0,
) -> TokenDispatcher:
    """Open a dispatcher over all ranks of `group`. Collective.

    Args:
        backend: A name of `availability.BACKENDS`.
        group: A gloo group, used to connect; None is one rank.
        device: Device of the tokens, with its index; the CPU uses the interpreter.
        slots_per_rank: Equal on all ranks.
        rows: Format of rows on the wire, a name of `row_formats`.
        timeout_s: How long to wait for a peer.
        epoch: Membership epoch; a dispatcher serves one.

    Raises:
        ValueError: The name in `rows` is unknown.
        WireUnavailable: The requested backend cannot work here; on all ranks.
    """
    row_format, is_fp8 = describe_rows(rows), rows == "fp8"
    if group is None or dist.get_world_size(group) == 1:
        local = LocalPairs(slots_per_rank, device, is_fp8=is_fp8)
        return DeviceDispatcher(
            local, None, world_size=1, device=device, row_format=row_format, name="local", reason="there is one rank"
        )  # fmt: skip
    if backend == "deep_ep":
        deep_ep: Any = importlib.import_module("dispatch.gpu.deep_ep")
        dispatcher: TokenDispatcher = deep_ep.open_deep_ep(
            group, device=device, slots_per_rank=slots_per_rank, rows=rows
        )
        return dispatcher
    choice = decide(backend, _devices_of(device, group))
    name, mover = _open_mover(choice.wire, group, device, timeout_s=timeout_s, epoch=epoch)
    normal = NormalPairs(mover, device=device, slots_per_rank=slots_per_rank, is_fp8=is_fp8)
    low_latency, problem = _open_low_latency(
        choice.memory, group, device, timeout_s, slots_per_rank=slots_per_rank, is_fp8=is_fp8
    )
    if problem and backend == "nvshmem" and epoch == 0:
        mover.close()
        raise WireUnavailable(f"nvshmem cannot be used: {problem}; use auto")
    reason = f"{choice.reason}; but {problem}, so the host waits in every step" if problem else choice.reason
    if low_latency is not None:
        name = f"{name} and {choice.memory} memory"
    log.info("rank %d dispatches through %s, as %s", mover.rank, name, reason)
    return DeviceDispatcher(
        normal, low_latency, world_size=mover.world_size, device=device, row_format=row_format, name=name, reason=reason
    )  # fmt: skip


def decide(backend: str, facts: list[RankDevice]) -> WireChoice:
    """Choose for all ranks. Returns the same on each.

    Raises:
        WireUnavailable: The requested backend cannot work between these ranks.
    """
    if backend in _HOST_WIRES:
        return WireChoice(
            backend, "", f"{_ASKED}; rows go through the hosts' memory, and every step waits for it"
        )
    if all(rank.gpu == _INTERPRETER for rank in facts):
        return WireChoice("auto", "shared", "kernels are interpreted on the CPU")
    problem = _why_no_nccl(facts)
    if problem and backend == "auto":
        return WireChoice("auto", "", f"{problem}; rows go through the hosts' memory")
    if problem:
        raise WireUnavailable(f"{backend} cannot be used: {problem}; use auto, gloo or shm")
    return _decide_memory(backend, facts)


def _why_no_nccl(facts: list[RankDevice]) -> str:
    without = [rank for rank, own in enumerate(facts) if not own.has_nccl]
    if without:
        return f"ranks {without} have no NCCL"
    homes = [(own.host, own.gpu) for own in facts]
    shared = [rank for rank, home in enumerate(homes) if homes.count(home) > 1]
    return f"ranks {shared} share a GPU, which NCCL refuses" if shared else ""


def _decide_memory(backend: str, facts: list[RankDevice]) -> WireChoice:
    """Choose the memory for decode steps; NCCL serves the others."""
    without = [rank for rank, own in enumerate(facts) if not own.has_nvshmem]
    is_one_host = len({own.host for own in facts}) == 1
    if backend == "nvshmem":
        if without:
            raise WireUnavailable(f"nvshmem cannot be used: ranks {without} do not have it; use auto")
        return WireChoice("nccl", "NVSHMEM", f"{_ASKED}; decode steps use its memory, others NCCL")
    if is_one_host:
        asked = f"{_ASKED}, and " if backend == "nccl" else ""
        return WireChoice(
            "nccl", "CUDA", f"{asked}all GPUs are on one host: decode steps write to each other's memory"
        )
    if backend == "auto" and not without:
        return WireChoice("nccl", "NVSHMEM", "there are several hosts: decode steps use NVSHMEM, others NCCL")
    missing = "" if backend == "nccl" else f", and ranks {without} have no NVSHMEM"
    return WireChoice(
        "nccl", "", f"there are several hosts{missing}: NCCL serves every step, which waits for the host"
    )


def _devices_of(device: torch.device, group: dist.ProcessGroup) -> list[RankDevice]:
    """Return what every rank has. Collective."""
    said = gather_values(_own_facts(device), group)
    return [RankDevice(tuple(host), *others) for host, *others in said]


def _own_facts(device: torch.device) -> RankDevice:
    host = identify_process().host
    if device.type == "cpu":
        return RankDevice(host, _INTERPRETER, has_nccl=False, has_nvshmem=False)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return RankDevice(host, gpu, dist.is_nccl_available(), why_unavailable("nvshmem") is None)


def _open_mover(
    name: str, group: dist.ProcessGroup, device: torch.device, *, timeout_s: float, epoch: int
) -> tuple[str, RowMover]:
    """Open the wire for steps with prompts. Return its name, too."""
    if name != "nccl":
        wire = open_wire(name, group, timeout_s=timeout_s, epoch=epoch)
        return wire.name, HostRows(wire, device)
    ranks, limit = dist.get_process_group_ranks(group), timedelta(seconds=timeout_s + GROUP_MARGIN_S)
    nccl = dist.new_group(ranks, timeout=limit, backend="nccl")
    return name, NcclRows(nccl, device=device, timeout_s=timeout_s, epoch=epoch)


def _open_low_latency(
    memory: str, group: dist.ProcessGroup, device: torch.device, timeout_s: float, **options: Any
) -> tuple[LowLatencyPairs | None, str]:
    """Open kernels' access to other ranks' memory, on all ranks or none. Return it, or None and the reason."""
    if not memory:
        return None, ""
    exchange, problem = None, ""
    try:
        open_memory = open_memory_for(memory, group, device, timeout_s=timeout_s)
        exchange = LowLatencyPairs(open_memory, dist.get_world_size(group), timeout_s=timeout_s, **options)
    except WireUnavailable as error:
        problem = str(error)
    problems = [text for text in gather_values(problem, group) if text]
    if problems and exchange is not None:
        exchange.close()
    return (None, problems[0]) if problems else (exchange, "")
