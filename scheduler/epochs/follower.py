"""From one epoch to the next: a rank without an epoch waits for the front's order and follows it until one succeeds.

Failures on the way are reported and survived. A member that dies or does not arrive is an ordinary fault. So is an
order for which this rank lacks memory; only a different order helps then. A newer order overtakes the one being
followed. The engine ends only if no order comes at all, or on an error that is a bug.

Process groups, dispatchers, lock-step, channel and the contents of slots belong to an epoch. Weights, KV cache,
scheduler, sequences and the link to the front outlive it. `Regrouping.part` first releases what belongs to the epoch,
which wakes ranks that still wait for this one. `follow` then does its local work (room, weights) and only then meets
the others, so that a slow disk does not block other ranks inside a collective.
While ranks are missing, dispatch is flat even with --dispatch-node-size, which need not divide the number of members.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from moe.expert_weights import Held, Ready, num_to_read
from moe.load.checkpoint import CheckpointError
from moe.model import Model
from scheduler.epochs.connections import EpochConnections
from scheduler.epochs.meeting import CONNECT_TIMEOUT_S, MeetingStore, meet, part
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
from scheduler.moves.adapters import AdapterLoads
from scheduler.moves.channel import ChannelError, PeerChannel, open_channel
from scheduler.moves.read_ahead import ReadAhead
from scheduler.moves.relocation import Relocation
from scheduler.moves.telemetry import Telemetry
from scheduler.policy.config import ConfigError, EngineConfig
from scheduler.step.groups import check_agreed, open_groups
from scheduler.step.lockstep import LockStep
from scheduler.step.parts import can_replay, open_dispatcher, open_forward, open_lockstep
from scheduler.step.runner import Runner
from scheduler.weights.updates import RankWeights

ADAPTERS_TIMEOUT_S = 25.0  # for reading the adapters that the others have; the front waits for 30 s
MOST_OF_AVAILABLE = 0.9  # share of free memory that experts of lost ranks may take
_NO_EPOCH = -1


PEER_IS_GONE = (PeerLost, DispatchTimeout)  # other errors between ranks are bugs, and would recur


class EpochLinks(NamedTuple):
    """The links of a rank to the others of its epoch."""

    dispatcher: TokenDispatcher
    lockstep: LockStep

    def close(self) -> None:
        """Wake ranks that wait for this one in the epoch."""
        self.dispatcher.close()
        self.lockstep.close()


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """The parts of a rank that outlive epochs."""

    config: EngineConfig  # as at start: `rank` is the rank's permanent number, `world_size` counted all ranks
    backend: Backend
    model: Model
    cache: PagedCache
    runner: Runner
    relocation: Relocation
    read_ahead: ReadAhead
    telemetry: Telemetry
    store: Store  # the job's, on a connection used for nothing else
    available: Callable[[], int]  # returns the free memory in bytes
    weights: RankWeights = field(default_factory=RankWeights)
    adapters: AdapterLoads | None = None
    connections: EpochConnections = field(default_factory=EpochConnections)


class Regrouping:
    """Moves one rank out of an epoch and into another."""

    def __init__(self, parts: RankParts, links: EpochLinks | None) -> None:
        """Take the lasting parts and the links of the serving epoch. `links` is None if there is no epoch yet."""
        self._parts, self._links, self._is_serving = parts, links, links is not None
        # On GPUs, NCCL's own threads would call a store in Python.
        self._store = MeetingStore(parts.store) if parts.config.device == "cpu" else None
        self._place = parts.config.rank
        self._num_ranks = parts.config.world_size  # present or not; a resize changes it
        self._threads = parts.config.threads
        self.members = tuple(range(parts.config.world_size))  # of the serving or coming epoch
        self._held: Held = parts.model.placement.local(self._place).tolist()
        self._most_spare = parts.model.placement.slots_per_rank

    def part(self) -> None:
        """Leave all other ranks. May be called between epochs."""
        if self._is_serving:  # otherwise the slots need not match any placement
            self._held = self._parts.relocation.placement.local(self._place).tolist()
        links, self._links, self._is_serving = self._links, None, False
        if links is not None:
            links.close()
        self._parts.connections.close()
        self._parts.relocation.end_epoch()
        part()

    def close(self) -> None:
        """Leave the epoch and end the threads that move experts."""
        self.part()
        self._parts.read_ahead.drop()
        self._parts.relocation.close()

    def follow(self, order: Order, step: int, is_over: IsOver) -> LockStep:
        """Join the epoch of an order. Collective over its members. Call `part` before, and after any error.

        Args:
            step: This rank's number of steps so far. The largest of all members is used.
            is_over: Whether the order is obsolete.

        Raises:
            OvertakenError: The order is obsolete, or does not include this rank.
            CannotHoldError: This rank cannot hold the experts that the order gives it.
            WireUnavailable: A member did not arrive, or was lost meanwhile.
        """
        parts = self._parts
        self._num_ranks = order.num_ranks or self._num_ranks
        if parts.config.rank not in order.members:
            raise OvertakenError
        self.members = order.members
        self._place = order.members.index(parts.config.rank)
        self._hold(order)
        with parts.connections.opening():
            if self._store is not None:
                self._store.is_over = is_over
            meet(self._store or parts.store, order.epoch, order.members, parts.config.rank, is_over)
            try:
                return self._serve(order, step)
            except (*PEER_IS_GONE, WireUnavailable, RuntimeError, ConfigError) as error:
                # RuntimeError: gloo's only error for a peer that is gone. ConfigError: placements differ.
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
        """Pass the new links to all parts that use them."""
        parts = self._parts
        self._share_cores()
        parts.model.serve(placement, self._place, dispatcher)
        parts.relocation.begin_epoch(self._place, placement, channel)
        replays = can_replay(config, dispatcher)
        parts.runner.begin_epoch(dispatcher, parts.model.forward)  # frees the memory of old graphs first
        forward = open_forward(parts.model, parts.cache, replays=replays, report=lambda *_: None)
        parts.runner.begin_epoch(dispatcher, forward)
        parts.telemetry.begin_epoch(config.epoch, parts.model.load_counts)

    def _share_cores(self) -> None:
        """Keep the number of threads of all ranks together, if they share one machine."""
        config = self._parts.config
        threads = max(1, config.threads * config.world_size // self._num_ranks)
        if config.num_local_ranks == config.world_size and threads != self._threads:
            self._threads = threads
            self._parts.backend.set_threads(self._parts.model.step, threads)

    def _config_of(self, order: Order) -> EngineConfig:
        """Return the settings of an epoch, in which ranks are places."""
        config = self._parts.config
        size = len(order.members)
        is_whole = size == self._num_ranks
        return replace(
            config,
            rank=self._place,
            world_size=size,
            epoch=order.epoch,
            dispatch_node_size=config.dispatch_node_size if is_whole else 0,
        )

    def _hold(self, order: Order) -> None:
        """Use the order's version of the weights, and load the experts that its placement gives this rank.

        Experts that were read ahead are not read again.

        Raises:
            CannotHoldError: There is not enough memory, or weights cannot be read.
        """
        parts, wanted = self._parts, order.placement.local(self._place).tolist()
        try:
            held = parts.weights.settle(order.weights)
        except CheckpointError as error:
            raise CannotHoldError(
                f"rank {parts.config.rank} cannot serve the new weights: {error}"
            ) from error
        if held is not None:
            self._held = held
            parts.read_ahead.drop()  # it read the former weights
        ready = parts.read_ahead.take()
        spare = parts.relocation.spare
        try:
            self._check_room(order, wanted, ready)
            # The front has ordered them before it ordered the epoch. Without them, rows of other ranks would be wrong.
            if parts.adapters is not None and not parts.adapters.wait_for_places(ADAPTERS_TIMEOUT_S):
                raise CannotHoldError(
                    f"rank {parts.config.rank} could not read the adapters of the others within {ADAPTERS_TIMEOUT_S:g} s"
                )
            parts.model.hold(wanted, self._held, spare, self._most_spare, ready)
        except (CheckpointError, SafetensorError, OSError, MemoryError, RuntimeError) as error:
            raise CannotHoldError(f"rank {parts.config.rank} could not take over experts: {error}") from error
        finally:
            for weights in ready.values():
                spare.give_back(weights, self._most_spare)

    def _check_room(self, order: Order, wanted: Held, ready: Ready) -> None:
        parts, config = self._parts, self._parts.config
        if config.device != "cpu" and len(order.members) < self._num_ranks:
            raise CannotHoldError(
                f"rank {config.rank} computes on a GPU, and the KV cache has taken its memory: it serves only with "
                f"all {self._num_ranks} ranks, and waits for the missing ones"
            )
        width = len(wanted[0])
        num_ready = Counter(layer for layer, _ in ready)  # their memory is taken already
        grown = [
            (width - len(row) - num_ready[layer]) * parts.model.slot_bytes(layer)
            for layer, row in enumerate(self._held)
            if len(row) + num_ready[layer] < width
        ]
        needed = sum(grown) * min(config.num_local_ranks, len(order.members))
        available = parts.available()
        if needed > MOST_OF_AVAILABLE * available:
            num_new = sum(num_to_read(*rows) for rows in zip(self._held, wanted, strict=True))
            raise CannotHoldError(
                f"rank {config.rank} would take over {num_new} experts; with the other ranks of its host that takes "
                f"{needed / 2**20:.1f} MiB, but only {MOST_OF_AVAILABLE:.0%} of the free memory may be taken, and "
                f"{available / 2**20:.1f} MiB are available"
            )


def _largest(step: int, group: dist.ProcessGroup | None) -> int:
    """Return the largest of all members' numbers. Collective; None means a single member."""
    if group is None:
        return step
    return max(int(each) for each in gather_values(step, group))


def _open_channel(num_members: int) -> PeerChannel:
    try:
        return open_channel(list(range(num_members)), CONNECT_TIMEOUT_S)
    except ChannelError as error:
        raise WireUnavailable(str(error)) from error


class EpochFollower:
    """Takes one rank through epochs. `orders` may be used from any thread; the rest only by the step loop's."""

    def __init__(self, regrouping: Regrouping, *, timeout_s: float) -> None:
        """`timeout_s` bounds the wait for an order after an epoch or an attempt.

        The first order comes when the other ranks of a resize or a new pool have started. If the front is lost or does not want
        this rank any longer, the link ends it.
        """
        self.orders = Orders()
        self.on_fault: OnFault = _say_nothing
        self.on_regrouped: OnRegrouped = _note_nothing
        self._regrouping, self._timeout_s = regrouping, timeout_s
        # The last epoch that ended here or could not be followed; the step at which the last one ended.
        self._epoch, self._step = _NO_EPOCH, 0

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the serving or coming epoch."""
        return self._regrouping.members

    def end(self, lockstep: LockStep, reason: str) -> None:
        """Leave an epoch, and report the reason unless all ranks know that it is over.

        Args:
            reason: Why its steps broke off, with ranks as places; "" if they did not.
        """
        self._epoch, self._step = lockstep.epoch, lockstep.step
        self._regrouping.part()
        self._tell(by_rank(reason, self.members))

    def follow(self) -> LockStep | None:
        """Follow orders until this rank serves in an epoch. Returns None if all ranks stop.

        Raises:
            MembershipError: No order came in time after an earlier epoch.
        """
        while (order := self.orders.wait(self._epoch, self._wait_s)) is not None:
            self._epoch = order.epoch
            lockstep = self._try(order)
            if lockstep is not None:
                self.on_regrouped(order.epoch)
                return lockstep
        return None

    @property
    def _wait_s(self) -> float | None:
        return None if self._epoch == _NO_EPOCH else self._timeout_s

    def close(self) -> None:
        """Leave the serving epoch, if any, and release the lasting parts. May be called twice."""
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
    """Default for `on_fault`."""


def _note_nothing(epoch: int) -> None:
    """Default for `on_regrouped`."""
