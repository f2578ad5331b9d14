"""How long do streams stand still when a rank's engine is killed, and when it comes back? Is any of them lost?

`wideep serve` on several ranks with as many streams on each. One engine is killed with SIGKILL while all streams run:
those of the other ranks and those that are replayed elsewhere are timed apart, from the kill to the end of the longest
pause that follows. Then waves of streams go on until the rank is back, which gives the pause of a join. All texts are
compared with those of a run without a fault; one that differs or does not end fails the benchmark.

Expected bound: the kernel closes a dead process' connections at once (some ms), a step takes as long as before, new
groups some 10 ms, the experts that were lost are read from the page cache (1 s per GB), and what is replayed is
prefilled again. So: tenths of a second, and for replayed streams the time of a prefill more.

Run: `python -m benchmarks.faults [MODEL] [--ranks 3] [--streams 2] [--tokens 300] [--runs 6] [--save]`; streams are per
rank; MODEL defaults to the demo model.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.closed_loop import percentile
from benchmarks.live_streams import LiveStream, goes_on_after_s, longest_pause_s
from benchmarks.processes import command_of, tree
from benchmarks.prompts import Prompts
from benchmarks.service import HOST, Service, ServiceError
from moe.demo_model import ensure_demo_model
from server.front.tokenizer import Tokenizer
from server.process.supervisor import MAX_RESTARTS

PROMPT_TOKENS = 64
RETURN_TIMEOUT_S = 240.0  # of an engine that loads on a busy machine
BEGIN_S = 1.0  # after a kill: later pauses have another cause
JOIN_S = 3.0  # before the service was seen to be whole: the pause of the join is there
_POLL_S = 0.02
_RUNNING = "vllm:num_requests_running{"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.runs > MAX_RESTARTS * args.ranks:
        parser.error(
            f"--runs is {args.runs}; an engine is started again {MAX_RESTARTS} times: at most {MAX_RESTARTS * args.ranks} of {args.ranks} ranks"
        )
    card = environment_card()
    print_card(card)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a kill unwinds as Ctrl-C does
    try:
        rows = measure(args)
    except (ServiceError, OSError) as error:
        print(f"benchmarks.faults: {error}", file=sys.stderr)
        return 1
    summary = summarise_rows(rows)
    result = {"benchmark": "faults", "environment": card, "rows": rows, "summary": summary}
    print_summary(summary)
    if args.save:
        save_result("faults", result)
    print_tail(result)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", allow_abbrev=False)
    parser.add_argument("model", nargs="?", default="demo", help="a directory or 'demo' (default)")
    parser.add_argument("--ranks", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--streams", type=int, default=2, help="per rank (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=6, help="engines killed, in turn (default: %(default)s)")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/faults-<date>-<cpu>.json"
    )
    return parser


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill one engine after the other, each after the last one has come back."""
    tokenizer = Tokenizer(str(ensure_demo_model()) if args.model == "demo" else args.model)
    prompts = Prompts(lambda text: tokenizer.encode(text, add_special_tokens=False), PROMPT_TOKENS)
    flags = [f"--data-parallel-size={args.ranks}"]
    rows = []
    with (
        tempfile.NamedTemporaryFile(prefix="wideep_bench_") as log,
        Service(args.model, flags, log) as service,
    ):
        bench = _Bench(service, prompts.take(args.ranks * args.streams), args.tokens)
        asyncio.run(bench.keep_expected())
        for run in range(args.runs):
            rows.append({"run": run, **asyncio.run(bench.lose(run % args.ranks))})
            print(_line(rows[-1]), flush=True)
    return rows


class _Bench:
    """The streams of one service, and what they have to say."""

    def __init__(self, service: Service, prompts: list[list[int]], num_tokens: int) -> None:
        self._service, self._prompts, self._num_tokens = service, prompts, num_tokens
        self._expected: list[str] = []

    async def keep_expected(self) -> None:
        """Stream everything undisturbed."""
        streams = self._streams()
        await asyncio.gather(*(stream.read() for stream in streams))
        self._expected = [stream.text for stream in streams]

    async def lose(self, victim: int) -> dict[str, Any]:
        """Kill one rank's engine under streams and wait until it is back."""
        epoch = self._status()["epoch"]
        streams, ranks, tasks = await self._start()
        killed_s = time.perf_counter()
        os.kill(_engines(self._service)[victim], signal.SIGKILL)
        back = asyncio.create_task(self._wait_until_whole(epoch))
        await asyncio.gather(*tasks)
        self._check(streams)
        goes_on_s = [goes_on_after_s(each.arrivals_s, killed_s, killed_s + BEGIN_S) for each in streams]
        while not back.done():
            wave = self._streams()
            await asyncio.gather(*(stream.read() for stream in wave))
            self._check(wave)
            streams += wave
        whole_s = await back
        joins_s = [longest_pause_s(each.arrivals_s, whole_s - JOIN_S, whole_s) for each in streams]
        return {
            "victim": victim,
            "survivors_s": _known(
                time_s for time_s, rank in zip(goes_on_s, ranks, strict=True) if rank != victim
            ),
            "replayed_s": _known(
                time_s for time_s, rank in zip(goes_on_s, ranks, strict=True) if rank == victim
            ),
            "join_pauses_s": _known(joins_s),
            "back_s": round(whole_s - killed_s, 2),
        }

    async def _start(self) -> tuple[list[LiveStream], list[int], list[asyncio.Task[None]]]:
        """Start all streams one after the other, which tells the rank of each; all run at the end."""
        streams, before = self._streams(), Counter[int]()
        ranks: list[int] = []
        tasks: list[asyncio.Task[None]] = []
        for number, stream in enumerate(streams, start=1):
            tasks.append(asyncio.create_task(stream.read()))
            await stream.has_begun.wait()
            while (running := await asyncio.to_thread(self._running)).total() != number:
                if any(task.done() for task in tasks):
                    raise ServiceError("a stream ended before all had begun; give more --tokens")
                await asyncio.sleep(_POLL_S)
            ranks += (running - before).elements()
            before = running
        return streams, ranks, tasks

    def _streams(self) -> list[LiveStream]:
        return [LiveStream(self._service.port, prompt, self._num_tokens) for prompt in self._prompts]

    def _check(self, streams: Sequence[LiveStream]) -> None:
        for stream, expected in zip(streams, itertools.cycle(self._expected), strict=False):
            if stream.text != expected:
                raise ServiceError(f"a stream said {stream.text!r}; undisturbed it says {expected!r}")

    async def _wait_until_whole(self, epoch: int) -> float:
        """Return when the service was seen to have lost a rank since an epoch, and to have it back."""
        deadline_s = time.perf_counter() + RETURN_TIMEOUT_S
        while (now_s := time.perf_counter()) < deadline_s:
            status = await asyncio.to_thread(self._status)
            if status["epoch"] >= epoch + 2 and status["phase"] == "serving" and not status["missing"]:
                return now_s
            await asyncio.sleep(_POLL_S)
        raise ServiceError(f"the rank did not come back within {RETURN_TIMEOUT_S:g} s")

    def _status(self) -> dict[str, Any]:
        return dict(json.loads(self._get("/v1/fault_tolerance/status")))

    def _running(self) -> Counter[int]:
        """Return how many requests each rank runs."""
        lines = [line for line in self._get("/metrics").decode().splitlines() if line.startswith(_RUNNING)]
        return Counter(
            {
                int(line.partition('engine="')[2].partition('"')[0]): int(float(line.split()[-1]))
                for line in lines
            }
        )

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{HOST}:{self._service.port}{path}", timeout=30) as answer:
            return bytes(answer.read())


def _engines(service: Service) -> dict[int, int]:
    """Return the pids of a service's engines by rank."""
    found = {}
    for pid in tree(service.process.pid):
        if "engine" in command_of(pid):
            words = Path(f"/proc/{pid}/environ").read_text().split("\0")
            found[next(int(word.removeprefix("RANK=")) for word in words if word.startswith("RANK="))] = pid
    return found


def _known(times_s: Iterable[float | None]) -> list[float]:
    return [round(time_s, 3) for time_s in times_s if time_s is not None]


def summarise_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return median and largest of each kind of time, over all streams of all runs."""
    summary: dict[str, Any] = {"kills": len(rows), "lost": 0}  # a lost stream has ended the benchmark
    for kind in ("survivors_s", "replayed_s", "join_pauses_s"):
        times_s = [time_s for row in rows for time_s in row[kind]]
        summary[kind] = _spread(times_s)
    summary["back_s"] = _spread([row["back_s"] for row in rows])
    return summary


def _spread(times_s: Sequence[float]) -> dict[str, Any]:
    if not times_s:
        return {"streams": 0}
    return {"streams": len(times_s), "p50": round(percentile(times_s, 50), 3), "max": max(times_s)}


def print_summary(summary: dict[str, Any]) -> None:
    """Print one line per kind of time."""
    print(f"\n   {summary['kills']} engines killed, {summary['lost']} streams lost; seconds:")
    names = {
        "survivors_s": "streams of the other ranks go on after",
        "replayed_s": "streams of the killed rank go on after",
        "join_pauses_s": "streams stand still when the rank joins for",
        "back_s": "all ranks serve again after",
    }
    for kind, name in names.items():
        spread = summary[kind]
        if spread["streams"]:
            print(f"{name:>46}: p50 {spread['p50']:.2f}, max {spread['max']:.2f} (of {spread['streams']})")
    print(flush=True)


def _line(row: dict[str, Any]) -> str:
    times = (
        f"{kind.removesuffix('_s')} {row[kind]}" for kind in ("survivors_s", "replayed_s", "join_pauses_s")
    )
    return (
        f"   run {row['run']}, rank {row['victim']} killed: {', '.join(times)}, back after {row['back_s']} s"
    )


if __name__ == "__main__":
    sys.exit(main())
