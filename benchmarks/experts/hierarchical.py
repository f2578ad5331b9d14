"""How many bytes cross nodes in node-limited dispatch, compared with flat dispatch of the same tokens?

Bound: flat dispatch sends a token once to every rank that holds one of its K experts, node-limited dispatch once to every
node. With DeepSeek-V3's routing (256 experts in 8 groups, the best 4 groups by the sum of their two best scores, the best 8
experts in these) a token reaches at most 4 nodes if every node holds at least one group, but up to 8 ranks. Answers return
once per choice in both cases, so combine saves nothing.

    python -m benchmarks.experts.hierarchical [--shapes 2x2 4x2 8x2] [--tokens 128] [--hidden 512] [--save]

Bytes are counted on every rank as they are passed to a wire for ranks of other nodes, headers included. Results of flat and
node-limited exchanges are first compared bit for bit. Rows are bfloat16. All ranks run on this host. The last rows are
computed from the same routing, without ranks and headers, for the sizes at which DeepSeek-V3 is served.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.card import environment_card, print_card, print_tail, save_result
from dispatch import layout
from dispatch.dispatcher import Dispatcher, Traffic
from dispatch.hierarchical import HierarchicalDispatcher, open_hierarchical
from dispatch.wires.open import open_wire
from dispatch.wires.wire import RankTable, Wire
from tests.support.ranks import RankPool

EXPERTS, GROUPS, TOP_GROUPS, CHOICES = 256, 8, 4, 8  # DeepSeek-V3, arXiv 2412.19437, section 4.2
SERVED = ((8, 8, 7168), (4, 8, 7168), (16, 8, 7168))  # nodes, ranks of a node, hidden


class Crossing(NamedTuple):
    """Bytes of one layer from this rank to other nodes."""

    dispatch: int
    combine: int


def choose_experts(tokens: int, seed: int, *, is_grouped: bool) -> Tensor:
    """Draw random scores. Return int64 [T, CHOICES] by DeepSeek-V3's rule, or the best of all experts."""
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(tokens, EXPERTS, generator=generator)
    if is_grouped:
        by_group = scores_TE.view(tokens, GROUPS, -1)
        best_TG = by_group.topk(2, dim=2).values.sum(2).topk(TOP_GROUPS, dim=1).indices
        is_in = torch.zeros(tokens, GROUPS, dtype=torch.bool).scatter_(1, best_TG, True)
        scores_TE = (by_group * is_in.unsqueeze(2)).view(tokens, EXPERTS)
    return scores_TE.topk(CHOICES, dim=1).indices


class CountingWire:
    """Wrapper of a wire that counts the bytes for other nodes."""

    def __init__(self, wire: Wire, node_size: int) -> None:
        self._wire = wire
        node = wire.rank // node_size
        self._elsewhere = [peer for peer in range(wire.world_size) if peer // node_size != node]
        self.counts: list[int] = []  # one per exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)

    def open_windows(self, send_bytes: RankTable) -> None:
        self.counts.append(sum(int(send_bytes.values[peer]) for peer in self._elsewhere))
        self._wire.open_windows(send_bytes)


def count_crossing(
    nodes: int, node_size: int, tokens: int, hidden: int, is_grouped: bool
) -> dict[str, Crossing]:
    """Run one layer with each dispatch on this rank. Collective."""
    rank, S = dist.get_rank(), EXPERTS // (nodes * node_size)
    slots_TK = choose_experts(tokens, rank, is_grouped=is_grouped)
    generator = torch.Generator().manual_seed(rank)
    x_TH = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    weights_TK = torch.rand(tokens, CHOICES, generator=generator)

    def layer(dispatcher: Dispatcher | HierarchicalDispatcher) -> tuple[Tensor, Tensor]:
        sent = dispatcher.dispatch(x_TH, slots_TK)
        y_PH = sent.x_NH[sent.row_P]
        return sent.x_NH.clone(), dispatcher.combine(y_PH, weights_TK, sent)

    counting = CountingWire(open_wire("auto", dist.group.WORLD), node_size)
    flat = Dispatcher(counting, slots_per_rank=S)
    want = layer(flat)
    flat.close()
    counts = {"flat": Crossing(*counting.counts)}
    dispatcher = open_hierarchical("auto", dist.group.WORLD, node_size=node_size, slots_per_rank=S)
    got = layer(dispatcher)
    assert torch.equal(got[0], want[0]), "rows differ from flat dispatch"
    assert torch.equal(got[1], want[1]), "sums differ from flat dispatch"
    crossing: Traffic = dispatcher.crossing
    dispatcher.close()
    return counts | {"nodes": Crossing(crossing.dispatch_bytes, crossing.combine_bytes)}


def compute_crossing(
    nodes: int, node_size: int, tokens: int, hidden: int, is_grouped: bool
) -> dict[str, Crossing]:
    """Return the bytes of rows and answers that cross nodes, from rank 0, without headers and choices."""
    slots_TK = choose_experts(tokens, 0, is_grouped=is_grouped)
    row_bytes, S = 2 * hidden, EXPERTS // (nodes * node_size)
    ranks = layout.route(slots_TK, S, nodes * node_size)
    over = layout.route(slots_TK, S * node_size, nodes)
    rows, node_rows = (
        int(counts.sum()) for counts in (ranks.row_counts_R[node_size:], over.row_counts_R[1:])
    )
    answers = int(over.pair_counts_R[1:].sum())
    return {
        "flat": Crossing(rows * row_bytes, answers * row_bytes),
        "nodes": Crossing(node_rows * row_bytes, answers * row_bytes),
    }


def describe(
    nodes: int, node_size: int, routing: str, source: str, counts: dict[str, Crossing]
) -> dict[str, Any]:
    """Build a row of the result and print it."""
    flat = counts["flat"]
    saved = {
        name: {
            step: round(1 - getattr(way, step) / max(1, getattr(flat, step)), 4) for step in Crossing._fields
        }
        for name, way in counts.items()
        if name != "flat"
    }
    shown = "; ".join(
        f"{name}: dispatch {way.dispatch / 1e6:.3f} MB, combine {way.combine / 1e6:.3f} MB"
        + ("" if name == "flat" else f" (saved {saved[name]['dispatch']:.1%}, {saved[name]['combine']:.1%})")
        for name, way in counts.items()
    )
    print(f"{nodes:2d} nodes x {node_size} ranks, {routing:>11} routing, {source:>8}: {shown}", flush=True)
    ways = {name: way._asdict() for name, way in counts.items()}
    return {
        "nodes": nodes, "node_size": node_size, "routing": routing, "source": source,
        "bytes": ways, "saved": saved,
    }  # fmt: skip


def add(per_rank: list[dict[str, Crossing]]) -> dict[str, Crossing]:
    """Add up the bytes of all ranks."""
    return {
        name: Crossing(*(sum(column) for column in zip(*(counts[name] for counts in per_rank), strict=True)))
        for name in per_rank[0]
    }


def measure_shape(nodes: int, node_size: int, tokens: int, hidden: int) -> list[dict[str, Any]]:
    """Count a shape's bytes with both routings, on real ranks."""
    rows = []
    with RankPool(nodes * node_size, timeout_s=300) as pool:
        for routing, is_grouped in (("grouped", True), ("free", False)):
            counts = add(pool.run(count_crossing, nodes, node_size, tokens, hidden, is_grouped))
            rows.append(describe(nodes, node_size, routing, "counted", counts))
    return rows


def parse_shape(text: str) -> tuple[int, int]:
    """Parse "8x2": nodes and ranks per node. The number of ranks must divide the experts."""
    nodes, node_size = (int(part) for part in text.split("x"))
    if nodes * node_size < 1 or EXPERTS % (nodes * node_size):
        raise argparse.ArgumentTypeError(
            f"{text} is {nodes * node_size} ranks; they must divide {EXPERTS} experts"
        )
    return nodes, node_size


def main() -> None:
    """Count every shape and print the table."""
    shape: Callable[[str], tuple[int, int]] = parse_shape
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=shape, nargs="+", default=[(2, 2), (4, 2), (8, 2)])
    parser.add_argument("--tokens", type=int, default=128, help="per rank")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results/")
    args = parser.parse_args()
    card = environment_card()
    print_card(card)
    rows = []
    for nodes, node_size in args.shapes:
        rows += measure_shape(nodes, node_size, args.tokens, args.hidden)
    for nodes, node_size, hidden in SERVED:
        for routing, is_grouped in (("grouped", True), ("free", False)):
            counts = compute_crossing(nodes, node_size, 4096, hidden, is_grouped)
            rows.append(describe(nodes, node_size, routing, "computed", counts))
    result = {
        "benchmark": "hierarchical", "environment": card, "tokens": args.tokens, "hidden": args.hidden, "rows": rows,
    }  # fmt: skip
    if args.save:
        print(f"saved {save_result('hierarchical', result).name}")
    print_tail(result)


if __name__ == "__main__":
    main()
