"""The parts of an engine that depend on the other ranks: met at a first start, or left open by a rank that joins later."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from dispatch.dispatched import TokenDispatcher, UnconnectedDispatcher
from dispatch.errors import WireUnavailable
from expert_placement.placement import Placement
from moe.model import Skeleton
from scheduler.moves.channel import ChannelError, PeerChannel, open_channel
from scheduler.moves.start_placement import start_placement
from scheduler.policy.config import EngineConfig
from scheduler.step.groups import check_agreed, hosts_of, open_groups
from scheduler.step.parts import open_dispatcher


class Start(NamedTuple):
    """What a rank knows of the others at its start."""

    placement: Placement
    dispatcher: TokenDispatcher
    mailbox_group: dist.ProcessGroup | None
    group: dist.ProcessGroup | None


def meet(config: EngineConfig, skeleton: Skeleton) -> Start:
    """Meet the other ranks. Collective.

    Raises:
        ConfigError, WireUnavailable: Settings or placements differ, or ranks cannot connect.
    """
    group, mailbox_group = open_groups(config)
    placement = _placement(config, skeleton, hosts_of(group))
    check_agreed(placement, group)
    dispatcher = open_dispatcher(config, skeleton.backend, group, placement.slots_per_rank)
    return Start(placement, dispatcher, mailbox_group, group)


def stay_alone(config: EngineConfig, skeleton: Skeleton, placement: Placement | None) -> Start:
    """Meet no other rank now. `placement` decides which experts to load. None means as at a first start. Local."""
    # The other ranks' hosts are unknown, so copies may be misplaced. An order corrects that; experts that differ are read.
    placement = placement or _placement(config, skeleton, hosts_of(None) * config.world_size)
    return Start(placement, UnconnectedDispatcher(config.world_size), None, None)


def channel_of(config: EngineConfig) -> PeerChannel:
    """Open the channel for moving experts. Collective.

    Raises:
        WireUnavailable: Ranks cannot connect.
    """
    try:
        return open_channel(list(range(config.world_size)))
    except ChannelError as error:
        raise WireUnavailable(f"rank {config.rank}: {error}") from error


def _placement(config: EngineConfig, skeleton: Skeleton, hosts: Sequence[str]) -> Placement:
    return start_placement(
        len(skeleton.experts),
        skeleton.num_experts,
        config.world_size,
        eplb=config.eplb_config,
        hosts=hosts,
        file=Path(config.expert_placement) if config.expert_placement else None,
    )
