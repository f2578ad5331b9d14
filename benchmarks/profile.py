"""Where does a decode step's time go?

Runs decode steps of a model directly (no HTTP, no scheduler) under Python's profiler and sums the own time of functions by
kind. The profiler adds some microseconds per call, so only shares are shown; the step time is measured without it.
Expected bound: bytes of active weights over memory bandwidth at batch 1, operations over rate at batch 32.

Run: `python -m benchmarks.profile [DIRECTORY] [--batch 1,16,32] [--threads 1] [--ranks 1] [--context 150] [--steps 10]
[--quantization int8]`. DIRECTORY defaults to the random model of `benchmarks.serve`. A batch is spread over all ranks; the
figures of the first rank are shown.
"""

import argparse
import cProfile
import multiprocessing
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.card import environment_card, print_card, print_tail
from benchmarks.models.random_model import ensure_random_model
from dispatch.mode import fitting_capacity
from dispatch.ports import free_port
from kvcache.paged_cache import BLOCK_TOKENS, PagedCache
from kvcache.states import StatePiece
from kvcache.step import Span
from scheduler.assembly import Assembled, assemble
from scheduler.policy.config import EngineConfig

KINDS = {  # a function belongs to the first kind with all words of a tuple in "file:function"
    "programs of kernels": (("dispatch/compiled/team.py", ":_run"), ("paged_cache.py", ":_write")),
    "dispatch and combine": (("dispatch/",), ("moe/cpu/program/spread_experts.py",)),
    "our Python around kernels": (("moe/",), ("attention/",), ("kvcache/",)),
    "transformers' Python": (("transformers/",),),
    "torch's small operations and modules": (("torch",), ("~",)),
}
_WARM_UPS = 5  # samples of the experts' inputs are taken outside programs


class NoDoorbell:
    """Doorbell of a single rank that never sleeps."""

    def ring(self, step: int) -> None:
        """Do nothing: there is no other rank."""

    def wait(self, step: int) -> None:
        """Do nothing: the rank never sleeps."""


def decode(
    built: Assembled, cache: PagedCache, batch: int, context: int, *, num_adapters: int = 0
) -> Callable[[], None]:
    """Return a function that runs one decode step of `batch` sequences with `context` tokens each.

    If the model keeps states, every sequence reads one of the cache's states and writes another. The sequences take the
    adapters at the first `num_adapters` places in turn.
    """
    blocks = -(-context // built.runner.step.block_tokens)
    has_states = built.runner.step.has_states
    spans = [
        Span(
            context - 1,
            1,
            range(row * blocks, (row + 1) * blocks),
            [StatePiece(2 * row, 2 * row + 1, 1)] if has_states else (),
            adapter=row % num_adapters if num_adapters else -1,
        )
        for row in range(batch)
    ]
    rows = torch.arange(batch)
    # Use different tokens: equal ones would be routed to the same experts.
    vocabulary, most = built.model.lm_head.shape[0], len(built.runner.step.token_T)
    tokens = torch.randint(vocabulary, (most,), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        step = built.runner.step
        step.fill(spans, batch, agreed_tokens=fitting_capacity(batch))
        built.model.forward(tokens[: step.num_padded], cache, rows)

    return run


def kind_of(file: str, function: str) -> str:
    """Return the kind of a profiled function."""
    name = f"{file}:{function}"
    for kind, alternatives in KINDS.items():
        if any(all(word in name for word in words) for words in alternatives):
            return kind
    return "the rest"


def shares(run: Callable[[], None], steps: int) -> dict[str, float]:
    """Return each kind's share of the profiled time."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        run()
    profiler.disable()
    own: dict[str, float] = {}
    for (file, _, function), row in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        kind = kind_of(file, function)
        own[kind] = own.get(kind, 0.0) + row[2]
    total = sum(own.values())
    return {kind: value / total for kind, value in sorted(own.items(), key=lambda item: -item[1])}


def main(arguments: list[str] | None = None) -> int:
    """Print a table per batch and one JSON line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile", description="Shares of a decode step's time."
    )
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--batch", default="1,16,32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=150)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args(arguments)
    options.batches = [int(text) for text in options.batch.split(",")]
    options.directory = options.directory or ensure_random_model()
    card = environment_card()
    print_card(card)
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    found: Any = spawn.SimpleQueue()
    others = [
        spawn.Process(target=_measure, args=(rank, options, port, found), daemon=True)
        for rank in range(1, options.ranks)
    ]
    for other in others:
        other.start()
    _measure(0, options, port, found)
    for other in others:
        other.join()
    results = found.get()
    print_tail({
        "environment": card, "model": options.directory.name, "threads": options.threads, "ranks": options.ranks,
        "batches": results,
    })  # fmt: skip
    return 0


def _measure(rank: int, options: argparse.Namespace, port: int, found: Any) -> None:
    """Run one rank's part. The first rank prints its figures and puts them into `found`."""
    if options.ranks > 1:
        place = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=options.ranks)
    config = EngineConfig(
        directory=options.directory,
        kv_cache_bytes=1 << 30,
        max_model_len=options.context + 1,
        max_num_seqs=max(options.batches),
        threads=options.threads,
        quantization=options.quantization,
        rank=rank,
        world_size=options.ranks,
    )
    built = assemble(config, NoDoorbell())
    cache = PagedCache(
        built.model.skeleton.cache_shapes,
        max(options.batches) * (options.context // BLOCK_TOKENS + 1),
        2 * max(options.batches),
    )
    results = {}
    for batch in options.batches:
        run = decode(built, cache, max(1, batch // options.ranks), options.context)
        for _ in range(_WARM_UPS):
            run()
        times = []
        for _ in range(options.steps):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        of_kinds = shares(run, options.steps)
        results[batch] = {"step_ms": statistics.median(times) * 1e3, "shares": of_kinds}
        if rank == 0:
            print(f"\nbatch {batch}: {results[batch]['step_ms']:.1f} ms per step")
            for kind, share in of_kinds.items():
                print(f"  {share:6.1%}  {kind}")
    if rank == 0:
        found.put(results)
    if options.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
