"""Faults inside the processes of a service: slow or full disks, slow links, and bytes that change in transit.

A campaign writes orders to a file (`benchmarks.faults.orders`). `install` runs at the start of every process of the service. It
changes the modules that read and send bytes when they are imported, so that they follow the present orders:

disk: "full", or seconds that each access to a record on a disk takes longer
transfers: seconds that each record takes longer to or from host memory, and to another node
flips: whether one bit of each record changes after it was read or received
link: a rank, and seconds that each message between it and the front takes longer

Each changed record is logged with the outcome. WHOLE means that the service did not notice it.
Rejected: a mounted file system and traffic control, which need root.
"""

import errno
import importlib.abc
import importlib.util
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

HOST_VARIABLE = "WIDEEP_FAULTS_HOST"  # the name of a node that shares this machine with others
UNSEEN, RECEIVED = "WHOLE", "RECEIVED"  # outcomes in the log


class Ordered:
    """The present orders, and the log of changed records."""

    def __init__(self, orders: Path, log: Path) -> None:
        self._orders, self._log = orders, log

    def get(self, name: str) -> Any:
        """Return an order, or None."""
        return json.loads(self._orders.read_bytes()).get(name)

    def note_flip(self, outcome: str) -> None:
        """Log a changed record."""
        with self._log.open("a") as log:
            log.write(f"{outcome}\n")


def install(orders: str, log: str) -> None:
    """Let this process follow the orders in a file."""
    name = os.environ.get(HOST_VARIABLE)
    if name is not None and "RANK" in os.environ:  # torchrun itself needs the real name
        socket.gethostname = lambda: name
    sys.meta_path.insert(0, _Finder(Ordered(Path(orders), Path(log))))


class _Finder(importlib.abc.MetaPathFinder):
    """Changes modules after they have been loaded."""

    def __init__(self, orders: Ordered) -> None:
        self._orders = orders

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module to change, and None for all others."""
        change = _CHANGES.get(name)
        if change is None:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None, f"{name} is missing"
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            change(module, self._orders)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change_records(module: Any, orders: Ordered) -> None:
    transfer, read = module.RecordStore._transfer, module.RecordStore.read

    def follow(store: Any, call: Any, buffers: Any, *place: int) -> None:
        is_on_disk = store.name.startswith("/")
        order = orders.get("disk" if is_on_disk else "transfers")
        if order == "full" and call is os.pwritev:
            raise OSError(errno.ENOSPC, "No space left on device")
        time.sleep(order if order and order != "full" else 0.0)
        transfer(store, call, buffers, *place)

    def read_changed(
        store: Any, key: bytes, buffers: Sequence[memoryview], take: Callable[[], int], **options: Any
    ) -> Any:
        if not orders.get("flips"):
            return read(store, key, buffers, take, **options)
        num_flips = 0

        def take_changed() -> int:
            nonlocal num_flips
            num_flips += 1
            _flip(buffers[0])
            return take()

        outcome = read(store, key, buffers, take_changed, **options)
        if num_flips:
            orders.note_flip(outcome.name)
        return outcome

    module.RecordStore._transfer, module.RecordStore.read = follow, read_changed


def _change_frames(module: Any, orders: Ordered) -> None:
    send, receive = module.Channel.send_record, module.Channel.receive_record

    def send_slowly(channel: Any, header: Any, record: memoryview) -> None:
        time.sleep(orders.get("transfers") or 0.0)
        send(channel, header, record)

    def receive_changed(channel: Any, record: memoryview, until_s: float) -> None:
        receive(channel, record, until_s)
        channel.is_flipped = bool(orders.get("flips"))
        if channel.is_flipped:
            _flip(record)
            orders.note_flip(RECEIVED)

    module.Channel.send_record, module.Channel.receive_record = send_slowly, receive_changed


def _change_peer_link(module: Any, orders: Ordered) -> None:
    records = module.PeerLink._records

    def watched(link: Any, channel: Any, *arguments: Any) -> Iterator[Any]:
        """Yield the records that the service accepts, none of which may be a changed one."""
        for found in records(link, channel, *arguments):
            if getattr(channel, "is_flipped", False):
                orders.note_flip(UNSEEN)
            yield found

    module.PeerLink._records = watched


def _change_rank_link(module: Any, orders: Ordered) -> None:
    def slow(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def convert_later(message: Any) -> Any:
            rank, seconds = orders.get("link") or (None, 0.0)
            if os.environ.get("RANK") == str(rank):
                time.sleep(seconds)
            return convert(message)

        return convert_later

    module.encode, module.decode = slow(module.encode), slow(module.decode)


def _flip(record: memoryview) -> None:
    """Change one bit."""
    record[random.randrange(len(record))] ^= 1 << random.randrange(8)


_CHANGES: dict[str, Callable[[Any, Ordered], None]] = {
    "kvcache.tiers.records": _change_records,
    "kvcache.tiers.frames": _change_frames,
    "kvcache.tiers.peer_link": _change_peer_link,
    "server.link.rank_link": _change_rank_link,
}
