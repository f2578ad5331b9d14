"""What does one dispatch plus one combine cost between ranks of this host, against the plainest exchange of its bytes?

Bound: every byte for another rank is written once and read once, so a layer cannot take less than its bytes over the
memory bandwidth of a core, plus two meetings of all ranks; `all_to_all_single` over gloo with the same bytes (and
sizes known beforehand, which a dispatch has not) is the peer. Ranks exchange float32 rows, experts are the identity.

    python -m benchmarks.dispatch [--ranks 2 4] [--tokens 1 8 32 128 512] [--runs 200]

Transports take turns within every block of runs, so that noise of the machine meets all of them. Figures are the
median and the 99th percentile over all runs of rank 0. The last line is one JSON object.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from dispatch import layout
from dispatch.dispatcher import Dispatcher
from dispatch.transports.choose import open_transport
from tests.support.ranks import RankPool

HIDDEN, CHOICES, SLOTS_PER_RANK = 512, 4, 16
BLOCK, WARM_UP = 20, 20


def measure(tokens: int, runs: int) -> dict[str, list[float]]:
    """Time each way on this rank. Returns the seconds of every run by name. Collective."""
    group = dist.group.WORLD
    assert group is not None, "a rank has a group"
    generator = torch.Generator().manual_seed(dist.get_rank())
    num_slots = group.size() * SLOTS_PER_RANK
    x_TH = torch.randn(tokens, HIDDEN, generator=generator)
    slots_TK = torch.stack([torch.randperm(num_slots, generator=generator)[:CHOICES] for _ in range(tokens)])
    weights_TK = torch.rand(tokens, CHOICES, generator=generator)
    dispatchers = {
        name: Dispatcher(open_transport(name, group), slots_per_rank=SLOTS_PER_RANK)
        for name in ("shm", "gloo")
    }
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        name: lambda d=dispatcher: time_layer(d, x_TH, slots_TK, weights_TK)  # type: ignore[misc]
        for name, dispatcher in dispatchers.items()
    }
    for dispatcher in dispatchers.values():
        check_layer(dispatcher, x_TH, slots_TK, weights_TK)
    ways["all_to_all_single"] = plain_exchange(slots_TK, group)
    seconds: dict[str, list[float]] = {
        f"{name} {step}": [] for name in ways for step in ("dispatch", "combine")
    }
    for block in range((runs + BLOCK - 1) // BLOCK + WARM_UP // BLOCK):
        for name, way in ways.items():
            for _ in range(BLOCK):
                dispatch_s, combine_s = way()
                if block >= WARM_UP // BLOCK:
                    seconds[f"{name} dispatch"].append(dispatch_s)
                    seconds[f"{name} combine"].append(combine_s)
    for dispatcher in dispatchers.values():
        dispatcher.close()
    return seconds


def time_layer(
    dispatcher: Dispatcher, x_TH: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor
) -> tuple[float, float]:
    """Return the seconds of one dispatch and of one combine; the experts' share is left out."""
    begin = time.perf_counter()
    dispatched = dispatcher.dispatch(x_TH, slots_TK)
    middle = time.perf_counter()
    y_PH = dispatched.x_NH[dispatched.row_P]
    resumed = time.perf_counter()
    dispatcher.combine(y_PH, weights_TK, dispatched)
    return middle - begin, time.perf_counter() - resumed


def check_layer(
    dispatcher: Dispatcher, x_TH: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor
) -> None:
    """Compare with the sum that needs no exchange, bit for bit."""
    dispatched = dispatcher.dispatch(x_TH, slots_TK)
    combined = dispatcher.combine(dispatched.x_NH[dispatched.row_P], weights_TK, dispatched)
    token_TK = torch.arange(x_TH.shape[0]).unsqueeze(1).expand_as(slots_TK)
    want = layout.sum_answers(x_TH, token_TK, weights_TK, x_TH.dtype)
    assert torch.equal(combined, want), f"{dispatcher.transport.name} gives wrong sums"


def plain_exchange(slots_TK: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], tuple[float, float]]:
    """Return a function that times all_to_all_single with the bytes of the dispatch, then of the combine."""
    route = layout.route(slots_TK, SLOTS_PER_RANK, group.size())
    sends = [counts.clone().index_fill_(0, torch.tensor(dist.get_rank()), 0) for counts in route[2:]]
    receives = [torch.empty_like(counts) for counts in sends]
    for sent, received in zip(sends, receives, strict=True):
        dist.all_to_all_single(received, sent, group=group)
    receives[1], sends[1] = sends[1], receives[1]  # answers go the other way
    splits = [(sent.tolist(), received.tolist()) for sent, received in zip(sends, receives, strict=True)]
    buffers = [(torch.zeros(sum(s), HIDDEN), torch.zeros(sum(r), HIDDEN)) for s, r in splits]

    def exchange(index: int) -> float:
        (sent, received), (outgoing, incoming) = splits[index], buffers[index]
        begin = time.perf_counter()
        dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
        return time.perf_counter() - begin

    return lambda: (exchange(0), exchange(1))


def summarise(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    return {
        "p50_us": round(float(np.median(seconds)) * 1e6, 1),
        "p99_us": round(float(np.quantile(seconds, 0.99)) * 1e6, 1),
    }


def main() -> None:
    """Run every size on every number of ranks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--runs", type=int, default=200)
    args = parser.parse_args()
    card = {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(f"environment {card}; hidden {HIDDEN}, top-{CHOICES}, float32; warm-up {WARM_UP}, runs {args.runs}")
    rows = []
    for ranks in args.ranks:
        with RankPool(ranks, timeout_s=600) as pool:
            for tokens in args.tokens:
                seconds = pool.run(measure, tokens, args.runs)[0]
                row = {
                    "ranks": ranks,
                    "tokens": tokens,
                    **{name: summarise(s) for name, s in seconds.items()},
                }
                rows.append(row)
                shown = "  ".join(
                    f"{n} {v['p50_us']:.0f}/{v['p99_us']:.0f}" for n, v in row.items() if isinstance(v, dict)
                )
                print(f"{ranks} ranks, {tokens:3d} tokens, us p50/p99: {shown}", flush=True)
    print(json.dumps({"benchmark": "dispatch", "environment": card, "runs": args.runs, "rows": rows}))


if __name__ == "__main__":
    main()
