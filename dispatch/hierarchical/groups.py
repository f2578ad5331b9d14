"""Open a node-limited dispatcher from one group of ranks: its two wires, and the groups they meet in.

Ranks are numbered node by node, as torchrun does. Node size is a parameter and not asked of the hosts, so that nodes
can be smaller than a host (a test), or larger (racks whose links are as fast as a host's).
"""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from dispatch.errors import WireUnavailable
from dispatch.hierarchical.dispatcher import HierarchicalDispatcher
from dispatch.wires.choose import open_wire


def open_hierarchical(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    node_size: int,
    slots_per_rank: int,
    timeout_s: float = 30.0,
    epoch: int = 0,
    rows: str = "auto",
    reduce_in_node: bool = False,
) -> HierarchicalDispatcher:
    """Open node-limited dispatch over the ranks of `group`. Collective over the default group.

    Args:
        name: wire of both stages, as in `open_wire`; auto takes shared memory inside a host and what works
            across.
        group: a gloo group of consecutive nodes; None stands for one rank. Where a stage joins all its ranks (node
            size 1 or the group's), the stage uses the group itself.
        node_size: ranks of a node; divides the number of ranks. 1 and that number are flat dispatch.
        slots_per_rank, rows, reduce_in_node: see `HierarchicalDispatcher`; equal on all ranks.
        timeout_s, epoch: as in `open_wire`.

    Raises:
        ValueError: a bad node size, on every rank, also where ranks differ in what they ask for.
        WireUnavailable: a stage's wire cannot work here, or a peer did not come.
    """
    settings = {
        "node_size": node_size,
        "slots_per_rank": slots_per_rank,
        "rows": rows,
        "reduce_in_node": reduce_in_node,
    }
    _check_agreement(group, settings)
    world_size = 1 if group is None else dist.get_world_size(group)
    if node_size < 1 or world_size % node_size:
        allowed = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(f"node_size is {node_size} for {world_size} ranks; it must be one of {allowed}")
    rails = [range(local, world_size, node_size) for local in range(node_size)]
    nodes = [range(first, first + node_size) for first in range(0, world_size, node_size)]
    rail_group, inner_group = (_join(group, ranks, timeout_s) for ranks in (rails, nodes))
    made = [own for own in (rail_group, inner_group) if own is not None and own is not group]
    rail, inner = (
        open_wire(name, own, timeout_s=timeout_s, epoch=epoch) for own in (rail_group, inner_group)
    )

    def release() -> None:
        for own in made:
            dist.destroy_process_group(own)

    return HierarchicalDispatcher(
        rail,
        inner,
        slots_per_rank=slots_per_rank,
        rows=rows,
        reduce_in_node=reduce_in_node,
        release=release,
    )


def _check_agreement(group: dist.ProcessGroup | None, settings: dict[str, object]) -> None:
    if group is None:
        return
    everybody: list[dict[str, object]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everybody, settings, group=group)
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            raise ValueError(
                f"rank {rank} asks for {theirs} and rank 0 for {everybody[0]}; they must be equal"
            )


def _join(
    group: dist.ProcessGroup | None, sets: Sequence[range], timeout_s: float
) -> dist.ProcessGroup | None:
    """Make a group of each set, and return the one this rank is in; None stands for this rank alone."""
    if group is None or len(sets[0]) == 1:
        return None
    if len(sets) == 1:
        return group
    of_group, own = dist.get_process_group_ranks(group), None
    for ranks in sets:
        members = [of_group[rank] for rank in ranks]
        try:
            made = dist.new_group(members, timeout=timedelta(seconds=timeout_s), backend="gloo")
        except RuntimeError as error:  # all that gloo says of a peer that is gone
            raise WireUnavailable(f"ranks {list(ranks)} could not meet: {error}") from error
        if dist.get_rank(group) in ranks:
            own = made
    return own
