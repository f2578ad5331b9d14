"""Process groups and the job's store: how ranks find, compare themselves with and wake each other.

Groups are made here and given away; nothing else keeps them (D8 of the design).
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
    """Make a gloo group of some of the default group's ranks; collective over that.

    Args:
        timeout_s: of collectives in it; what goes from one rank to another must say its own.
        connect_timeout_s: of making it; None: the same.

    Raises:
        RuntimeError: all that gloo says of a peer that is gone.
    """
    connect_s = timeout_s if connect_timeout_s is None else connect_timeout_s
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=connect_s), backend="gloo")
    group.set_timeout(timedelta(seconds=timeout_s))
    return group


def open_groups(
    config: EngineConfig, connect_timeout_s: float | None = None
) -> list[dist.ProcessGroup | None]:
    """Make the groups of the wire and of the mailbox: they run side by side, so they need one each. Collective;
    one rank has none.

    Args:
        connect_timeout_s: how long making one may take; None: as long as what it is used for.

    Raises:
        WireUnavailable: ranks could not meet.
    """
    if config.world_size == 1:
        return [None, None]
    ranks = list(range(config.world_size))
    try:
        return [make_group(ranks, config.timeout_s, connect_timeout_s) for _ in range(2)]
    except RuntimeError as error:  # all that gloo says of a peer that is gone
        raise WireUnavailable(f"rank {config.rank} could not meet the others: {error}") from error


def hosts_of(group: dist.ProcessGroup | None) -> tuple[str, ...]:
    """Tell the hosts of all ranks, in their order; collective over `group`, None being one rank."""
    own = socket.gethostname()
    if group is None:
        return (own,)
    return tuple(gather_values(own, group))


def check_agreed(placement: Placement, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks start from the same placement; collective over `group`, None being one rank.

    Raises:
        ConfigError: they read different files.
    """
    if group is None:
        return
    told = gather_values(f"{placement.digest()} version {placement.version}", group)
    if len(set(told)) > 1:
        raise ConfigError(
            f"the ranks start from different placements ({', '.join(told)}); give every node the same file"
        )


WAIT_S = 3600.0  # per call; a sleep may be longer


class StoreDoorbell:
    """A doorbell over two connections to the job's store."""

    def __init__(self, waiting: Store, ringing: Store) -> None:
        """Take two clones of the store that nobody else uses."""
        self._waiting, self._ringing = waiting, ringing
        self._heard: str | None = None

    def ring(self, step: int) -> None:
        """Wake everybody who sleeps before `step`; any thread, one at a time."""
        self._ringing.set(f"wake/{step}", "1")

    def wait(self, step: int) -> None:
        """Sleep until somebody rings for `step`.

        Raises:
            dist.DistNetworkError: the store's host is gone.
        """
        if self._heard is not None:  # everybody has taken a step since, so nobody waits for that key any more
            self._waiting.delete_key(self._heard)
        self._heard = f"wake/{step}"
        while True:
            try:
                self._waiting.wait([self._heard], timedelta(seconds=WAIT_S))
            except DistStoreError:
                continue
            return
