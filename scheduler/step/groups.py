"""Process groups and the job's store: how ranks connect, compare settings and wake each other.

Groups are created here and handed to their users; nothing else keeps them.
"""

import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistStoreError, Store

from dispatch.errors import WireUnavailable
from dispatch.gathered import gather_values
from expert_placement.placement import Placement
from scheduler.policy.config import ConfigError, EngineConfig


def make_group(
    ranks: list[int], timeout_s: float, connect_timeout_s: float | None = None
) -> dist.ProcessGroup:
    """Create a gloo group of some of the default group's ranks. Collective over the default group.

    Args:
        timeout_s: Timeout of its collectives. Point-to-point transfers must set their own.
        connect_timeout_s: Timeout of its creation. Defaults to `timeout_s`.

    Raises:
        RuntimeError: A peer is gone; gloo has no more specific error.
    """
    connect_s = timeout_s if connect_timeout_s is None else connect_timeout_s
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=connect_s), backend="gloo")
    group.set_timeout(timedelta(seconds=timeout_s))
    return group


def open_groups(
    config: EngineConfig, connect_timeout_s: float | None = None
) -> list[dist.ProcessGroup | None]:
    """Create the groups of the wire and of the mailbox, which run concurrently and need one each. Collective.
    A single rank has none.

    Args:
        connect_timeout_s: Timeout of the creation of a group. Defaults to the group's own timeout.

    Raises:
        WireUnavailable: The ranks could not connect.
    """
    if config.world_size == 1:
        return [None, None]
    ranks = list(range(config.world_size))
    try:
        return [make_group(ranks, config.distributed_timeout_s, connect_timeout_s) for _ in range(2)]
    except RuntimeError as error:  # gloo's only error for a peer that is gone
        raise WireUnavailable(f"rank {config.rank} could not meet the others: {error}") from error


def hosts_of(group: dist.ProcessGroup | None) -> tuple[str, ...]:
    """Return the hosts of all ranks, in rank order. Collective over `group`; None means a single rank."""
    own = socket.gethostname()
    if group is None:
        return (own,)
    return tuple(gather_values(own, group))


def check_agreed(placement: Placement, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks start from the same placement. Collective over `group`; None means a single rank.

    Raises:
        ConfigError: The ranks read different files.
    """
    if group is None:
        return
    told = gather_values(f"{placement.digest()} version {placement.version}", group)
    if len(set(told)) > 1:
        raise ConfigError(
            f"the ranks start from different placements ({', '.join(told)}); give every node the same file"
        )


def first_problem(own: str | None, group: dist.ProcessGroup | None) -> str | None:
    """Return the first rank's problem, on all ranks, or None if no rank has one. Collective over `group`; None means a
    single rank. So no rank waits in a step for one that has ended."""
    problems = [own] if group is None else gather_values(own, group)
    rank = next((rank for rank, problem in enumerate(problems) if problem is not None), None)
    if rank is None:
        return None
    return str(problems[rank]) if len(problems) == 1 else f"rank {rank}: {problems[rank]}"


WAIT_S = 3600.0  # per call; a sleep may be longer


class StoreDoorbell:
    """A doorbell that uses two connections to the job's store."""

    def __init__(self, waiting: Store, ringing: Store) -> None:
        """Take two clones of the store, which nothing else may use."""
        self._waiting, self._ringing = waiting, ringing
        self._heard: str | None = None

    def ring(self, step: int) -> None:
        """Wake all ranks that sleep before `step`. Any thread may call this, one at a time."""
        self._ringing.set(f"wake/{step}", "1")

    def wait(self, step: int) -> None:
        """Sleep until a rank rings for `step`.

        Raises:
            dist.DistNetworkError: The store's host is gone.
        """
        if self._heard is not None:  # all ranks have taken a step since, so none waits for that key any more
            self._waiting.delete_key(self._heard)
        self._heard = f"wake/{step}"
        while True:
            try:
                self._waiting.wait([self._heard], timedelta(seconds=WAIT_S))
            except DistStoreError:
                continue
            return
