"""How the members of an epoch meet and part: torch.distributed's default group, created again for each epoch.

A member announces itself in the job's store and waits for the others while no newer order comes. It creates groups only when
all are there. A member may die just then. The others wait in the store for its address, and `MeetingStore` ends this wait
when a newer order comes. A connection to it cannot be interrupted, so its timeout is short.
A newer order or a member's timeout may reach some members before they saw that all are there, and others after. So the
first member to decide writes to the store whether this epoch meets, and all follow that entry. Otherwise those that
entered would wait for the full timeout.
Epochs cannot interfere: every key in the store contains the epoch, and the store has the newest one. The store outlives a front and
engines that are killed together; the next front continues from that number.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store, distributed_c10d

from dispatch.errors import WireUnavailable
from scheduler.epochs.orders import IsOver, OvertakenError

ARRIVAL_TIMEOUT_S = 29.5  # just before the front drops members that did not arrive (30 s after its order)
CONNECT_TIMEOUT_S = 5.0
PART_S = 0.5
_MEETS, _IS_OVER = "meets", "is over"  # the entry for an epoch, written once
_NEWEST = "newest_epoch"
_POLL_S = 0.02  # a wait in the store itself could not be interrupted, and logs errors
_SOON_S = 0.002  # interval of checks for an address, which usually comes at once


class MeetingStore(Store):
    """The job's store, with waits that end when the order that is followed is obsolete.

    torch's C++ code calls these methods by name. It does not keep this object alive.

    Attributes:
        is_over: Whether the order is obsolete.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Use a connection that is not used for anything else."""
        super().__init__()
        self._store, self._clock = store, clock
        self._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        self.is_over: IsOver = _never

    def clone(self) -> Store:
        """Return this store, because its connection is not used for anything else meanwhile."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all names exist.

        Raises:
            OvertakenError: The order is obsolete.
            DistStoreError: They did not exist in time.
        """
        deadline_s = self._clock() + (timeout or self._timeout).total_seconds()
        while not self._store.check(keys):
            if self.is_over(_SOON_S):
                raise OvertakenError
            if self._clock() >= deadline_s:
                raise DistStoreError(f"no rank has written {', '.join(keys)}")

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a value if the name has the expected one, or none if that is "". Returns the current value."""
        return self._store.compare_set(key, expected, value)

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all names exist."""
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        """Delete a name."""
        return self._store.delete_key(key)

    deleteKey = delete_key

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of waits."""
        self._timeout = timeout


def meet(
    store: Store,
    epoch: int,
    members: Sequence[int],
    rank: int,
    is_over: IsOver,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Create the default group of an epoch's members, by place. Collective over them. A single member needs none.

    Args:
        store: The job's store, on a connection that is not used for anything else meanwhile.
        is_over: Whether the order is obsolete.

    Raises:
        OvertakenError: The order is obsolete.
        WireUnavailable: A member did not arrive, or was lost meanwhile.
    """
    if len(members) == 1:
        return
    _note_newest(store, epoch)
    own = PrefixStore(f"epoch/{epoch}", store)
    _await_all(own, epoch, members, rank, is_over, clock)
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("group", own),
            rank=members.index(rank),
            world_size=len(members),
            timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
        )
    except RuntimeError as error:  # gloo's only error for a peer that is gone
        raise WireUnavailable(
            f"rank {rank} could not meet ranks {list(members)} in epoch {epoch}: {error}"
        ) from error


def newest_epoch(store: Store) -> int:
    """Return the newest epoch of which the job's store has entries, 0 if there was none."""
    return int(store.get(_NEWEST)) if store.check([_NEWEST]) else 0


def part() -> None:
    """Destroy all groups of this process, which wakes peers that wait for it. Local.

    The end of a group waits for its collectives. If gloo missed the end of a connection, one of them lasts until its timeout:
    after `PART_S`, the group ends in the background.
    """
    if dist.is_initialized():
        groups = list(distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        ending = threading.Thread(target=groups.clear, name="old groups", daemon=True)
        ending.start()
        ending.join(PART_S)
    # Groups are named by a counter, which failed groups have raised too. Members with a different count would wait for
    # the next group under different names.
    distributed_c10d._world.group_count = 0


def _note_newest(store: Store, epoch: int) -> None:
    """Write the number of an epoch, unless a member of a newer one was faster."""
    known = ""
    while int(found := store.compare_set(_NEWEST, known, str(epoch)).decode()) < epoch:
        # An unchanged value means that the entry was lost with a store.
        known = found if found != known else ""


def _await_all(
    store: Store, epoch: int, members: Sequence[int], rank: int, is_over: IsOver, clock: Callable[[], float]
) -> None:
    store.set(f"here/{rank}", "1")
    missing = list(members)
    deadline_s = clock() + ARRIVAL_TIMEOUT_S
    while missing := [member for member in missing if not store.check([f"here/{member}"])]:
        if is_over(_POLL_S) or clock() >= deadline_s:
            break
    proposed = _IS_OVER if missing or is_over() else _MEETS
    if store.compare_set("fate", "", proposed).decode() == _MEETS:
        return
    if missing and not is_over():
        raise WireUnavailable(f"ranks {missing} did not join epoch {epoch} within {ARRIVAL_TIMEOUT_S:g} s")
    raise OvertakenError


def _never(wait_s: float = 0.0) -> bool:
    """Default for `MeetingStore.is_over`."""
    time.sleep(wait_s)
    return False
