"""Assign ranks to a node that runs its own torchrun and wants to join (`--join`).

Ranks that came together under one torchrun are a node. A new node takes the place of a node that is entirely away and has
the same number of ranks. If there are several, it gets the one that has been away longest, because an engine that was killed
a moment ago is usually being restarted on its node. An assigned place is reserved for a while, so that two new nodes do not
load the same experts; after that another node may try. The node that attaches first keeps the rank, and the other is
refused. While a resize adds ranks, a new node may also take some of these.

A torchrun that names a pool (`--pool`) gets ranks of that pool only. If the service has no pool of this name, the torchrun
brings a new one: it gets the next numbers, and the pool is announced until its first rank attaches, which has loaded by then
and has the service's checkpoint. So a pool that cannot start leaves nothing behind. `Nodes` uses no network and no clock.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from server.link.messages import Claim, Claimed, PoolClaim
from server.machine.whole_files import replace_text
from server.options.pools import Pool, num_ranks_of, pool_from_text, pool_of, pool_to_text

RESERVED_S = 60.0


class _Run(NamedTuple):
    """A torchrun that was given a pool."""

    name: str
    at_s: float  # when; -inf once a rank has attached


class JoinedPools:
    """The pools that joined a service, in a file that outlives its front."""

    def __init__(self, path: Path, *, is_again: bool) -> None:
        """Read the file of an earlier front, if this one replaces it."""
        self._path = path
        lines = path.read_text().split() if is_again and path.exists() else []
        self.pools = [pool_from_text(line) for line in lines]

    def add(self, pool: Pool) -> None:
        """Remember a pool."""
        self.pools.append(pool)
        replace_text(self._path, "".join(f"{pool_to_text(each)}\n" for each in self.pools))


class Nodes:
    """The nodes and pools of one service."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        """Args: pools are those with which the service starts."""
        self._pools = {pool.name: pool for pool in pools}
        self._world_sizes = dict.fromkeys(self._pools, num_ranks_of(pools))  # by pool, as its ranks know it
        self._announced: dict[str, Pool] = {}  # by name: new pools of which no rank has attached
        self._runs: dict[str, _Run] = {}  # by pool: the torchrun that was given all of its ranks
        self._node_of: dict[int, str] = {}  # by rank: the node that attached it last
        self._num_restarts: dict[int, int] = defaultdict(int)  # by rank: the largest number seen
        self._given: dict[str, tuple[tuple[int, ...], float]] = {}  # by new node: its ranks, and since when

    @property
    def announced(self) -> tuple[Pool, ...]:
        """The pools that torchruns bring, and of which no rank has attached."""
        return tuple(self._announced.values())

    def expect(self, announced: Sequence[Pool]) -> None:
        """Let ranks of these pools attach, which the leading front has announced."""
        self._announced = {pool.name: pool for pool in announced if pool.name not in self._pools}

    def put(self, pool: Pool) -> None:
        """Add a pool that has joined, or change the number of ranks of the only one."""
        self._pools[pool.name] = pool
        self._world_sizes[pool.name] = pool.ranks.stop

    def admit(self, rank: int) -> Pool | None:
        """Make the announced pool of a rank that attaches a part of the service, and return it. None if it already is one."""
        pool = next((each for each in self._announced.values() if rank in each.ranks), None)
        if pool is not None:
            del self._announced[pool.name]
            self.put(pool)
        return pool

    def world_size_of(self, rank: int) -> int | None:
        """Return the number of ranks in the facts of a rank. Returns None if the service has no such rank."""
        for pool in self._pools.values():
            if rank in pool.ranks:
                return self._world_sizes[pool.name]
        return next((pool.ranks.stop for pool in self._announced.values() if rank in pool.ranks), None)

    def note(self, rank: int, node: str, num_restarts: int) -> None:
        """Record that a rank has attached. This ends the reservation of its pool: if the pool is lost, any torchrun may take its
        place."""
        name = next((pool.name for pool in self._pools.values() if rank in pool.ranks), "")
        if (run := self._runs.get(name)) is not None:
            self._runs[name] = run._replace(at_s=-math.inf)
        self._node_of[rank] = node
        self._num_restarts[rank] = max(self._num_restarts[rank], num_restarts)

    def claim(
        self, claim: Claim, missing: Mapping[int, float], now_s: float, coming: range = range(0)
    ) -> Claimed:
        """Assign a rank to a worker of a new node.

        Args:
            missing: The ranks that are away, and since when.
            coming: The ranks that a resize adds.
        """
        if (wanted := claim.pool) is None:
            return self._claim_node(claim, None, missing, now_s, coming)
        pool = self._pools.get(wanted.name)
        if pool is None:
            return self._announce(wanted, now_s)
        if wanted.role is not pool.role:
            return self._refuse(
                f"pool {pool.name} has the role {pool.role.value}, not {wanted.role.value}; give that --role, or another name "
                "with --pool (`wideep pools` changes roles while serving)"
            )
        if wanted.num_ranks == pool.num_ranks:
            return self._claim_pool(wanted, pool, missing, now_s)
        if wanted.num_ranks < pool.num_ranks and wanted.num_ranks == claim.num_ranks:
            return self._claim_node(claim, pool, missing, now_s)
        return self._refuse(
            f"pool {pool.name} has {pool.num_ranks} ranks, but this torchrun has {wanted.num_ranks}; give it as many, or another "
            "name with --pool"
        )

    def _announce(self, wanted: PoolClaim, now_s: float) -> Claimed:
        """Assign a rank of a new pool."""
        name, run = wanted.name, self._runs.get(wanted.name)
        if name not in self._announced or run is None or run.name != wanted.run:
            if name in self._announced and run is not None and now_s - run.at_s < RESERVED_S:
                return self._refuse(
                    f"another torchrun is joining as pool {name}; give another name with --pool",
                    may_come=True,
                )
            self._announced.pop(name, None)
            first_rank = max(pool.ranks.stop for pool in (*self._pools.values(), *self._announced.values()))
            self._announced[name] = Pool(name, wanted.role, first_rank, wanted.num_ranks)
            self._runs[name] = _Run(wanted.run, now_s)
        return self._give(self._announced[name], self._announced[name].ranks[wanted.rank])

    def _claim_pool(
        self, wanted: PoolClaim, pool: Pool, missing: Mapping[int, float], now_s: float
    ) -> Claimed:
        """Assign a rank of a pool to a torchrun that takes the place of the whole pool."""
        run = self._runs.get(pool.name)
        if run is None or run.name != wanted.run:
            is_reserved = run is not None and now_s - run.at_s < RESERVED_S
            if is_reserved or not missing.keys() >= set(pool.ranks):
                return self._refuse_duplicate(pool)
            self._runs[pool.name] = _Run(wanted.run, now_s)
        return self._give(pool, pool.ranks[wanted.rank])

    def _claim_node(
        self,
        claim: Claim,
        pool: Pool | None,
        missing: Mapping[int, float],
        now_s: float,
        coming: range = range(0),
    ) -> Claimed:
        """Assign a rank of a node that is away, of one pool or of any, or one of the ranks that a resize adds."""
        ranks, _ = self._given.get(claim.node, ((), 0.0))
        if not ranks or not set(ranks) <= {*missing, *self._ranks_of(claim.node), *coming}:
            away = self._away(pool, missing, now_s)
            fitting = [each for each in away if len(each) == claim.num_ranks]
            if not fitting and pool is not None and not away:
                return self._refuse_duplicate(pool)
            given = {rank for taken, _ in self._given.values() for rank in taken}
            new = tuple(rank for rank in coming if rank not in given)[: claim.num_ranks]
            if not fitting and len(new) < claim.num_ranks:
                return self._refuse_node(claim, away)
            ranks = min(fitting, key=lambda each: max(missing[rank] for rank in each), default=new)
            self._given[claim.node] = ranks, now_s
        rank = ranks[claim.local_rank]
        if rank in coming:
            only = next(iter(self._pools.values()))
            grown = only._replace(num_ranks=coming.stop - only.first_rank)
            return Claimed(rank, coming.stop, self._num_restarts[rank] + 1, pool=grown)
        return self._give(pool or pool_of(list(self._pools.values()), rank), rank)

    def _ranks_of(self, node: str) -> set[int]:
        return {rank for rank, its_node in self._node_of.items() if its_node == node}

    def _away(self, pool: Pool | None, missing: Mapping[int, float], now_s: float) -> list[tuple[int, ...]]:
        """Return the ranks of each node that is entirely away and not reserved, of one pool or of all."""
        nodes: dict[str, list[int]] = defaultdict(list)
        for each in self._pools.values() if pool is None else (pool,):
            for rank in each.ranks:
                nodes[self._node_of.get(rank, "")].append(rank)
        self._given = {node: given for node, given in self._given.items() if now_s - given[1] < RESERVED_S}
        given = {rank for ranks, _ in self._given.values() for rank in ranks}
        return [
            tuple(ranks)
            for ranks in nodes.values()
            if missing.keys() >= set(ranks) and not given & set(ranks)
        ]

    def _give(self, pool: Pool, rank: int) -> Claimed:
        world_size = self._world_sizes.get(pool.name, pool.ranks.stop)
        return Claimed(rank, world_size, self._num_restarts[rank] + 1, pool=pool)

    def _refuse(self, reason: str, *, may_come: bool = False) -> Claimed:
        return Claimed(-1, 0, 0, reason, may_come=may_come)

    def _refuse_node(self, claim: Claim, away: list[tuple[int, ...]]) -> Claimed:
        wanted = f"a node with --nproc-per-node {claim.num_ranks}"
        if not away:
            return self._refuse(f"no node is away, so {wanted} cannot join", may_come=True)
        sizes = ", ".join(sorted({str(len(ranks)) for ranks in away}))
        return self._refuse(
            f"{wanted} cannot join: missing nodes had {sizes}; give torchrun that --nproc-per-node"
        )

    def _refuse_duplicate(self, pool: Pool) -> Claimed:
        """Refuse a second pool of a name. It may be the same pool, which ended without the front noticing yet."""
        reason = (
            f"the service has a {pool.in_words}, and no node of it is away; give another name with --pool"
        )
        return self._refuse(reason, may_come=True)
