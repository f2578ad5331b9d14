"""Pick the transport: what the user asked for, or the fastest that works between these ranks; and say why."""

import logging

import torch.distributed as dist

from dispatch.errors import TransportUnavailable
from dispatch.transport import Transport
from dispatch.transports.gloo import GlooTransport
from dispatch.transports.local import LocalTransport
from dispatch.transports.shm import ShmTransport

NAMES = ("auto", "local", "gloo", "shm")

log = logging.getLogger(__name__)


def open_transport(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    timeout_s: float = 30.0,
    epoch: int = 0,
    region_bytes: int | None = None,
) -> Transport:
    """Open a transport over all ranks of `group`. Collective.

    Args:
        name: one of NAMES. auto: local for one rank, shm when all ranks are on one host and can map the same
            memory, gloo otherwise.
        group: a gloo group, used to meet, and by gloo to exchange; None stands for one rank.
        timeout_s: how long a peer may keep this rank waiting.
        epoch: membership epoch; a transport serves one.
        region_bytes: of shm, a multiple of 64: the largest message that goes in one round; None: what fits.

    Raises:
        ValueError: unknown name, or local with more than one rank.
        TransportUnavailable: what was asked for by name cannot work here.
    """
    if name not in NAMES:
        raise ValueError(f"transport is {name!r}; it must be one of {', '.join(NAMES)}")
    world_size = 1 if group is None else dist.get_world_size(group)
    if group is None or (world_size == 1 and name == "auto"):
        transport: Transport = LocalTransport(epoch=epoch)
    elif name == "local":
        if world_size > 1:
            raise ValueError(f"transport is 'local' with {world_size} ranks; use auto, gloo or shm")
        transport = LocalTransport(epoch=epoch, reason="it was asked for")
    elif name == "gloo":
        transport = GlooTransport(group, timeout_s=timeout_s, epoch=epoch, reason="it was asked for")
    else:
        transport = _open_shared(name, group, timeout_s, epoch, region_bytes)
    log.info("rank %d dispatches through %s, as %s", transport.rank, transport.name, transport.reason)
    return transport


def _open_shared(
    name: str, group: dist.ProcessGroup, timeout_s: float, epoch: int, region_bytes: int | None
) -> Transport:
    reason = "it was asked for" if name == "shm" else "all ranks are on one host and map the same memory"
    try:
        return ShmTransport(group, timeout_s=timeout_s, epoch=epoch, reason=reason, region_bytes=region_bytes)
    except TransportUnavailable as error:  # on all ranks alike, so all fall back alike
        if name == "shm":
            raise
        return GlooTransport(group, timeout_s=timeout_s, epoch=epoch, reason=str(error))
