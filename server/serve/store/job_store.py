"""Where the ranks of a service find their job's store, which may move to another node.

torchrun's agent on the endpoint's node hosts the store. With `--standby`, the agent on the standby's node hosts a second one. If
the first node is lost, the ranks move to it when they attach to the front there.
Rejected: copying the entries of the first store, because later epochs use none of them: their names contain the epoch's number.
"""

import contextlib
import json
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from scheduler.step.groups import StoreDoorbell
from server.options.table import PER_NODE
from server.serve.child_messages import joined_announcement, ranks_addresses
from server.serve.store.claim import publish_service
from server.serve.store.meeting import Endpoint
from server.serve.store.moving_store import MovingStore, StoreAddress, connect, open_store
from server.serve.store.rendezvous import Place
from server.serve.store.signed_store import SignedStore

FRONT_KEY, STANDBY_KEY = "front", "standby"  # entries with the fronts' addresses
_FURTHER_KEY, _NUM_FURTHER_KEY = "fronts/", "num_fronts"  # entries with the fronts of nodes that do not lead
_RING_S = 1.0  # for a ring to find the store
FRONTS_TIMEOUT_S = 120.0  # for the fronts on another node to bind their ports


class _MovingDoorbell(StoreDoorbell):
    """A doorbell in a store that may be lost.

    A ring then has no effect, because the thread that rings may be the one that moves this rank to another store. The next order rings
    again.
    """

    def ring(self, step: int) -> None:
        with contextlib.suppress(dist.DistNetworkError):
            super().ring(step)


class NoStandbyError(RuntimeError):
    """No node of the service can be the standby of --standby."""


class NodeFrontsError(RuntimeError):
    """A node of the service has no fronts, or another number of them."""


class JobStore:
    """Where this rank finds the store of its job."""

    def __init__(
        self,
        place: Place,
        environment: Mapping[str, str],
        key: bytes | None,
        *,
        standby: str | None = None,
        recovery_s: float = 0.0,
    ) -> None:
        """Args: standby is the address of the second store, if there is one; recovery_s is as for `MovingStore`."""
        names = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
        self._prefix, self._environment, self._key = "/".join(("wideep", *names)), environment, key
        self._recovery_s = recovery_s
        self.first = Endpoint(place.master_addr, place.master_port)
        self.standby = None if standby is None else Endpoint.parse(standby)
        self._address = StoreAddress(self.first)

    def open(self, *, recovery_s: float | None = None) -> Store:
        """Return a separate connection, with a prefix for this job and this round of torchrun's workers."""
        return PrefixStore(self._prefix, self._open(self._address, recovery_s))

    def open_doorbell(self, prefix: str) -> StoreDoorbell:
        """Return the doorbell of a pool, on two connections."""
        if self.standby is None:
            return StoreDoorbell(*(PrefixStore(prefix, self.open()) for _ in range(2)))
        waiting, ringing = self.open(), self.open(recovery_s=_RING_S)
        return _MovingDoorbell(PrefixStore(prefix, waiting), PrefixStore(prefix, ringing))

    def publish(self, front: Mapping[str, str], store: Store) -> None:
        """Write the addresses of the front on this node, for the other ranks and for nodes that join later."""
        store.set(FRONT_KEY, json.dumps(front))
        publish_service(self._open(self._address), front, self._environment)

    def gather_fronts(self, front: Mapping[str, str], store: Store, num_nodes: int) -> dict[str, str]:
        """Return the addresses of the fronts of all nodes.

        Args:
            front: Those of the leading node, which is this one.

        Raises:
            NodeFrontsError: A node has none, or another number.
        """
        keys = [f"{_FURTHER_KEY}{node}" for node in range(1, num_nodes)]
        try:
            store.wait(keys, timedelta(seconds=FRONTS_TIMEOUT_S))
        except dist.DistStoreError as error:
            missing = sum(not store.check([key]) for key in keys)
            raise NodeFrontsError(
                f"--fronts is {PER_NODE}, but {missing} of {num_nodes} nodes started no front within {FRONTS_TIMEOUT_S:g} s; use "
                "the same flags on all nodes"
            ) from error
        nodes = [front, *(json.loads(store.get(key)) for key in keys)]
        counts = [len(ranks_addresses(each)) for each in nodes]
        if len(set(counts)) > 1:
            raise NodeFrontsError(
                f"--api-server-count differs: the nodes have {', '.join(map(str, counts))} fronts; use the same flags on all nodes"
            )
        return joined_announcement(nodes)

    def publish_further(self, bound: Mapping[str, str], store: Store) -> int:
        """Write the addresses of this node's fronts, if it does not lead, and return its number among the nodes with fronts."""
        node = int(store.add(_NUM_FURTHER_KEY, 1))
        store.set(f"{_FURTHER_KEY}{node}", json.dumps(dict(bound)))
        return node

    def publish_standby(self, bound: Mapping[str, str], store: Store) -> dict[str, str]:
        """Write the addresses of the standby's front on this node, and return those of the leading front.

        Args:
            bound: As announced by the standby's front. Its token is replaced by that of the leading front.

        Raises:
            NoStandbyError: The two nodes have different numbers of fronts.
        """
        assert self.standby is not None, "the supervisor knows it"
        first: dict[str, str] = json.loads(store.get(FRONT_KEY))
        here, first_count = (len(ranks_addresses(each)) for each in (bound, first))
        if here != first_count:
            raise NoStandbyError(
                f"--api-server-count is {here} on this node, which is the standby, and {first_count} on the node of "
                "--rdzv-endpoint; use the same flags on all nodes"
            )
        front = {**bound, "token": first["token"]}
        there = self._open(StoreAddress(self.standby))
        PrefixStore(self._prefix, there).set(FRONT_KEY, json.dumps(front))
        publish_service(there, front, self._environment)
        store.set(STANDBY_KEY, json.dumps(front))
        return first

    def find_standby(self, store: Store, *, is_start: bool) -> dict[str, str] | None:
        """Return the addresses of the standby's front. Returns None if the service has lost it.

        Args:
            is_start: Whether the service starts, so that the addresses are still to come.

        Raises:
            NoStandbyError: They did not come.
        """
        if self.standby is None or self._address.present == self.standby:
            return None
        if is_start:
            try:
                store.wait([STANDBY_KEY], timedelta(seconds=FRONTS_TIMEOUT_S))
            except dist.DistStoreError as error:
                raise NoStandbyError(
                    f"--standby is {self.standby}, but no node of the service with that address started a front within "
                    f"{FRONTS_TIMEOUT_S:g} s; name an address of another node than the endpoint's, and use the same flags on "
                    "all nodes"
                ) from error
        elif not store.check([STANDBY_KEY]):
            return None
        found: dict[str, str] = json.loads(store.get(STANDBY_KEY))
        return found

    def move(self) -> None:
        """Use the standby's store from now on."""
        assert self.standby is not None, "there is a standby"
        self._address.move(self.standby)

    def move_if_lost(self) -> None:
        """Use the standby's store if the first one has no front of this job: this engine starts after the first node was lost."""
        if self.standby is None or self.standby == self.first:
            return
        try:
            has_front = PrefixStore(self._prefix, connect(self.first)).check([FRONT_KEY])
        except dist.DistError:
            has_front = False
        if not has_front:
            self.move()

    def _open(self, address: StoreAddress, recovery_s: float | None = None) -> Store:
        store: Store
        if self.standby is None:
            store = open_store(address.present)
        else:
            store = MovingStore(address, recovery_s=self._recovery_s if recovery_s is None else recovery_s)
        return store if self._key is None else SignedStore(store, self._key)
