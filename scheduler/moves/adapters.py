"""A rank's part in loading and unloading adapters, in the order in which the front orders it.

A thread reads an adapter, so steps continue. The step loop puts it at its place between two steps, once no request of this rank uses
the place. Then the rank reports it. The front submits requests for a place only after every rank has reported it, and gives a
place another adapter only after every rank has reported it empty. So a row that arrives from another rank finds its adapter here,
although ranks do not do this at the same step. The front does not wait for a rank without an epoch, which follows its orders before its
first step.
"""

import threading
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from moe.lora.adapter_config import AdapterError
from moe.lora.bank import AdapterBank
from moe.lora.factors import LoadedAdapter
from scheduler.policy.request import AdapterOrder, AdapterReport

CLOSE_TIMEOUT_S = 5.0


class PlacedAdapter(NamedTuple):
    """An order whose files have been read; the step loop completes it."""

    order: AdapterOrder
    adapter: LoadedAdapter | None  # None empties the place
    reason: str = ""  # why the adapter could not be read


class AdapterLoads:
    """Follows the front's orders. Any thread may call `order`; `take` is the step loop's."""

    def __init__(self, rank: int, bank: AdapterBank, *, max_rank: int) -> None:
        """`max_rank`: Largest rank of an adapter."""
        self._rank, self._bank, self._max_rank = rank, bank, max_rank
        self.on_report: Callable[[AdapterReport], None] = lambda _report: None
        self.on_news: Callable[[], None] = lambda: None
        bank.on_spoiled = self._report_spoiled
        self._numbers: dict[int, int] = {}  # by place: the last order that was followed
        self._changed = threading.Condition()
        self._orders: deque[AdapterOrder] = deque()
        self._read: list[PlacedAdapter] = []  # in order
        self._reading: AdapterOrder | None = None
        self._is_closed = False
        self._reader: threading.Thread | None = None

    @property
    def has_news(self) -> bool:
        """Whether `take` may have something to do."""
        return bool(self._read)

    def order(self, order: AdapterOrder) -> None:
        """Queue an order."""
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()
            if self._reader is None:
                self._reader = threading.Thread(target=self._read_forever, name="adapter-reader", daemon=True)
                self._reader.start()

    def wait_for_places(self, timeout_s: float) -> bool:
        """Wait until the adapters of all places have been read. Returns whether they have been within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._has_places_to_read(), timeout_s)

    def _has_places_to_read(self) -> bool:
        orders = [*self._orders, *([] if self._reading is None else [self._reading])]
        return any(order.place >= 0 for order in orders)

    def take(self, is_used: Callable[[int], bool]) -> None:
        """Put adapters at their places, except at those that requests of this rank still use. While no step runs."""
        with self._changed:
            read, self._read = self._read, []
        left: list[PlacedAdapter] = []
        held_back: set[int] = set()  # places with an earlier order that waits
        for each in read:
            place = each.order.place
            if place in held_back or is_used(place):
                held_back.add(place)
                left.append(each)
                continue
            self._numbers[place] = each.order.number
            self._put(each)
        with self._changed:
            self._read = left + self._read

    def _put(self, placed: PlacedAdapter) -> None:
        order, reason = placed.order, placed.reason
        if not reason:
            try:
                self._bank.place(order.place, placed.adapter)
            except AdapterError as error:
                reason = str(error)
        if reason:  # other ranks may have it already, if this one joins them
            self._bank.spoil(order.place)
        self._report(
            order, reason=reason, num_bytes=0 if placed.adapter is None else placed.adapter.num_bytes
        )

    def _report_spoiled(self, place: int, digest: str, reason: str) -> None:
        self.on_report(AdapterReport(self._numbers.get(place, 0), place, digest, reason))

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._reader is not None:
            self._reader.join(CLOSE_TIMEOUT_S)

    def _read_forever(self) -> None:
        torch.set_num_threads(1)  # as the mover of experts
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._orders) or self._is_closed)
                if self._is_closed:
                    return
                self._reading = order = self._orders.popleft()
            placed = self._follow(order)
            with self._changed:
                self._reading = None
                if placed is not None:
                    # A rank without an epoch may get many orders for a place. Only the newest counts.
                    self._read = [each for each in self._read if each.order.place != order.place]
                    self._read.append(placed)
                self._changed.notify_all()
            self.on_news()

    def _follow(self, order: AdapterOrder) -> PlacedAdapter | None:
        """Read an order's adapter. Returns what is left for the step loop."""
        if not order.directory:
            if order.place < 0:
                self._bank.forget(order.digest)
                return None
            return PlacedAdapter(order, None)
        adapter, reason = None, ""
        try:
            adapter = self._bank.load(Path(order.directory), order.digest, max_rank=self._max_rank)
        except AdapterError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - without a report the front would wait forever
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error} (a bug; see the rank's log)"
        if order.place < 0:
            self._report(order, reason=reason, num_bytes=0 if adapter is None else adapter.num_bytes)
            return None
        return PlacedAdapter(order, adapter, reason)

    def _report(self, order: AdapterOrder, *, reason: str = "", num_bytes: int = 0) -> None:
        self.on_report(AdapterReport(order.number, order.place, order.digest, reason, num_bytes))
