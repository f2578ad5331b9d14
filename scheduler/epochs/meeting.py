"""How the members of an epoch meet and part: torch.distributed's default group, created again for each epoch.

A member announces itself in the job's store and waits for the others while no newer order comes. When all are there, they
create groups. A member may die just then. The others would wait for its address until a timeout, so their waits in the
store end when a newer order comes. Only the connections themselves cannot be interrupted. They have a short timeout.
A newer order or a member's timeout may reach some members before they saw that all are there, and others after. So the
first member to decide writes to the store whether this epoch meets, and all follow that entry. Otherwise those that
entered would wait for the full timeout.
Epochs cannot interfere: every key in the store contains the epoch.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store, distributed_c10d

from dispatch.errors import WireUnavailable
from scheduler.epochs.orders import IsOver, OvertakenError

ARRIVAL_TIMEOUT_S = 29.5  # just before the front drops members that did not arrive (30 s after its order)
CONNECT_TIMEOUT_S = 10.0
_MEETS, _IS_OVER = "meets", "is over"  # the entry for an epoch, written once
_POLL_S = 0.02  # a wait in the store itself could not be interrupted, and logs errors
_ADDRESS_POLL_S = 0.001  # all members are there, so their addresses come at once


class MeetingStore(Store):
    """The job's store for group creation, whose waits end when an order is obsolete.

    torch keeps no reference to this object, only to its base. So whoever creates groups must keep it meanwhile.
    """

    def __init__(self, store: Store, is_over: IsOver, clock: Callable[[], float]) -> None:
        super().__init__()
        self._store, self._is_over, self._clock = store, is_over, clock

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            OvertakenError: The order is obsolete.
            DistStoreError: The time is over.
        """
        limit_s = CONNECT_TIMEOUT_S if timeout is None else timeout.total_seconds()
        until_s = self._clock() + limit_s
        while not self._store.check(keys):
            if self._is_over(_ADDRESS_POLL_S):
                raise OvertakenError
            if self._clock() >= until_s:
                raise DistStoreError(f"no address came within {limit_s:g} s")

    def clone(self) -> Store:
        """Return this store, because its connection is not used for anything else meanwhile."""
        return self

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return it."""
        return self._store.add(key, value)


def meet(
    store: Store,
    epoch: int,
    members: Sequence[int],
    rank: int,
    is_over: IsOver,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> MeetingStore | None:
    """Create the default group of an epoch's members, by place. Collective over them. A single member needs none.

    Returns the store of the group. Keep it while groups of the epoch are created.

    Args:
        store: The job's store, on a connection that is not used for anything else meanwhile.
        is_over: Whether the order is obsolete.

    Raises:
        OvertakenError: The order is obsolete.
        WireUnavailable: A member did not arrive, or was lost meanwhile.
    """
    if len(members) == 1:
        return None
    own = PrefixStore(f"epoch/{epoch}", store)
    _await_all(own, epoch, members, rank, is_over, clock)
    shared = MeetingStore(own, is_over, clock)
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("group", shared),
            rank=members.index(rank),
            world_size=len(members),
            timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
        )
    except RuntimeError as error:  # gloo's only error for a peer that is gone
        raise WireUnavailable(
            f"rank {rank} could not meet ranks {list(members)} in epoch {epoch}: {error}"
        ) from error
    return shared


def part() -> None:
    """Destroy all groups of this process, which wakes peers that wait for it. Local."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # Groups are named by a counter, which failed groups have raised too. Members with a different count would wait for
    # the next group under different names.
    distributed_c10d._world.group_count = 0


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
