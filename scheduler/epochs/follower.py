"""From one epoch to the next: a rank that stands alone waits for the front's order and follows it, until one holds.

What can go wrong on the way is told and outlived: a member that dies meanwhile, or does not come, is a fault like any
other, and so is an order that this rank has no memory for, which only another order helps. A newer order overtakes
the one that is followed. Only where no order comes at all, or an error is a bug, the engine ends.

Process groups, dispatchers, lock-step, channel and the slots' contents belong to an epoch; weights, KV cache, scheduler,
sequences and the link to the front outlive it. `Regrouping.part` lets go of what belongs to the epoch first, so that
whoever still waits for this rank is woken; `follow` then does alone what it can do alone (room, weights), and only
then meets the others, so that a slow disk keeps nobody inside a collective.
While ranks are away rows travel flat, also where --dispatch-node-size asks for nodes: members need not divide by it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed import Store

from dispatch.dispatched import TokenDispatcher
from dispatch.errors import DispatchTimeout, PeerLost, WireUnavailable
from dispatch.gathered import gather_values
from expert_placement.placement import Placement
from kvcache.paged_cache import PagedCache
from moe.backend import Backend
from moe.expert_weights import Held, num_to_read
from moe.load.checkpoint import CheckpointError
from moe.model import Model
from scheduler.epochs.meeting import CONNECT_TIMEOUT_S, meet, part
from scheduler.epochs.orders import (
    CannotHoldError,
    IsOver,
    OnFault,
    OnRegrouped,
    Order,
    Orders,
    OvertakenError,
    by_rank,
)
from scheduler.moves.channel import ChannelError, PeerChannel, open_channel
from scheduler.moves.relocation import Relocation
from scheduler.moves.telemetry import Telemetry
from scheduler.policy.config import ConfigError, EngineConfig
from scheduler.step.groups import check_agreed, open_groups
from scheduler.step.lockstep import LockStep
from scheduler.step.parts import can_replay, open_dispatcher, open_forward, open_lockstep
from scheduler.step.runner import Runner

MOST_OF_AVAILABLE = 0.9  # of memory, that experts of lost ranks may take


PEER_IS_GONE = (PeerLost, DispatchTimeout)  # other errors between ranks are bugs, and would come again


class EpochLinks(NamedTuple):
    """What links a rank to the others of its epoch."""

    dispatcher: TokenDispatcher
    lockstep: LockStep

    def close(self) -> None:
        """Wake ranks that wait for this one in it."""
        self.dispatcher.close()
        self.lockstep.close()


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """What a rank keeps from epoch to epoch."""

    config: EngineConfig  # of the start: its rank is the rank's for ever, its world all ranks
    backend: Backend
    model: Model
    cache: PagedCache
    runner: Runner
    relocation: Relocation
    telemetry: Telemetry
    store: Store  # of the job, on a connection of its own
    available: Callable[[], int]  # bytes of memory that can be had


class Regrouping:
    """Takes one rank out of an epoch and into another."""

    def __init__(self, parts: RankParts, links: EpochLinks | None) -> None:
        """Take what lasts, and the links of the epoch that serves; None: there is none yet."""
        self._parts, self._links, self._is_serving = parts, links, links is not None
        self._place = parts.config.rank
        self.members = tuple(range(parts.config.world_size))  # of the epoch that serves, or is to
        self._held: Held = parts.model.placement.local(self._place).tolist()
        self._most_spare = parts.model.placement.slots_per_rank

    def part(self) -> None:
        """Let go of all other ranks. May be called when there are none."""
        if self._is_serving:  # else slots need not be what any placement says
            self._held = self._parts.relocation.placement.local(self._place).tolist()
        links, self._links, self._is_serving = self._links, None, False
        if links is not None:
            links.close()
        self._parts.relocation.end_epoch()
        part()

    def close(self) -> None:
        """Part, and end what works beside the steps."""
        self.part()
        self._parts.relocation.close()

    def follow(self, order: Order, step: int, is_over: IsOver) -> LockStep:
        """Serve as an order says; collective over its members. `part` comes before, and after whatever is raised.

        Args:
            step: the number of steps so far, as far as this rank knows; the largest of all counts.
            is_over: whether there is no use in it any more.

        Raises:
            OvertakenError: it is over, or for others only.
            CannotHoldError: this rank cannot hold what the order gives it.
            WireUnavailable: a member did not come, or was lost in between.
        """
        parts = self._parts
        if parts.config.rank not in order.members:
            raise OvertakenError
        self.members = order.members
        self._place = order.members.index(parts.config.rank)
        self._hold(order)
        meet(parts.store, order.epoch, order.members, parts.config.rank, is_over)
        try:
            return self._serve(order, step)
        except (*PEER_IS_GONE, WireUnavailable, RuntimeError, ConfigError) as error:
            # RuntimeError is all that gloo says of a peer that is gone; ConfigError: placements differ.
            why = by_rank(str(error), order.members)
            raise WireUnavailable(f"epoch {order.epoch} could not begin: {why}") from error

    def _serve(self, order: Order, step: int) -> LockStep:
        parts, placement = self._parts, order.placement
        config = self._config_of(order)
        group, mailbox_group = open_groups(config, CONNECT_TIMEOUT_S)
        check_agreed(placement, mailbox_group)
        step = _largest(step, mailbox_group)
        dispatcher = open_dispatcher(config, parts.backend, group, placement.slots_per_rank)
        lockstep = open_lockstep(config, mailbox_group, placement.version, step)
        self._links = EpochLinks(dispatcher, lockstep)
        channel = _open_channel(len(order.members))
        self._tell(config, placement, dispatcher, channel)
        self._is_serving = True
        return lockstep

    def _tell(
        self, config: EngineConfig, placement: Placement, dispatcher: TokenDispatcher, channel: PeerChannel
    ) -> None:
        """Give the new links to whatever uses them."""
        parts = self._parts
        parts.model.serve(placement, self._place, dispatcher)
        parts.relocation.begin_epoch(self._place, placement, channel)
        replays = can_replay(config, dispatcher)
        parts.runner.begin_epoch(dispatcher, parts.model.forward)  # graphs give their memory back first
        forward = open_forward(parts.model, parts.cache, replays=replays, report=lambda *_: None)
        parts.runner.begin_epoch(dispatcher, forward)
        parts.telemetry.begin_epoch(config.epoch, parts.model.load_counts)

    def _config_of(self, order: Order) -> EngineConfig:
        """The settings of an epoch: its ranks are places."""
        config = self._parts.config
        size = len(order.members)
        is_whole = size == config.world_size
        return replace(
            config,
            rank=self._place,
            world_size=size,
            epoch=order.epoch,
            dispatch_node_size=config.dispatch_node_size if is_whole else 0,
        )

    def _hold(self, order: Order) -> None:
        """Bring the slots to what the order's placement gives them.

        Raises:
            CannotHoldError: there is no room for that, or an expert cannot be read.
        """
        parts, wanted = self._parts, order.placement.local(self._place).tolist()
        self._check_room(order, wanted)
        spare = parts.relocation.spare
        try:
            parts.model.hold(wanted, self._held, spare, self._most_spare)
        except (CheckpointError, SafetensorError, OSError, MemoryError, RuntimeError) as error:
            raise CannotHoldError(f"rank {parts.config.rank} could not take over experts: {error}") from error

    def _check_room(self, order: Order, wanted: Held) -> None:
        parts, config = self._parts, self._parts.config
        if config.device != "cpu" and len(order.members) < config.world_size:
            raise CannotHoldError(
                f"rank {config.rank} computes on a GPU, whose memory the KV cache has taken: it serves with all "
                f"{config.world_size} ranks only, and waits for those that are away"
            )
        width = len(wanted[0])
        grown = [
            (width - len(row)) * parts.model.slot_bytes(layer)
            for layer, row in enumerate(self._held)
            if len(row) < width
        ]
        needed = sum(grown) * min(config.num_local_ranks, len(order.members))
        available = parts.available()
        if needed > MOST_OF_AVAILABLE * available:
            num_new = sum(num_to_read(*rows) for rows in zip(self._held, wanted, strict=True))
            raise CannotHoldError(
                f"rank {config.rank} would take over {num_new} experts; with the other ranks of its host that takes "
                f"{needed / 2**20:.1f} MiB, and {available / 2**20:.1f} MiB are available, of which "
                f"{MOST_OF_AVAILABLE:.0%} may be taken"
            )


def _largest(step: int, group: dist.ProcessGroup | None) -> int:
    """The largest of all members' numbers; collective, None being one member."""
    if group is None:
        return step
    return max(int(each) for each in gather_values(step, group))


def _open_channel(num_members: int) -> PeerChannel:
    try:
        return open_channel(list(range(num_members)), CONNECT_TIMEOUT_S)
    except ChannelError as error:
        raise WireUnavailable(str(error)) from error


class EpochFollower:
    """One rank's way through epochs. `orders` takes them from any thread; the rest is the step loop's."""

    def __init__(self, regrouping: Regrouping, *, timeout_s: float) -> None:
        """`timeout_s` bounds how long an order may take."""
        self.orders = Orders()
        self.on_fault: OnFault = _say_nothing
        self.on_regrouped: OnRegrouped = _note_nothing
        self._regrouping, self._timeout_s = regrouping, timeout_s
        self._epoch, self._step = (
            -1,
            0,
        )  # the last epoch that ended here or could not be followed; its last step

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the epoch that serves, or is to."""
        return self._regrouping.members

    def end(self, lockstep: LockStep, reason: str) -> None:
        """Let go of an epoch, and say why unless all ranks know that it is over.

        Args:
            reason: why its steps broke off, ranks by their places; "" where they did not.
        """
        self._epoch, self._step = lockstep.epoch, lockstep.step
        self._regrouping.part()
        self._tell(by_rank(reason, self.members))

    def follow(self) -> LockStep | None:
        """Follow orders until this rank serves in an epoch; None: all stop.

        Raises:
            MembershipError: no order came in time.
        """
        while (order := self.orders.wait(self._epoch, self._timeout_s)) is not None:
            self._epoch = order.epoch
            lockstep = self._try(order)
            if lockstep is not None:
                self.on_regrouped(order.epoch)
                return lockstep
        return None

    def close(self) -> None:
        """Let go of the epoch that serves, if one does, and of what lasts longer. May be called twice."""
        self._regrouping.close()

    def _try(self, order: Order) -> LockStep | None:
        reason, is_final = "", False
        try:
            return self._regrouping.follow(order, self._step, partial(self.orders.is_over, order.epoch))
        except OvertakenError:
            pass
        except CannotHoldError as error:
            reason, is_final = str(error), True
        except WireUnavailable as error:
            reason = f"{type(error).__name__}: {error}"
        self._regrouping.part()
        self._tell(reason, is_final=is_final)
        return None

    def _tell(self, reason: str, *, is_final: bool = False) -> None:
        if reason and not self.orders.is_over(self._epoch):
            self.on_fault(self._epoch, reason, is_final=is_final)


def _say_nothing(epoch: int, reason: str, *, is_final: bool = False) -> None:
    """Stand for who is told of faults."""


def _note_nothing(epoch: int) -> None:
    """Stand for who is told of epochs."""
