"""How the members of an epoch find each other, and part: torch.distributed's default group, made anew for each epoch.

A member says in the job's store that it is there and waits for the others, as long as no newer order comes; only when
all are there does it enter what cannot be broken off, and under a short time-out, because a member may die just then.
A newer order, or the end of a member's patience, may come to some before, and to others after they saw that all are there.
Whoever is first writes in the store whether this epoch meets, and all do what is written: else those who entered would
wait out their time.
Nothing of an epoch is in another one's way: every name in the store has the epoch in it.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d

from dispatch.errors import WireUnavailable
from scheduler.epochs.orders import IsOver, OvertakenError

ARRIVAL_TIMEOUT_S = 29.5  # just before the front gives those up that did not come (30 s after its order)
CONNECT_TIMEOUT_S = 10.0
_MEETS, _IS_OVER = "meets", "is over"  # what is written of an epoch, once
_POLL_S = 0.02  # a wait in the store itself could not be broken off, and complains aloud


def meet(
    store: Store,
    epoch: int,
    members: Sequence[int],
    rank: int,
    is_over: IsOver,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Make the default group of an epoch's members, by place; collective over them. One member needs none.

    Args:
        store: of the job, on a connection that nobody else uses meanwhile.
        is_over: whether there is no use in it any more.

    Raises:
        OvertakenError: it is over.
        WireUnavailable: a member did not come, or was lost in between.
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
    except RuntimeError as error:  # all that gloo says of a peer that is gone
        raise WireUnavailable(
            f"rank {rank} could not meet ranks {list(members)} in epoch {epoch}: {error}"
        ) from error


def part() -> None:
    """Destroy all groups of this process, which wakes peers that wait for it in one; local."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # Groups are named by a count, which one that did not come about has raised: among other members, whose count is
    # another one, the next would be waited for under a name that nobody else knows.
    distributed_c10d._world.group_count = 0


def _await_all(
    store: Store,
    epoch: int,
    members: Sequence[int],
    rank: int,
    is_over: IsOver,
    clock: Callable[[], float],
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
        raise WireUnavailable(f"ranks {missing} did not come to epoch {epoch} within {ARRIVAL_TIMEOUT_S:g} s")
    raise OvertakenError
