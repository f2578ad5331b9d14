"""How long does a stream pause when its rank drains, and how many bytes does the move cost, with and without a tier in host memory?

`wideep serve` on two ranks. All streams have one session, so they run on one rank. It drains, and they move to the other rank,
which drains next, and so on: every stream moves at every drain. A stream's pause is its longest gap in the 50 ms before its rank is
reported empty, and is compared with all ordinary gaps. Streams that left in earlier steps than the last one count with a later gap.
So the longest gap of a stream from the drain on, until all have moved, is compared with its longest gap in an equally long time
before. Every answer is compared with the answer without drains.

Expected bound: without a tier, the new rank computes a stream's tokens again, one rank for all streams, so the pause grows with
the streams times their tokens. With a tier it loads their blocks, and the step in which both ranks know of the move waits for them,
at most 50 ms. Target: one step and 20 ms.

Run: `python -m benchmarks.kv.drain [MODEL] [--tier none] [--streams 1,4,8] [--prompt-tokens 128] [--tokens 600] [--rounds 10]
[--save]`. MODEL is a directory or `demo` (default).
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from prometheus_client.samples import Sample

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.serving.closed_loop import ExactPrompts
from benchmarks.serving.live_answers import LiveAnswer
from benchmarks.serving.service import HOST, BenchServiceError, Service, metric_samples
from server.front.tokenizer import Tokenizer
from server.http.client import ServiceClient
from server.serve.preflight.model import resolve_model
from server.tools.bench.figures import percentile

DRAIN_S = 120.0
_SETTLE_PIECES = 30  # of every stream between two drains, in ordinary steps
_BEGUN_PIECES = 10  # of every stream before the first drain
_POLL_S = 0.01
_NOTICED_S = 0.05  # within which a drain is reported
_TIERS = {"none": [], "host memory": ["--kv-offloading-size=1G"]}
_COUNTERS = ("wideep:request_moves_total", "vllm:kv_offload_load_bytes_total")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per service and number of streams; return the exit status, which is 1 if an answer changed."""
    args = _parser().parse_args(arguments)
    card = environment_card()
    print_card(card)
    model = resolve_model(args.model)
    tokenizer = Tokenizer(str(model))
    prompts = ExactPrompts(
        lambda text: tokenizer.encode(text, add_special_tokens=False), args.prompt_tokens
    ).take(max(args.streams))
    rows = []
    for tier in args.tier or _TIERS:
        flags = ["--data-parallel-size=2", "--disable-access-log", *_TIERS[tier]]
        with (
            tempfile.NamedTemporaryFile(prefix="wideep_bench_") as log,
            Service(str(model), flags, log) as service,
        ):
            for count in args.streams:
                row = asyncio.run(Drains(service.port, prompts[:count], args.tokens).measure(args.rounds))
                rows.append({"tier": tier, **row})
                _print_row(rows[-1])
    result = {"benchmark": "drain", "environment": card, "options": vars(args), "rows": rows}
    if args.save:
        save_result("drain", result)
    print_tail(result)
    return int(any(row["changed"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.drain", allow_abbrev=False)
    add = parser.add_argument
    add("model", nargs="?", default="demo", help="a directory or 'demo' (default)")
    add("--tier", action="append", choices=_TIERS, help="default: both, one after the other")
    add(
        "--streams",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[1, 4, 8],
        help="numbers of streams (default: 1,4,8)",
    )
    add("--prompt-tokens", type=int, default=128, help="default: %(default)s")
    add("--tokens", type=int, default=600, help="tokens of an answer (default: %(default)s)")
    add("--rounds", type=int, default=10, help="drains per number of streams (default: %(default)s)")
    add("--save", action="store_true", help="write benchmarks/results/drain-<date>-<cpu>.json")
    return parser


class Drains:
    """Streams of one session, and drains of the rank on which they run."""

    def __init__(self, port: int, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Send no request before `measure`."""
        self._port = port
        # A token without text has a piece too if pieces show the ids of tokens.
        body = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        self._bodies = [{**body, "prompt": list(prompt)} for prompt in prompts]

    def _streams(self) -> list[LiveAnswer]:
        return [
            LiveAnswer(port=self._port, body=body, is_streamed=True, session="all of them")
            for body in self._bodies
        ]

    async def measure(self, num_rounds: int) -> dict[str, Any]:
        """Return the figures of some drains under these streams.

        Raises:
            BenchServiceError: A rank kept requests, or a stream ended too early.
        """
        expected = await asyncio.gather(*(stream.read() for stream in self._streams()))
        streams, before = self._streams(), self._counters()
        running = [asyncio.create_task(stream.read()) for stream in streams]
        await _wait_until(partial(_have_pieces, streams, _BEGUN_PIECES), running)
        gaps_s, pauses_s, before_s, during_s = list[float](), list[float](), list[float](), list[float]()
        for _ in range(num_rounds):
            rank = await asyncio.to_thread(self._busy_rank)  # now, because reading metrics slows steps down
            begun_s = time.perf_counter()
            await _wait_until(
                partial(_have_pieces, streams, _fewest_pieces(streams) + _SETTLE_PIECES), running
            )
            drained_s = time.perf_counter()
            empty_s = await asyncio.to_thread(self._drain, rank)
            await _wait_until(partial(_have_received_after, streams, empty_s), running)
            ended_s = time.perf_counter()
            earlier_s = max(begun_s, drained_s - (ended_s - drained_s))
            for stream in streams:
                gaps_s += gaps_of(stream.arrivals_s, begun_s, drained_s)
                pauses_s.append(max(gaps_of(stream.arrivals_s, empty_s - _NOTICED_S, empty_s)))
                before_s.append(max(gaps_of(stream.arrivals_s, earlier_s, drained_s)))
                during_s.append(max(gaps_of(stream.arrivals_s, drained_s, ended_s)))
        answers = await asyncio.gather(*running)
        moved, loaded = (after - at for after, at in zip(self._counters(), before, strict=True))
        return {
            "streams": len(streams),
            "moves": int(moved),
            "changed": sum(said != wanted for said, wanted in zip(answers, expected, strict=True)),
            "gaps": _spread(gaps_s),
            "pauses": _spread(pauses_s),
            "longest_gaps_before": _spread(before_s),
            "longest_gaps_during": _spread(during_s),
            "loaded_bytes_per_move": round(loaded / moved) if moved else 0,
        }

    def _busy_rank(self) -> int:
        """Return the rank with the requests."""
        running = {each.labels["engine"]: each.value for each in self._samples("vllm:num_requests_running")}
        return int(max(running, key=lambda name: running[name]))

    def _drain(self, rank: int) -> float:
        """Drain the rank until it is empty, and let it take requests again. Returns when it was empty."""
        with self._client() as client:
            answer = client.post("/ranks/drain", {"rank": rank, "timeout_s": DRAIN_S}).json()
            empty_s = time.perf_counter()
            client.post("/ranks/drain", {"rank": rank, "undo": True})
        if left := answer["requests"]:
            raise BenchServiceError(f"rank {rank} still has {left} requests after {DRAIN_S:g} s")
        return empty_s

    def _counters(self) -> list[float]:
        """Return the sums of the counters over all labels."""
        return [sum(each.value for each in self._samples(name)) for name in _COUNTERS]

    def _samples(self, name: str) -> list[Sample]:
        with self._client() as client:
            return [sample for sample in metric_samples(client) if sample.name == name]

    def _client(self) -> ServiceClient:
        return ServiceClient(f"http://{HOST}:{self._port}", answer_timeout_s=2 * DRAIN_S)


def _fewest_pieces(streams: Sequence[LiveAnswer]) -> int:
    """Return how many pieces every stream has received."""
    return min(len(each.arrivals_s) for each in streams)


def _have_pieces(streams: Sequence[LiveAnswer], count: int) -> bool:
    return _fewest_pieces(streams) >= count


def _have_received_after(streams: Sequence[LiveAnswer], time_s: float) -> bool:
    return all(each.arrivals_s[-1] > time_s for each in streams)


async def _wait_until(is_so: Callable[[], bool], running: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until streams have reached a point.

    Raises:
        BenchServiceError: A stream has ended before.
    """
    while not is_so():
        if any(task.done() for task in running):
            raise BenchServiceError("a stream ended before the last drain; use more --tokens")
        await asyncio.sleep(_POLL_S)


def gaps_of(arrivals_s: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Return the gaps between pieces that overlap a period."""
    return [
        after_s - before_s
        for before_s, after_s in pairwise(arrivals_s)
        if after_s > begin_s and before_s < end_s
    ]


def _spread(times_s: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}_ms": round(1e3 * percentile(times_s, percent), 1) for percent in (50, 99)}


def _print_row(row: dict[str, Any]) -> None:
    gaps, pauses, before, during = (
        f"p50 {row[name]['p50_ms']} p99 {row[name]['p99_ms']}"
        for name in ("gaps", "pauses", "longest_gaps_before", "longest_gaps_during")
    )
    print(
        f"   tier {row['tier']}, {row['streams']:2} streams, ms: steps {gaps}; pauses {pauses} over {row['moves']} moves; "
        f"longest gaps before a drain {before}, during it {during}; {row['loaded_bytes_per_move']:,} bytes loaded per move; "
        f"{row['changed']} changed",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
