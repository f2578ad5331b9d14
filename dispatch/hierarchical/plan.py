"""Who sends what in node-limited dispatch: the two stages as index arithmetic, in plain torch.

Ranks are numbered node by node: rank = node * node size + local index. A row goes once to every node that holds one of
its choices, to the rank of the sender's own local index there (stage one, "rail"); that rank hands it on to the ranks
of its node that hold a choice (stage two, "inner"). Both stages are the flat layout's `route`: the first over nodes of
node size * S slots, the second over the ranks of one node. Every order follows from the slots on both sides of an
exchange, so answers carry no metadata, and rows end up as in flat dispatch: by source rank, then token.

Nothing here knows a wire. Legend: T tokens, K choices, N rows, P pairs, S slots per rank, M nodes, H hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dispatch import layout


class Spread(NamedTuple):
    """How a rank hands the rows that reached its node on to the node's ranks."""

    route: (
        layout.Route
    )  # over the node's ranks; `token_N` indexes the rows, which lie by source node, then token
    source_counts: list[Tensor]  # per rank of the node, int64 [M]: rows it gets from each source node
    position_NK: Tensor  # int64: where the answer to each choice lies among all that come back; -1 for none
    node_pairs: list[int]  # answers that go to each source node


class Arrival(NamedTuple):
    """How the rows that a rank got from its node's ranks are ordered, and how its answers leave."""

    row_N: Tensor  # int64: the arrived row at each place of the final order
    pairs: layout.PairOrder  # over the final order
    pair_of_answer_P: Tensor  # int64: answers leave by forwarding rank, then row as it came, then choice
    answer_counts: list[int]  # answers for each rank of the node


def plan_spread(node_slots_NK: Tensor, node_rows: list[int], slots_per_rank: int, node_size: int) -> Spread:
    """Plan stage two at a forwarding rank.

    Args:
        node_slots_NK: int64, each row's choices as slots of this node, -1 elsewhere; rows by source node, then token.
        node_rows: rows from each source node.
        slots_per_rank: S.
        node_size: ranks of a node.
    """
    route = layout.route(node_slots_NK, slots_per_rank, node_size)
    node_N = torch.repeat_interleave(torch.arange(len(node_rows)), torch.tensor(node_rows))
    per_rank = torch.split(route.token_N, route.row_counts_R.tolist())
    counts = [torch.bincount(node_N[rows], minlength=len(node_rows)) for rows in per_rank]
    position_NK = layout.answer_positions(node_slots_NK, slots_per_rank)
    pairs_N = (node_slots_NK != layout.NO_CHOICE).sum(1)
    node_pairs = [int(part.sum()) for part in torch.split(pairs_N, node_rows)]
    return Spread(route, counts, position_NK, node_pairs)


def plan_arrival(local_slots_NK: Tensor, source_counts: list[Tensor], slots_per_rank: int) -> Arrival:
    """Order what arrived in stage two.

    Args:
        local_slots_NK: int64, rows by forwarding rank, then source node, then token; -1 for choices elsewhere.
        source_counts: per forwarding rank, int64 [M]: its rows of each source node.
        slots_per_rank: S.
    """
    nodes = torch.arange(len(source_counts[0]))
    node_N = torch.cat([torch.repeat_interleave(nodes, counts) for counts in source_counts])
    row_N = torch.argsort(
        node_N, stable=True
    )  # source rank = node * node size + forwarder: forwarders stay in order
    pairs = layout.order_pairs(local_slots_NK[row_N], slots_per_rank)
    final_NK = torch.full_like(local_slots_NK, layout.NO_CHOICE)
    final_NK[local_slots_NK[row_N] != layout.NO_CHOICE] = pairs.pair_of_answer
    arrived_NK = torch.empty_like(final_NK)
    arrived_NK[row_N] = final_NK
    has_choice_NK = local_slots_NK != layout.NO_CHOICE
    rows = [int(counts.sum()) for counts in source_counts]
    counts_of = [int(part.sum()) for part in torch.split(has_choice_NK, rows)]
    return Arrival(row_N, pairs, arrived_NK[has_choice_NK], counts_of)


def node_choices(slots_TK: Tensor, slots_per_node: int, num_nodes: int) -> Tensor:
    """Return int64 [T, M]: the node's own number where a token has a choice there, -1 elsewhere."""
    node_TK = torch.div(slots_TK, slots_per_node, rounding_mode="floor")
    nodes_M = torch.arange(num_nodes)
    has_choice_TM = (node_TK.unsqueeze(2) == nodes_M).any(1)
    return torch.where(has_choice_TM, nodes_M, layout.NO_CHOICE)
