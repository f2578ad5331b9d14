"""A rank's part in sleep mode: which parts of its memory are there. All ranks change it at the same step.

An order of the front names the parts to keep. A rank posts the order's number when it could follow it: it has no work, no tier
copies its blocks, and experts that must return are read again. All ranks switch when all have posted the same number.
So no step runs without the experts of any rank, and no block is saved after its memory is gone. A thread reads experts,
because a wait in the step loop would look like a stuck rank.

If ranks meet in another epoch meanwhile, the reading starts again: other experts may belong to this rank. It also starts again
if experts moved before all ranks had theirs, because a move exchanges memory and may bring bytes that were released. A rank that
moves experts is not idle, so no move can end between the last reading and the switch. Addresses stay valid
(`kvcache.memory`), so step programs do too. Works on CPUs only.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from scheduler.policy.request import MemoryOrder


class MemoryParts(NamedTuple):
    """What can be released. Only the step loop calls the first two, while the rank has no work."""

    free_cache: Callable[[], None]  # forgets cached prefixes and gives back the memory of blocks and states
    free_experts: Callable[[], None]
    # Reads the experts of the present placement, in a thread, and returns whether all were read. Its argument returns whether
    # they are not needed any more.
    read_experts: Callable[[Callable[[], bool]], bool]


class MemorySwitch:
    """The memory of one rank. Any thread may call `order`; the rest only the step loop's."""

    def __init__(self, parts: MemoryParts) -> None:
        """Everything is there at first."""
        self.on_news: Callable[[], None] = lambda: (
            None
        )  # called when this rank may have another number to post
        self.on_switched: Callable[[int], None] = lambda _number: (
            None
        )  # called with the number of a followed order
        self._parts = parts
        self._lock = threading.Lock()
        self._ordered = self._posted = self._followed = MemoryOrder(0)
        self._has_experts = True  # their values are there
        self._reader: threading.Thread | None = None
        self._has_moved = False  # experts moved since the reader began
        self._is_parted = threading.Event()  # set between epochs
        self._failure: Exception | None = None

    def order(self, order: MemoryOrder) -> None:
        """Follow an order as soon as all ranks can. The newest one wins. A repeated one is confirmed again."""
        with self._lock:
            if order.number > self._ordered.number:
                self._ordered = order
            is_followed = order.number == self._followed.number
            self._read_if_needed()
        if is_followed:
            self.on_switched(order.number)
        self.on_news()

    @property
    def ordered(self) -> MemoryOrder:
        """The newest order."""
        return self._ordered

    @property
    def has_order(self) -> bool:
        """Whether the newest order is not followed yet."""
        return self._ordered is not self._followed

    @property
    def is_whole(self) -> bool:
        """Whether requests can run."""
        return self._has_experts and self._followed.has_cache

    def has_news(self, *, is_idle: bool) -> bool:
        """Whether this rank has another number to post than it posted last. `is_idle`: see `number_to_post`."""
        with self._lock:
            return self._failure is not None or self._next(is_idle=is_idle) is not self._posted

    def number_to_post(self, *, is_idle: bool) -> int:
        """Return the number of the newest order if this rank could follow it, otherwise that of the last followed one.

        Args:
            is_idle: Whether the rank has no work and nothing reads or writes its blocks and experts.

        Raises:
            CheckpointError, OSError, SafetensorError: The experts could not be read again.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._posted = self._next(is_idle=is_idle)
            return self._posted.number

    def switch(self, number: int) -> None:
        """Follow the order that all ranks posted, while no rank has work. Does nothing if this rank has followed it."""
        with self._lock:
            order, before = self._posted, self._followed
            assert order.number == number, f"memory order {number} was not posted, {order.number} was"
            if order is before:
                return
            self._followed = order
            if before.has_cache and not order.has_cache:
                self._parts.free_cache()
            if not order.has_experts:
                self._has_experts = False
                self._parts.free_experts()
            self._read_if_needed()
        self.on_switched(number)

    def note_moved(self) -> None:
        """Read experts again if this rank released them: another placement serves now, and moved bytes may be wrong."""
        with self._lock:
            if self._followed.has_experts:
                return
            self._has_experts, self._has_moved = False, True
            self._read_if_needed()

    def begin_epoch(self) -> None:
        """Read experts if they are missing: this rank's placement is known."""
        self._is_parted.clear()
        with self._lock:
            self._read_if_needed()

    def end_epoch(self) -> None:
        """Stop reading: the slots may be rearranged. May be called twice."""
        self._is_parted.set()
        with self._lock:
            reader = self._reader
        if reader is not None:
            reader.join()

    def _next(self, *, is_idle: bool) -> MemoryOrder:
        is_complete = self._has_experts or not self._ordered.has_experts
        return self._ordered if is_idle and is_complete and self._reader is None else self._followed

    def _read_if_needed(self) -> None:
        is_missing = self._ordered.has_experts and not self._has_experts
        if is_missing and self._reader is None and not self._is_parted.is_set():
            self._has_moved = False
            self._reader = threading.Thread(target=self._read, name="expert-reader", daemon=True)
            self._reader.start()

    def _read(self) -> None:
        torch.set_num_threads(
            1
        )  # OpenMP counts per thread; the default would take all cores from other ranks
        is_whole, failure = False, None
        try:
            is_whole = self._parts.read_experts(self._is_unneeded)
        except Exception as error:  # noqa: BLE001 - the step loop raises it
            failure = error
        with self._lock:
            self._reader, self._failure = None, failure
            self._has_experts = is_whole and not self._has_moved
            if failure is None:
                self._read_if_needed()
        self.on_news()

    def _is_unneeded(self) -> bool:
        return self._is_parted.is_set() or self._has_moved or not self._ordered.has_experts
