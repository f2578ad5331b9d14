"""Choose the wire: the requested one, or the fastest that works between these ranks, with the reason.

The only place that decides. `availability` lists each wire's requirements without torch, so that a service can refuse
a wire before anything is loaded.
"""

import logging
from typing import Any

import torch.distributed as dist

from dispatch.errors import WireUnavailable
from dispatch.wires.availability import BACKENDS, ON_DEVICE, why_unavailable
from dispatch.wires.gloo import MIN_REGION_BYTES as MIN_GLOO_REGION_BYTES
from dispatch.wires.gloo import GlooWire
from dispatch.wires.local import LocalWire
from dispatch.wires.shm import ShmWire
from dispatch.wires.wire import Wire

_ASKED = "it was requested"

log = logging.getLogger(__name__)


def open_wire(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    timeout_s: float = 30.0,
    epoch: int = 0,
    region_bytes: int | None = None,
    mask_lost: bool = False,
) -> Wire:
    """Open a wire over all ranks of `group`. Collective.

    Args:
        name: One of BACKENDS. auto: local for one rank, shm if all ranks are on one host and can map the same
            memory, gloo otherwise. nvshmem and deep_ep are not wires: they do not exchange messages in windows.
        group: A gloo group, used to connect, and by gloo to exchange; for nccl, a group with a backend for the device.
            None is one rank.
        timeout_s: How long to wait for a peer.
        epoch: Membership epoch; a wire serves one.
        region_bytes: For shm and gloo, a multiple of 64, for gloo at least 1024: the largest message (with 64 bytes of
            gloo's) that is sent in one piece (default: chosen by the number of ranks).
        mask_lost: If a peer is lost or late by `timeout_s`, an exchange masks it and continues (see `Wire.mask`).
            gloo can mask a peer that died, but a peer that hangs is an error; nccl cannot mask.

    Raises:
        ValueError: Unknown name, local with more than one rank, or bad region_bytes or timeout_s.
        WireUnavailable: The requested wire cannot work here.
    """
    _check(name, region_bytes, timeout_s)
    world_size = 1 if group is None else dist.get_world_size(group)
    if name == "local" and world_size > 1:
        raise ValueError(f"wire is 'local' with {world_size} ranks; use auto, gloo or shm")
    if group is None or name == "local" or (world_size == 1 and name == "auto"):
        reason = _ASKED if name == "local" else "there is one rank"
        wire: Wire = LocalWire(epoch=epoch, reason=reason)
    else:
        settings = {"timeout_s": timeout_s, "epoch": epoch}
        wire = _open_between(name, group, settings, region_bytes=region_bytes, mask_lost=mask_lost)
    log.info("rank %d dispatches through %s, as %s", wire.rank, wire.name, wire.reason)
    return wire


def _check(name: str, region_bytes: int | None, timeout_s: float) -> None:
    if name not in BACKENDS:
        raise ValueError(f"wire is {name!r}; it must be one of {', '.join(BACKENDS)}")
    least = MIN_GLOO_REGION_BYTES if name == "gloo" else 64
    if region_bytes is not None and (region_bytes % 64 or region_bytes < least):
        raise ValueError(f"region_bytes is {region_bytes}; it must be a multiple of 64 and at least {least}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}; it must be above 0 seconds")


def _open_between(
    name: str,
    group: dist.ProcessGroup,
    settings: dict[str, Any],
    *,
    region_bytes: int | None,
    mask_lost: bool,
) -> Wire:
    if name in ON_DEVICE:
        problem = why_unavailable(name) or "it does not exchange windows of bytes, so it is not a wire"
        raise WireUnavailable(f"{name} cannot be used: {problem}; use auto, gloo or shm")
    reason = "all ranks are on one host and map the same memory" if name == "auto" else _ASKED
    if name != "gloo":
        try:
            return ShmWire(group, reason=reason, region_bytes=region_bytes, mask_lost=mask_lost, **settings)
        except WireUnavailable as error:  # raised on all ranks or none, so all fall back together
            if name == "shm":
                raise
            reason = str(error)
    if region_bytes is not None and region_bytes < MIN_GLOO_REGION_BYTES:
        region_bytes = None  # it was meant for shm
    return GlooWire(group, reason=reason, region_bytes=region_bytes, mask_lost=mask_lost, **settings)
