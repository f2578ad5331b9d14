"""At the start of a multi-node service, compare programs and checkpoints across nodes, and test that the nodes reach each other.

The first engine of each node runs this before gloo connects, which would wait for minutes and name no node. It runs the
doctor's checks (`serve.preflight.equal`, `serve.store.links`) over the job's store, in any order of arrival. The rank of a
missing node is logged after SAY_AFTER_S, and the wait continues, because the node may be reading a model for the first time.
A node that joins later is compared with the facts on which the first nodes agreed.
"""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from server.link.seal import SAME_KEY
from server.machine.interfaces import find_interfaces, gloo_takes
from server.machine.lines import say
from server.machine.report import Check, CheckStatus
from server.serve.preflight.equal import compare, facts_to_compare
from server.serve.store.links import listening, reach
from server.serve.store.rendezvous import Place

SAY_AFTER_S = 10.0  # engines of a job start within seconds of each other, except with a cold disk
_AGREED = "agreed"


class NodesDifferError(RuntimeError):
    """Nodes of a service do not match or do not reach each other; the message names them."""


class StoreMeeting:
    """The nodes of a job, identified by their first ranks. Implements `serve.store.links.Gathers`.

    Args:
        store: The store, with a dedicated prefix. place: Place of this node's first rank.
        host: This node's name.
    """

    def __init__(self, store: Store, place: Place, host: str) -> None:
        self._store, self._place = store, place
        told = self.gather("names", host, timeout_s=0.0)
        self.names: list[str] = [
            f"{name} (rank {first})" for name, first in zip(told, self._firsts, strict=True)
        ]
        self.number = self._firsts.index(place.rank)

    def gather(self, stage: str, value: Any, timeout_s: float) -> list[Any]:
        """Publish a value and return those of all nodes, by rank. Logs the rank of a late node and keeps waiting for it."""
        place = self._place
        told = {"num_ranks": place.local_world_size, "value": value}
        self._store.set(f"{stage}/{place.rank}", json.dumps(told))
        values, self._firsts, at = [], list[int](), 0
        while at < place.world_size:
            found = self._read(f"{stage}/{at}", at)
            self._firsts.append(at)
            values.append(found["value"])
            at += found["num_ranks"]
        return values

    def _read(self, key: str, rank: int) -> dict[str, Any]:
        begun_s = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=SAY_AFTER_S))
        except dist.DistStoreError:
            say(
                f"wideep: rank {self._place.rank} has waited {time.monotonic() - begun_s:.0f} s for the node of rank {rank}; "
                "check the messages on that node",
                error=True,
            )
            self._store.wait([key])
        content = self._store.get(key)
        try:
            return dict(json.loads(content))
        except ValueError as error:  # the value begins with a signature
            raise NodesDifferError(
                f"the node of rank {rank} has a cluster key, but this one does not; {SAME_KEY}"
            ) from error


def check_nodes_together(
    store: Store,
    place: Place,
    model: Path,
    key: bytes | None,
    host: str,
    environment: Mapping[str, str],
    *,
    pools: str | None = None,
    may_grow: bool = False,
) -> None:
    """Compare this node with the others and test the links, at the start. Collective among the nodes' first ranks.

    Args:
        may_grow: Whether torchruns may add pools, so that a single node leaves its facts for them.

    Raises:
        NodesDifferError: Nodes do not match; the message names them and a remedy.
        DistStoreError: A node did not arrive within the store's timeout.
    """
    is_alone = place.world_size == place.local_world_size
    if place.local_rank or (is_alone and not may_grow):
        return
    if is_alone:
        store.set(_AGREED, json.dumps({**facts_to_compare(model, key), "pools": pools}))
        return
    meeting = StoreMeeting(store, place, host)
    facts = {**facts_to_compare(model, key), "pools": pools}
    checks = compare(meeting.names, meeting.gather("facts", facts, 0.0))
    taken = gloo_takes(environment, find_interfaces(), host)
    with listening(taken) as port:
        checks += reach(meeting, taken, port)
    if place.rank == 0:
        store.set(_AGREED, json.dumps(facts))
    _refuse(checks, tells=place.rank == 0)


def check_newcomer(
    store: Store,
    place: Place,
    model: Path,
    key: bytes | None,
    host: str,
    *,
    pools: str | None = None,
    has_own_pool: bool = False,
) -> None:
    """Compare a joining node with the facts on which the first nodes agreed. Local.

    Args:
        has_own_pool: Whether the node is a pool, of a service that is perhaps still starting. The first nodes may have --pools.

    Raises:
        NodesDifferError: The node does not match.
    """
    if place.local_rank or not (has_own_pool or store.check([_AGREED])):
        return
    agreed, own = json.loads(store.get(_AGREED)), {**facts_to_compare(model, key), "pools": pools}
    if has_own_pool:
        own["pools"] = agreed["pools"]
    _refuse(compare(["the service", f"{host} (rank {place.rank})"], [agreed, own]), tells=True)


def _refuse(checks: list[Check], *, tells: bool) -> None:
    """Log warnings if `tells`, and raise if any check failed."""
    for check in checks:
        if tells and check.status is CheckStatus.WARNING:
            say(f"wideep: {check.sentence}", error=True, level="warning")
    failed = [check.sentence for check in checks if check.status is CheckStatus.FAILURE]
    if failed:
        raise NodesDifferError("; ".join(failed))
