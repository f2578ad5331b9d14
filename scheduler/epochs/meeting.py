"""How the members of an epoch meet and part: torch.distributed's default group, created again for each epoch.

A member announces itself in the job's store and waits for the others while no newer order comes. Group creation cannot
be interrupted, so a member enters it only when all are there, with a short timeout because a member may die just then.
A newer order or a member's timeout may reach some members before they saw that all are there, and others after. So the
first member to decide writes to the store whether this epoch meets, and all follow that entry. Otherwise those that
entered would wait for the full timeout.
Epochs cannot interfere: every key in the store contains the epoch.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d

from dispatch.errors import WireUnavailable
from scheduler.epochs.orders import IsOver, OvertakenError

ARRIVAL_TIMEOUT_S = 29.5  # just before the front drops members that did not arrive (30 s after its order)
CONNECT_TIMEOUT_S = 10.0
_MEETS, _IS_OVER = "meets", "is over"  # the entry for an epoch, written once
_POLL_S = 0.02  # a wait in the store itself could not be interrupted, and logs errors


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
