"""One rank's part in a change of placement: move beside the steps, verify, say so, switch when all have said so.

A thread of its own carries experts into spare memory; what serves is not touched until the step at which all ranks
switch, which is exchanging addresses. What goes wrong there, a bug of ours too, ends in a report and never in silence,
and where others wait for bytes that will not come the channel is closed, which tells them. The step loop asks for the version to tell the others (`version_to_post`), and
calls `switch` when all told the same one: a rank that told a version can no longer take it back in that round, so a
wish to drop one waits until the round is over. Until the switch, whatever fails or dies, the old placement is whole.
A change belongs to an epoch and is given up with it, without a word: the front knows that the epoch is over.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from expert_placement.moves import Transfer, transfers_between
from expert_placement.placement import Placement
from moe.expert_weights import ExpertWeights, SpareSlots, exchange_slot
from moe.slot_choice import SlotChoice, slot_choices
from scheduler.moves.channel import ChannelError, NoPeers, Pace, PeerChannel
from scheduler.moves.expert_transfer import MovableLayer, MoveError, copy_expert, receive_expert, send_expert
from scheduler.moves.reports import Cause, MoveState, PlacementReport

CLOSE_TIMEOUT_S = 5.0  # what moves ends when its channel is closed, which is before


@dataclass
class _Staged:
    """What has come for a placement that does not serve yet."""

    target: Placement
    current: Placement  # that serves meanwhile
    channel: PeerChannel  # of its epoch
    weights: dict[tuple[int, int], ExpertWeights] = field(
        default_factory=dict
    )  # by layer and this rank's slot
    choices: list[SlotChoice] = field(default_factory=list)
    num_bytes: int = 0
    begun_s: float = 0.0
    seconds: float = 0.0


class _Problem(NamedTuple):
    """Why a placement is not to be."""

    cause: Cause
    reason: str


class Relocation:
    """Moves experts to and from one rank. `prepare` and `drop` from any thread, the rest from the step loop's."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        places: Sequence[MovableLayer],
        channel: PeerChannel,
        pace: Pace,
        *,
        clock: Callable[[], float] = time.monotonic,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the serving placement and the model's layers.

        Args:
            channel: used by this object alone.
            pace: told of every step by the step loop.
            enter_thread: called first on the thread that moves: which GPU is meant is a thread's own setting.
        """
        self.placement, self.pace = placement, pace
        self.place = rank  # in the epoch
        self.on_report: Callable[[PlacementReport], None] = lambda _report: None
        self.on_news: Callable[[], None] = lambda: None
        self._rank, self._places, self._channel, self._clock = rank, places, channel, clock
        self._enter_thread = enter_thread
        self.spare = SpareSlots()
        self._is_closed = False
        self._lock = threading.Condition()
        self._wanted: deque[Placement] = deque()
        self._ready: _Staged | None = None
        self._posted_version = placement.version
        self._dropped_version: int | None = None
        self._why_broken: _Problem | None = None
        self._mover: threading.Thread | None = None

    def prepare(self, target: Placement) -> None:
        """Begin to move what comes to this rank, and send what others need; all ranks must be told the same."""
        with self._lock:
            self._wanted.append(target)
            self._lock.notify_all()
            if self._mover is None:
                self._mover = threading.Thread(target=self._move_forever, name="expert-mover", daemon=True)
                self._mover.start()

    def end_epoch(self) -> None:
        """Give up what is under way and let go of the channel; nothing is prepared until the next epoch begins."""
        with self._lock:
            channel, self._channel = self._channel, NoPeers()
            staged, self._ready, self._dropped_version = self._ready, None, None
            self._wanted.clear()
            if staged is not None:
                self._discard(staged)
        channel.close()
        self.pace.rest()

    def begin_epoch(self, place: int, placement: Placement, channel: PeerChannel) -> None:
        """Go on in an epoch in which this rank has a place, and serves its part of a placement already."""
        with self._lock:
            self.place, self.placement, self._channel = place, placement, channel
            self._posted_version, self._why_broken = placement.version, None

    def close(self) -> None:
        """End the thread that moves, after `end_epoch`."""
        with self._lock:
            self._is_closed = True
            mover = self._mover
            self._lock.notify_all()
        if mover is not None:
            mover.join(CLOSE_TIMEOUT_S)

    def drop(self, version: int) -> None:
        """Give a placement up that has not been switched to; later ones may be prepared. Too late is ignored."""
        with self._lock:
            if version > self.placement.version:
                self._dropped_version = version
        self.on_news()

    @property
    def has_news(self) -> bool:
        """Whether the step loop should tell the others something, though nothing runs."""
        with self._lock:
            ready = self.placement.version if self._ready is None else self._ready.target.version
            return ready != self._posted_version or (
                self._ready is not None and self._is_dropped(self._ready)
            )

    def version_to_post(self) -> int:
        """The placement that this rank can switch to; that which serves if there is no other."""
        with self._lock:
            staged = self._ready
            if staged is not None and self._is_dropped(staged):
                self._ready = None
                self._discard(staged)
                self._report(staged, MoveState.DROPPED)
            self._posted_version = (
                self.placement.version if self._ready is None else self._ready.target.version
            )
            return self._posted_version

    def switch(self, version: int, step: int) -> None:
        """Serve the placement that all ranks told, from this step on. Some microseconds per layer."""
        with self._lock:
            staged, self._ready = self._ready, None
            assert staged is not None and staged.target.version == version, f"{version} was not told"
            for (layer, slot), weights in staged.weights.items():
                self.spare.give(exchange_slot(self._places[layer].layer, slot, weights))
            for place, choice in zip(self._places, staged.choices, strict=True):
                place.layer.choice = choice
            self.placement = staged.target
            self._report(staged, MoveState.SERVING, step=step)

    def _is_dropped(self, staged: _Staged) -> bool:
        return self._dropped_version == staged.target.version

    def _discard(self, staged: _Staged) -> None:
        for weights in staged.weights.values():
            self.spare.give(weights)
        staged.weights.clear()

    def _move_forever(self) -> None:
        torch.set_num_threads(1)  # OpenMP counts per thread: a new one would take all cores from the steps
        self._enter_thread()
        while True:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._wanted) or self._is_closed)
                if self._is_closed:
                    return
                target, previous = self._wanted.popleft(), self._ready
                staged = _Staged(target, self.placement, self._channel, begun_s=self._clock())
            problem = self._attempt(staged, previous)
            staged.seconds = self._clock() - staged.begun_s
            with self._lock:
                if staged.channel is not self._channel:  # its epoch is over
                    self._discard(staged)
                    continue
                if problem is None:
                    self._ready = staged
                else:
                    self._discard(staged)
                # Under the lock, so that it is said before the step loop says that the placement serves.
                self._report(
                    staged, MoveState.VERIFIED if problem is None else MoveState.FAILED, problem=problem
                )
            self.on_news()

    def _attempt(self, staged: _Staged, previous: _Staged | None) -> _Problem | None:
        """Move and verify; returns what went wrong."""
        try:
            return self._why_not(staged, previous) or self._move(staged)
        except Exception as error:  # noqa: BLE001 - without a report the front and all ranks would wait for ever
            if staged.channel is not self._channel:
                return _Problem(Cause.CHANNEL, f"the epoch ended: {error}")
            traceback.print_exc()
            return _Problem(Cause.BUG, f"{type(error).__name__}: {error} (a bug; the rank's log says where)")

    def _why_not(self, staged: _Staged, previous: _Staged | None) -> _Problem | None:
        """What forbids a move, seen alike by all ranks: nobody begins what another one refuses."""
        target, current = staged.target, staged.current
        if self._why_broken is not None:
            return self._why_broken
        sizes = [(*p.slot_expert.shape, p.num_experts, p.num_ranks) for p in (target, current)]
        if previous is not None:
            reason = f"placement {previous.target.version} is not switched to or dropped yet"
        elif target.version <= current.version:
            reason = f"placement {target.version} is not newer than {current.version}, which serves"
        elif sizes[0] != sizes[1]:
            reason = f"its (layers, slots, experts, ranks) are {sizes[0]}; this service has {sizes[1]}"
        else:
            return None
        return _Problem(Cause.REFUSED, reason)

    def _move(self, staged: _Staged) -> _Problem | None:
        """Go through all transfers of this rank; returns what went wrong, to the end where others depend on it."""
        problem: _Problem | None = None
        for transfer in transfers_between(staged.current, staged.target):
            try:
                self._carry(transfer, staged)
            except MoveError as error:
                problem = problem or _Problem(error.cause, str(error))
            except ChannelError as error:
                return self._give_channel_up(staged.channel, str(error))
            except BaseException as error:
                self._give_channel_up(staged.channel, f"{type(error).__name__} amid a transfer: {error}")
                raise
        if problem is None:
            before = next((place.layer.choice.replicas for place in self._places), None)
            staged.choices = slot_choices(staged.target, self.place, before)
            staged.target.digest()  # kept there: the step loop will not wait for it
        return problem

    def _give_channel_up(self, channel: PeerChannel, reason: str) -> _Problem:
        """Let no peer wait for what will not come; nothing moves any more."""
        problem = _Problem(
            Cause.CHANNEL, f"{reason}; no expert moves any more until ranks meet in another epoch"
        )
        with self._lock:
            if channel is self._channel:
                self._why_broken = problem
        channel.close()
        return problem

    def _carry(self, transfer: Transfer, staged: _Staged) -> None:
        width = staged.current.slots_per_rank
        (source_rank, source), (target_rank, target) = (
            divmod(slot, width) for slot in (transfer.source, transfer.target)
        )
        place = self._places[transfer.layer]
        if target_rank != self.place:
            if source_rank == self.place:
                send_expert(place, source, transfer, staged.channel, target_rank, self.pace)
            return
        weights = self.spare.take(place.layer)
        staged.weights[transfer.layer, target] = weights
        if source_rank == self.place:
            staged.num_bytes += copy_expert(place, source, weights, transfer, self.pace)
        else:
            staged.num_bytes += receive_expert(
                place, weights, transfer, staged.channel, source_rank, self.pace
            )

    def _report(
        self, staged: _Staged, state: MoveState, *, problem: _Problem | None = None, step: int = 0
    ) -> None:
        self.on_report(
            PlacementReport(
                rank=self._rank,
                version=staged.target.version,
                state=state,
                reason="" if problem is None else problem.reason,
                cause=Cause.NONE if problem is None else problem.cause,
                digest=staged.target.digest(),
                step=step,
                num_moves=len(staged.weights),
                num_bytes=staged.num_bytes,
                seconds=staged.seconds,
            )
        )
