"""At the start of a service on several nodes: the first engine of each node compares programs and checkpoints with the others, and
tries to reach them, before gloo does, which would wait for minutes and name nobody.

The doctor's own checks (`doctor.equal`, `doctor.links`), told over the job's store, in any order of arrival. A node that does
not come is named after some seconds, and waited for all the same: it may be reading a model for the first time.
What a node that joins later has is compared with what the first nodes agreed on.
"""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from server.doctor.equal import compare, facts_to_compare
from server.doctor.interfaces import find_interfaces, gloo_takes
from server.doctor.links import listening, reach
from server.doctor.report import Check, CheckStatus
from server.lines import say
from server.link.seal import SAME_KEY
from server.process.store.rendezvous import Place

SAY_AFTER_S = 10.0  # engines of one job come within seconds of each other, but for a cold disk
_AGREED = "agreed"


class NodesDifferError(RuntimeError):
    """Nodes of a service do not go together, or do not reach each other; the message names them."""


class StoreMeeting:
    """The nodes of a job, told apart by their first ranks. What `doctor.links.Gathers` asks for.

    Args:
        store: below a prefix of its own. place: this node's first rank's.
        host: this node's name.
    """

    def __init__(self, store: Store, place: Place, host: str) -> None:
        self._store, self._place = store, place
        told = self.gather("names", host, timeout_s=0.0)
        self.names: list[str] = [
            f"{name} (rank {first})" for name, first in zip(told, self._firsts, strict=True)
        ]
        self.number = self._firsts.index(place.rank)

    def gather(self, stage: str, value: Any, timeout_s: float) -> list[Any]:
        """Give a value, and return every node's, by rank. A node that is late is named, and waited for."""
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
                "see what it says there",
                error=True,
            )
            self._store.wait([key])
        content = self._store.get(key)
        try:
            return dict(json.loads(content))
        except ValueError as error:  # what a signature begins with
            raise NodesDifferError(
                f"the node of rank {rank} has a cluster key, and this one has none; {SAME_KEY}"
            ) from error


def check_nodes_together(
    store: Store, place: Place, model: Path, key: bytes | None, host: str, environment: Mapping[str, str]
) -> None:
    """Compare with the other nodes and reach them, at the start of a service. Collective among first ranks of nodes.

    Raises:
        NodesDifferError: saying which nodes, and what to do.
        DistStoreError: a node did not come in the store's time.
    """
    if place.local_rank or place.world_size == place.local_world_size:
        return
    meeting = StoreMeeting(store, place, host)
    facts = facts_to_compare(model, key)
    checks = compare(meeting.names, meeting.gather("facts", facts, 0.0))
    taken = gloo_takes(environment, find_interfaces(), host)
    with listening(taken) as port:
        checks += reach(meeting, taken, port)
    if place.rank == 0:
        store.set(_AGREED, json.dumps(facts))
    _refuse(checks, tells=place.rank == 0)


def check_newcomer(store: Store, place: Place, model: Path, key: bytes | None, host: str) -> None:
    """Compare a node that came later with what the first ones agreed on. Local.

    Raises:
        NodesDifferError: it does not go with them.
    """
    if place.local_rank or not store.check([_AGREED]):
        return
    agreed = json.loads(store.get(_AGREED))
    _refuse(
        compare(["the service", f"{host} (rank {place.rank})"], [agreed, facts_to_compare(model, key)]),
        tells=True,
    )


def _refuse(checks: list[Check], *, tells: bool) -> None:
    """Say warnings on one node, and raise for failures."""
    for check in checks:
        if tells and check.status is CheckStatus.WARNING:
            say(f"wideep: {check.sentence}", error=True, level="warning")
    failed = [check.sentence for check in checks if check.status is CheckStatus.FAILURE]
    if failed:
        raise NodesDifferError("; ".join(failed))
