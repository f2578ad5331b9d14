"""Pools: expert groups behind one front, and their roles (`--pools`, or `--pool` and `--role` of a torchrun's own pool).

The ranks of a pool share lock-step, epochs and a placement; pools are independent. Every rank has a number in the service and,
from 0, a number in its pool. The front, the router and clients use the first; the engine and its peers use the second.

Separating prompts from decodes is DistServe's idea (arXiv 2401.09670) and Splitwise's (arXiv 2311.18677).
"""

import re
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from server.options.flag import OptionsError

# A step next to decodes takes up to this many prompt tokens in any case (`scheduler.step.prefill_pace`), so handing over fewer
# gains nothing.
PREFILL_THRESHOLD = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Role(Enum):
    """Which part of a request the ranks of a pool run."""

    BOTH = "both"
    PREFILL = "prefill"  # the prompt and the first token
    DECODE = "decode"  # the other tokens, and prompts that are too short to hand over


class Pool(NamedTuple):
    """One expert group."""

    name: str
    role: Role  # when it was started; it may change later
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        """The numbers of its ranks in the service."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def in_words(self) -> str:
        """The pool with its role and ranks for people: "pool long (prefill, ranks 2 to 3)"."""
        return f"pool {self.name} ({self.role.value}, {ranks_in_words(self.ranks)})"


def single_pool(num_ranks: int) -> tuple[Pool, ...]:
    """Return the pools of a service without `--pools`."""
    return (Pool("both", Role.BOTH, 0, num_ranks),)


def read_pools(text: str) -> tuple[Pool, ...]:
    """Read `--pools`: ROLE:RANKS, separated by commas, such as "prefill:1,decode:2".

    A pool is named after its role. If several have the same role, a number follows: decode-0, decode-1.

    Raises:
        OptionsError: The text has another form, or a role is without its counterpart.
    """
    entries = [_read_entry(entry.strip()) for entry in text.split(",")]
    roles = [role for role, _ in entries]
    if (Role.PREFILL in roles) != (Role.DECODE in roles) and Role.BOTH not in roles:
        missing = Role.DECODE if Role.PREFILL in roles else Role.PREFILL
        raise OptionsError(f"invalid --pools {text!r}: no pool has the role {missing.value} or both")
    pools: list[Pool] = []
    first_rank = 0
    for number, (role, num_ranks) in enumerate(entries):
        is_only = roles.count(role) == 1
        name = role.value if is_only else f"{role.value}-{roles[:number].count(role)}"
        pools.append(Pool(name, role, first_rank, num_ranks))
        first_rank += num_ranks
    return tuple(pools)


def pools_of(text: str | None, num_ranks: int) -> tuple[Pool, ...]:
    """Return the pools of a service with `num_ranks` ranks. `text` is the value of `--pools`, or None without the flag.

    Raises:
        OptionsError: The pools have another number of ranks.
    """
    if text is None:
        return single_pool(num_ranks)
    pools = read_pools(text)
    if (found := num_ranks_of(pools)) != num_ranks:
        raise OptionsError(
            f"--pools {text} has {found} ranks, but the service has {num_ranks}; give each rank to one pool"
        )
    return pools


def num_ranks_of(pools: Sequence[Pool]) -> int:
    """Return the number of ranks of all pools."""
    return sum(pool.num_ranks for pool in pools)


def rank_pool_sizes(pools: Sequence[Pool], ranks: Sequence[int]) -> list[int]:
    """Return, for each of these ranks, the number of ranks of its pool."""
    return [pool_of(pools, rank).num_ranks for rank in ranks]


def have_roles(pools: Sequence[Pool]) -> bool:
    """Return whether some pool runs one part of a request only, so that requests move between pools."""
    return any(pool.role is not Role.BOTH for pool in pools)


def in_words(pools: Sequence[Pool]) -> str:
    """Return the pools and their numbers of ranks for people: "prefill 1, decode 2"."""
    return ", ".join(f"{pool.name} {pool.num_ranks}" for pool in pools)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return consecutive ranks for people: "rank 4", or "ranks 2 to 3"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def check_pool_name(flag: str, name: str) -> str:
    """Return the name of a pool.

    Raises:
        OptionsError: A name has other characters. Names appear in metrics, in names of files, and between colons.
    """
    if not _NAME.fullmatch(name):
        raise OptionsError(
            f"{flag} is {name!r}; use 1 to 64 letters, digits, dots, dashes and underscores, such as decode-2"
        )
    return name


def pool_to_text(pool: Pool) -> str:
    """Return a pool as text for a variable of a process."""
    return f"{pool.name}:{pool.role.value}:{pool.first_rank}:{pool.num_ranks}"


def pool_from_text(text: str) -> Pool:
    """Return the pool of `pool_to_text`."""
    name, role, first_rank, num_ranks = text.split(":")
    return Pool(name, Role(role), int(first_rank), int(num_ranks))


def pool_of(pools: Sequence[Pool], rank: int) -> Pool:
    """Return the pool of a rank of the service."""
    return next(pool for pool in pools if rank in pool.ranks)


def _read_entry(entry: str) -> tuple[Role, int]:
    role, _, number = entry.partition(":")
    if role not in {each.value for each in Role} or not number.isdecimal() or int(number) < 1:
        raise OptionsError(
            f"invalid --pools entry {entry!r}: write ROLE:RANKS, with prefill, decode or both, such as prefill:1,decode:2"
        )
    return Role(role), int(number)
