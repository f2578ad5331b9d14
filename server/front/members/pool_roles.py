"""The roles of pools while they serve: what they are now, changes by an operator, and changes by load (`--pool-roles auto`).

`RoleBalance` decides from the pools' load. Prompts that wait long take a pool that decodes with room to spare, and answers that
fill the KV cache take a pool that runs prompts without a queue. A need must last, and a change is followed by a pause, so roles
do not swing. A pool gets the role both first if it is the only one of its role. When the load has passed, pools return to
the roles of `--pools`. The idea is Splitwise's mixed pool (arXiv 2311.18677).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from server.front.errors import ApiError, bad_request
from server.front.events import EventLog
from server.front.routing.loads import PoolLoad
from server.front.routing.moves import Moves
from server.front.routing.router import Router
from server.options.pools import Pool, Role

LONG_STEPS = 8.0  # of waiting prompts per rank: the queue is long
SHORT_STEPS = 1.0  # the queue is short
FULL_SHARE, ROOMY_SHARE = 0.9, 0.5  # of KV blocks in use
HOLD_S = 5.0  # how long a need must last
PAUSE_S = 30.0  # between two changes


class PoolState(NamedTuple):
    """A pool and its load."""

    pool: Pool
    role: Role  # at present
    load: PoolLoad


class RoleChange(NamedTuple):
    """A pool that gets another role."""

    name: str
    role: Role
    reason: str


class RoleBalance:
    """Decides when roles follow the load. Knows the time only from its caller."""

    def __init__(self) -> None:
        self._pending: RoleChange | None = None
        self._pending_since_s = 0.0  # since when
        self._changed_s = float("-inf")

    def decide(self, pools: Sequence[PoolState], now_s: float) -> RoleChange | None:
        """Return the change to make now, or None."""
        serving = [each for each in pools if each.load.num_ranks]
        change = _needed(serving) or _returning(serving)
        if change is None or self._pending is None or change[:2] != self._pending[:2]:
            self._pending, self._pending_since_s = change, now_s
        if change is None or now_s - self._pending_since_s < HOLD_S or now_s - self._changed_s < PAUSE_S:
            return None
        self._pending, self._changed_s = None, now_s
        return change


def _needed(pools: Sequence[PoolState]) -> RoleChange | None:
    """Return the change that the load needs, or None."""
    prompting = [each for each in pools if each.role is not Role.DECODE]
    decoding = [each for each in pools if each.role is not Role.PREFILL]
    queue = min((each.load.prompt_steps for each in prompting), default=0.0)
    usage = min((each.load.kv_usage for each in decoding), default=0.0)
    if queue > LONG_STEPS and usage < ROOMY_SHARE:
        spare = [each for each in decoding if each.role is Role.DECODE]
        reason = f"prompts of {queue:.0f} steps wait"
        return _given(spare, Role.PREFILL, reason, key=lambda each: each.load.kv_usage)
    if usage > FULL_SHARE and queue < SHORT_STEPS:
        spare = [each for each in prompting if each.role is Role.PREFILL]
        reason = f"{usage:.0%} of the KV cache is in use"
        return _given(spare, Role.DECODE, reason, key=lambda each: each.load.prompt_steps)
    return None


def _given(
    spare: Sequence[PoolState], role: Role, reason: str, *, key: Callable[[PoolState], float]
) -> RoleChange | None:
    """Give the least loaded of some pools of one role another role: both, if it is the only one."""
    if not spare:
        return None
    return RoleChange(min(spare, key=key).pool.name, role if len(spare) > 1 else Role.BOTH, reason)


def _returning(pools: Sequence[PoolState]) -> RoleChange | None:
    """Return the change of a pool that can have its first role again, or None."""
    is_calm = all(each.load.prompt_steps < SHORT_STEPS and each.load.kv_usage < ROOMY_SHARE for each in pools)
    reason = "the load has passed"
    changed = [each for each in pools if each.role is not each.pool.role] if is_calm else []
    for each in changed:
        if _missing_role({each.pool.role, *(other.role for other in pools if other is not each)}) is None:
            return RoleChange(each.pool.name, each.pool.role, reason)
    # Of two pools with swapped roles, one has to do both first.
    pure = [each for each in changed if each.role is not Role.BOTH]
    return RoleChange(pure[0].pool.name, Role.BOTH, reason) if pure else None


class PoolRoles:
    """The pools of a service and their present roles."""

    def __init__(
        self,
        pools: Sequence[Pool],
        router: Router,
        moves: Moves,
        events: EventLog,
        *,
        is_auto: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._roles: dict[str, Role] = {}
        self._router, self._moves, self._events, self._clock = router, moves, events, clock
        self._balance = RoleBalance() if is_auto else None
        for pool in pools:
            self._set(pool, pool.role)

    def add(self, pool: Pool) -> None:
        """Add a pool that joins while the service runs."""
        self._pools[pool.name] = pool
        self._set(pool, pool.role)

    @property
    def roles(self) -> Mapping[str, Role]:
        """The present roles, by pool."""
        return dict(self._roles)

    def present(self) -> list[Pool]:
        """Return the pools with their present roles."""
        return [pool._replace(role=self._roles[name]) for name, pool in self._pools.items()]

    def _set(self, pool: Pool, role: Role) -> None:
        self._roles[pool.name] = role
        for rank in pool.ranks:
            self._router.set_pool(rank, pool.name)
            self._router.set_role(rank, role)

    def resize(self, pool: Pool) -> None:
        """Record a pool's new number of ranks. They get its role."""
        self._pools[pool.name] = pool
        self._set(pool, self._roles[pool.name])

    def change(self, name: str, role: Role, *, reason: str = "by an operator") -> None:
        """Give a pool a role. Its requests continue, and move to other pools if it no longer decodes.

        Raises:
            ApiError: The pool does not exist, or the role would have no counterpart.
        """
        pool = self._pools.get(name)
        if pool is None:
            raise bad_request(
                f"Pool {name!r} does not exist; the pools are {', '.join(self._pools)}.", "pool"
            )
        if role is self._roles[name]:
            return
        if (missing := _missing_role({*(self._roles | {name: role}).values()})) is not None:
            raise ApiError(
                409,
                f"Pool {name} cannot have the role {role.value}: no other pool has the role {missing.value} or both. "
                "Give another pool the role both first.",
            )
        text = f"pool {name} changes its role from {self._roles[name].value} to {role.value}: {reason}"
        self._set(pool, role)
        self._events.note("role", text)
        self._moves.look(is_urgent=True)

    def balance(self) -> None:
        """Let roles follow the load, with `--pool-roles auto`. Called about once a second."""
        if self._balance is None:
            return
        change = self._balance.decide(self._states(), self._clock())
        if change is not None and change.role is not self._roles[change.name]:
            self.change(change.name, change.role, reason=change.reason)

    def _states(self) -> list[PoolState]:
        router = self._router
        return [
            PoolState(pool, self._roles[name], router.load_of(pool.ranks))
            for name, pool in self._pools.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the pools with their roles and loads."""
        return {
            "roles": "fixed" if self._balance is None else "auto",
            "pools": [
                {
                    "name": pool.name,
                    "role": role.value,
                    "ranks": list(pool.ranks),
                    "serving": load.num_ranks,
                    "requests": load.num_requests,
                    "prompt_steps": round(load.prompt_steps, 3),
                    "kv_usage": round(load.kv_usage, 4),
                }
                for pool, role, load in self._states()
            ],
        }


def _missing_role(roles: set[Role]) -> Role | None:
    """Return the role that some pool must have next to these, as for `--pools`. Returns None if they are complete."""
    if Role.BOTH in roles or {Role.PREFILL, Role.DECODE} <= roles:
        return None
    return Role.DECODE if Role.PREFILL in roles else Role.PREFILL
