"""One rank's part in a change of placement: move experts during steps, verify, report, and switch with all ranks.

A separate thread moves experts into spare memory. Serving experts are untouched until the step at which all ranks
switch, which only exchanges addresses. Every failure of a move, also a bug, ends in a report. If other ranks wait for
bytes that will not come, the channel is closed, which gives them an error. The step loop posts the version to which
this rank can switch (`version_to_post`) and calls `switch` when all ranks posted the same one. A posted version cannot
be withdrawn in that round, so `drop` takes effect after it. Until the switch, the old placement stays complete whatever
fails. A change belongs to an epoch and ends with it without a report: the front knows that the epoch is over.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from expert_placement.moves import Transfer, transfers_between
from expert_placement.placement import Placement
from moe.expert_weights import ExpertWeights, Held, SpareSlots, exchange_slot
from moe.lora.adapter_config import AdapterError
from moe.slot_choice import SlotChoice, slot_choices
from scheduler.moves.channel import ChannelError, NoPeers, Pace, PeerChannel
from scheduler.moves.expert_transfer import MovableLayer, MoveError, copy_expert, receive_expert, send_expert
from scheduler.moves.reports import Cause, MoveState, PlacementReport

CLOSE_TIMEOUT_S = 5.0  # a running move ends when its channel is closed, which happens before this wait


@dataclass
class _Staged:
    """The experts received so far for a placement that does not serve yet."""

    target: Placement
    current: Placement  # serves meanwhile
    channel: PeerChannel  # of its epoch
    # By layer and this rank's slot.
    weights: dict[tuple[int, int], ExpertWeights] = field(default_factory=dict)
    choices: list[SlotChoice] = field(default_factory=list)
    num_bytes: int = 0
    begun_s: float = 0.0
    seconds: float = 0.0


class MovedAdapters(Protocol):
    """What adapters add to experts, implemented by `moe.lora.bank.AdapterBank`, which explains the methods."""

    def arrive(self, held: Held) -> None: ...

    def hold(self, held: Held) -> None: ...


class _Problem(NamedTuple):
    """Why a placement cannot be adopted."""

    cause: Cause
    reason: str


class Relocation:
    """Moves experts to and from one rank. Any thread may call `prepare` and `drop`; the rest only the step loop's."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        places: Sequence[MovableLayer],
        channel: PeerChannel,
        pace: Pace,
        *,
        adapters: MovedAdapters | None = None,
        clock: Callable[[], float] = time.monotonic,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the serving placement and the model's layers.

        Args:
            channel: Not used by anything else.
            adapters: The model's adapters, which follow its experts. None if it takes none.
            pace: The step loop reports every step to it.
            enter_thread: Called on the mover's thread, first and before each transfer: the current GPU is set per
                thread, and a step that was launched may still read the memory that the transfer writes.
        """
        self.placement, self.pace = placement, pace
        self.place = rank  # in the epoch
        self.on_report: Callable[[PlacementReport], None] = lambda _report: None
        self.on_news: Callable[[], None] = lambda: None
        self._rank, self._places, self._channel, self._clock = rank, places, channel, clock
        self._enter_thread, self._adapters = enter_thread, adapters
        self.spare = SpareSlots()
        self._is_closed = False
        self._lock = threading.Condition()
        self._wanted: deque[Placement | Callable[[], None]] = deque()  # changes, and other work of the mover
        self._is_attempting = False
        self._ready: _Staged | None = None
        self._posted_version = placement.version
        self._dropped_version: int | None = None
        self._why_broken: _Problem | None = None
        self._mover: threading.Thread | None = None

    def prepare(self, target: Placement) -> None:
        """Start to receive this rank's experts of a placement and to send others theirs. All ranks need the same call."""
        self._want(target)

    def later(self, work: Callable[[], None]) -> None:
        """Run work on the mover's thread, after the present move. The end of the epoch drops work that has not begun."""
        self._want(work)

    def _want(self, wanted: Placement | Callable[[], None]) -> None:
        with self._lock:
            self._wanted.append(wanted)
            self._lock.notify_all()
            if self._mover is None:
                self._mover = threading.Thread(target=self._move_forever, name="expert-mover", daemon=True)
                self._mover.start()

    def use_layers(self, places: Sequence[MovableLayer]) -> None:
        """Move the experts of these layers from now on. They hold the same experts, with other weights. No move may run."""
        with self._lock:
            # An attempt of an earlier epoch may still be ending.
            has_ended = self._lock.wait_for(lambda: not self._is_attempting, CLOSE_TIMEOUT_S)
            assert has_ended and self._ready is None and not self._wanted, (
                "experts move while their weights change"
            )
            self._places = places

    def end_epoch(self) -> None:
        """Abort the present move and close the channel. Nothing is prepared until the next epoch begins."""
        with self._lock:
            channel, self._channel = self._channel, NoPeers()
            self._wanted.clear()
            self._dropped_version = None
            self._discard_ready()
        channel.close()
        self.pace.rest()

    def begin_epoch(self, place: int, placement: Placement, channel: PeerChannel) -> None:
        """Continue in an epoch with this rank's place, when it already serves its part of the placement.

        A change that was ordered after the end of the former epoch belongs to that epoch, so it ends here too.
        """
        with self._lock:
            self._discard_ready()
            self._wanted = deque(each for each in self._wanted if not isinstance(each, Placement))
            self.place, self.placement, self._channel = place, placement, channel
            self._posted_version, self._why_broken = placement.version, None

    def close(self) -> None:
        """End the mover's thread, after `end_epoch`."""
        with self._lock:
            self._is_closed = True
            mover = self._mover
            self._lock.notify_all()
        if mover is not None:
            mover.join(CLOSE_TIMEOUT_S)

    def drop(self, version: int) -> None:
        """Drop a placement before the switch, so that later ones can be prepared. Ignored after the switch."""
        with self._lock:
            if version > self.placement.version:
                self._dropped_version = version
        self.on_news()

    @property
    def is_moving(self) -> bool:
        """Whether experts are on the way, or arrived and do not serve yet."""
        with self._lock:
            return bool(self._wanted or self._is_attempting or self._ready is not None)

    @property
    def has_news(self) -> bool:
        """Whether this rank has something new to post to the others, even if no step runs."""
        with self._lock:
            ready = self.placement.version if self._ready is None else self._ready.target.version
            return ready != self._posted_version or (
                self._ready is not None and self._is_dropped(self._ready)
            )

    def version_to_post(self) -> int:
        """Return the version of the placement that this rank can switch to, or of the serving one if there is no other."""
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
        """Serve the placement that all ranks posted, from this step on. Takes microseconds per layer."""
        with self._lock:
            staged, self._ready = self._ready, None
            assert staged is not None and staged.target.version == version, f"{version} was not posted"
            for (layer, slot), weights in staged.weights.items():
                self.spare.give(exchange_slot(self._places[layer].layer, slot, weights))
            for place, choice in zip(self._places, staged.choices, strict=True):
                place.layer.choice = choice
            if self._adapters is not None:
                self._adapters.hold(staged.target.local(self.place).tolist())
            self.placement = staged.target
            self._report(staged, MoveState.SERVING, step=step)

    def _is_dropped(self, staged: _Staged) -> bool:
        return self._dropped_version == staged.target.version

    def _discard_ready(self) -> None:
        staged, self._ready = self._ready, None
        if staged is not None:
            self._discard(staged)

    def _discard(self, staged: _Staged) -> None:
        for weights in staged.weights.values():
            self.spare.give(weights)
        staged.weights.clear()

    def _move_forever(self) -> None:
        torch.set_num_threads(1)  # OpenMP counts per thread; the default would take all cores from the steps
        self._enter_thread()
        while True:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._wanted) or self._is_closed)
                if self._is_closed:
                    return
                wanted, previous = self._wanted.popleft(), self._ready
                self._is_attempting = True
                current, channel = self.placement, self._channel
            if isinstance(wanted, Placement):
                self._change(_Staged(wanted, current, channel, begun_s=self._clock()), previous)
            else:
                wanted()
                with self._lock:
                    self._is_attempting = False
                    self._lock.notify_all()
            self.on_news()

    def _change(self, staged: _Staged, previous: _Staged | None) -> None:
        problem = self._attempt(staged, previous)
        staged.seconds = self._clock() - staged.begun_s
        with self._lock:
            self._is_attempting = False
            self._end_attempt(staged, problem)
            self._lock.notify_all()

    def _end_attempt(self, staged: _Staged, problem: _Problem | None) -> None:
        """Keep or discard what arrived. Under the lock, so that the report precedes the one that the placement serves."""
        is_over = staged.channel is not self._channel  # its epoch
        if problem is None and not is_over:
            self._ready = staged
        else:
            self._discard(staged)
        if not is_over:
            self._report(staged, MoveState.VERIFIED if problem is None else MoveState.FAILED, problem=problem)

    def _attempt(self, staged: _Staged, previous: _Staged | None) -> _Problem | None:
        """Move and verify. Returns the problem, if any."""
        try:
            return self._why_not(staged, previous) or self._move(staged)
        except Exception as error:  # noqa: BLE001 - without a report the front and all ranks would wait forever
            if staged.channel is not self._channel:
                return _Problem(Cause.CHANNEL, f"the epoch ended: {error}")
            traceback.print_exc()
            return _Problem(Cause.BUG, f"{type(error).__name__}: {error} (a bug; see the rank's log)")

    def _why_not(self, staged: _Staged, previous: _Staged | None) -> _Problem | None:
        """Return what forbids a move. All ranks see the same, so none begins what another refuses."""
        target, current = staged.target, staged.current
        if self._why_broken is not None:
            return self._why_broken
        sizes = [(*p.slot_expert.shape, p.num_experts, p.num_ranks) for p in (target, current)]
        if previous is not None:
            reason = f"placement {previous.target.version} is prepared, but neither switched to nor dropped"
        elif target.version <= current.version:
            reason = f"placement {target.version} is not newer than the serving one, {current.version}"
        elif sizes[0] != sizes[1]:
            reason = f"its (layers, slots, experts, ranks) are {sizes[0]}; this service has {sizes[1]}"
        else:
            return None
        return _Problem(Cause.REFUSED, reason)

    def _move(self, staged: _Staged) -> _Problem | None:
        """Make all transfers of this rank, also after a problem, because other ranks depend on them. Returns the first
        problem."""
        problem: _Problem | None = None
        for transfer in transfers_between(staged.current, staged.target):
            try:
                self._carry(transfer, staged)
            except MoveError as error:
                problem = problem or _Problem(error.cause, str(error))
            except ChannelError as error:
                return self._give_channel_up(staged.channel, str(error))
            except BaseException as error:
                self._give_channel_up(staged.channel, f"{type(error).__name__} during a transfer: {error}")
                raise
        if problem is None and self._adapters is not None:
            try:
                self._adapters.arrive(staged.target.local(self.place).tolist())
            except AdapterError as error:
                problem = _Problem(Cause.MANIFEST, f"an adapter could not be read: {error}")
        if problem is None:
            before = next((place.layer.choice.replicas for place in self._places), None)
            staged.choices = slot_choices(staged.target, self.place, before)
            staged.target.digest()  # cached there, so that the step loop does not compute it
        return problem

    def _give_channel_up(self, channel: PeerChannel, reason: str) -> _Problem:
        """Close the channel, so that no peer waits for bytes that will not come. Moves stop for this epoch."""
        problem = _Problem(
            Cause.CHANNEL, f"{reason}; no expert moves any more until ranks meet in another epoch"
        )
        with self._lock:
            if channel is self._channel:
                self._why_broken = problem
        channel.close()
        return problem

    def _carry(self, transfer: Transfer, staged: _Staged) -> None:
        self._enter_thread()
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
