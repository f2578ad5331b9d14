"""What ties a rank to the others: process groups, the dispatchers of a step's rows, the lock-step.

Groups are made here and given away; nothing else keeps them (D8 of the design).
"""

from collections.abc import Sequence

import torch.distributed as dist

from dispatch.alternating import AlternatingDispatcher
from dispatch.dispatched import TokenDispatcher
from dispatch.dispatcher import Dispatcher
from dispatch.errors import WireUnavailable
from dispatch.hierarchical.groups import open_hierarchical
from dispatch.mailbox import open_mailbox
from dispatch.row_formats import row_format
from dispatch.wires.choose import open_wire
from moe.backend import Backend
from scheduler.moves.peer_channel import make_group
from scheduler.policy.config import EngineConfig
from scheduler.step.devices import open_device_dispatcher
from scheduler.step.lockstep import DispatchMode, Header, LockStep
from scheduler.turns import Turns


def open_groups(
    config: EngineConfig, connect_timeout_s: float | None = None
) -> list[dist.ProcessGroup | None]:
    """Make the groups of the wires, one for each half of a step, and of the mailbox, which is last: they run side
    by side, so they need one each. Collective; one rank has none.

    Args:
        connect_timeout_s: how long making one may take; None: as long as what it is used for.

    Raises:
        WireUnavailable: ranks could not meet.
    """
    if config.world_size == 1:
        return [None, None]
    count = 2 if config.halves is None else 3
    ranks = list(range(config.world_size))
    try:
        return [make_group(ranks, config.timeout_s, connect_timeout_s) for _ in range(count)]
    except RuntimeError as error:  # all that gloo says of a peer that is gone
        raise WireUnavailable(f"rank {config.rank} could not meet the others: {error}") from error


def open_dispatchers(
    config: EngineConfig,
    backend: Backend,
    groups: Sequence[dist.ProcessGroup | None],
    slots_per_rank: int,
    turns: Turns,
) -> TokenDispatcher:
    """Open one dispatcher, or two that alternate where steps may run in halves. Collective.

    Raises:
        WireUnavailable: what was asked for cannot work between these ranks.
    """
    first, *others = [_open_dispatcher(config, backend, group, slots_per_rank) for group in groups]
    return AlternatingDispatcher(first, others[0], turns) if others else first


def open_lockstep(
    config: EngineConfig, group: dist.ProcessGroup | None, placement_version: int, step: int = 0
) -> LockStep:
    """Open this rank's part in what ranks agree on before each step, of which `step` is the first. Collective."""
    width = len(Header._fields)
    mailbox = open_mailbox(config.all2all_backend, group, width=width, timeout_s=config.timeout_s)
    return LockStep(
        mailbox,
        epoch=config.epoch,
        timeout_s=config.timeout_s,
        mode=config.dispatch_mode,
        max_num_batched_tokens=config.max_num_batched_tokens,
        placement_version=placement_version,
        halves=config.halves,
        step=step,
    )


def can_replay(config: EngineConfig, dispatcher: TokenDispatcher) -> bool:
    """Whether decode steps may be replayed: several ranks do so in low-latency mode only."""
    has_steps = config.world_size == 1 or config.dispatch_mode is not DispatchMode.NORMAL
    return dispatcher.is_replayable and has_steps and not config.enforce_eager


def _open_dispatcher(
    config: EngineConfig, backend: Backend, group: dist.ProcessGroup | None, slots_per_rank: int
) -> TokenDispatcher:
    if config.device != "cpu":
        return open_device_dispatcher(config, backend, group, slots_per_rank)
    name, timeout_s, epoch = config.all2all_backend, config.timeout_s, config.epoch
    if config.dispatch_node_size:
        return open_hierarchical(
            name,
            group,
            node_size=config.dispatch_node_size,
            slots_per_rank=slots_per_rank,
            timeout_s=timeout_s,
            epoch=epoch,
            rows=config.dispatch_dtype,
        )
    wire = open_wire(name, group, timeout_s=timeout_s, epoch=epoch)
    return Dispatcher(wire, slots_per_rank=slots_per_rank, rows=row_format(config.dispatch_dtype))
