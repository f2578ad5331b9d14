"""Do separate pools keep streams smooth while long prompts arrive? Pools of prefill and decode against ranks that do both.

Two services run the same load on the same cores, in turn: one group of ranks, and pools of half as many ranks each. Streams with
short prompts run all the time. Meanwhile long prompts with short answers arrive at fixed intervals. Answers of both services are
compared first.

Expected bound: a mixed rank cuts prompts so that a step takes at most 2.2 times a plain one (`--target-itl-ms`), so its streams
get their tokens at that pace while prompts run. With pools, a step of the decoding ranks has no prompt, but on a CPU the ranks
share the memory's bandwidth. Half of the ranks compute prompts, so these take up to twice as long.

Run: `python -m benchmarks.kv.pools [--model demo] [--ranks 4] [--streams 8] [--prompt-tokens 1500] [--every 4] [--seconds 60]
[--rounds 2] [--save]`. The machine must be quiet. On two cores, the defaults take about ten minutes.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import IO, Any

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.serving.closed_loop import ExactPrompts
from benchmarks.serving.service import HOST, BenchServiceError, Service
from server.http.client import ServiceClient, ServiceError
from server.serve.preflight.model import PreflightError, resolve_model
from server.tools.bench.figures import percentile
from server.tools.bench.flags import positive, whole
from server.tools.bench.prompts import CheckpointTokenizer
from server.tools.bench.stream import STREAMED, StreamClient, StreamedAnswer

STREAM_PROMPT_TOKENS, STREAM_TOKENS = 24, 200
LONG_ANSWER_TOKENS = 16
COMPARED = 2  # answers to long prompts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status, which is 1 if a request failed or an answer differs."""
    args = _parser().parse_args(arguments)
    card = environment_card()
    print_card(card)
    try:
        result = {"benchmark": "pools", "environment": card, **measure(args)}
    except (BenchServiceError, PreflightError, ServiceError, OSError) as error:
        print(f"benchmarks.kv.pools: {error}", file=sys.stderr)
        return 1
    if args.save:
        save_result("pools", result)
    print_tail(result)
    return int(not result["equal_answers"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.pools", allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="demo", help="a directory or 'demo' (default)")
    add(
        "--ranks", type=whole, default=4, help="of each service; half of them per pool (default: %(default)s)"
    )
    add("--streams", type=whole, default=8, help="streams at once (default: %(default)s)")
    add("--prompt-tokens", type=whole, default=1500, help="of a long prompt (default: %(default)s)")
    add("--every", type=positive, default=4.0, help="seconds between long prompts (default: %(default)s)")
    add("--seconds", type=positive, default=60.0, help="of each run (default: %(default)s)")
    add("--rounds", type=whole, default=2, help="runs of each service (default: %(default)s)")
    add("--save", action="store_true", help="write benchmarks/results/pools-<date>-<cpu>.json")
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run both services in turn. Returns the result without the environment."""
    encode = CheckpointTokenizer(str(resolve_model(args.model))).encode
    half = max(1, args.ranks // 2)
    services = {
        "mixed": [f"-dp={2 * half}"],
        "pools": [f"--pools=prefill:{half},decode:{half}"],
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in services}
    answers: dict[str, list[list[int]]] = {}
    with tempfile.NamedTemporaryFile(prefix="wideep_bench_") as log:
        for number in range(args.rounds):
            for name, flags in services.items():
                # The same prompts for both services of a round, and others in the next round.
                long, short = (
                    ExactPrompts(encode, length) for length in (args.prompt_tokens, STREAM_PROMPT_TOKENS)
                )
                compared = long.take(COMPARED)
                long.take(100 * number)
                short.take(100 * number)
                row, found = _measure_service(args, flags, long, short, compared, log)
                runs[name].append(row)
                answers.setdefault(name, found)
                print(f"{name}: {row}", flush=True)
    return {
        "options": {name: value for name, value in vars(args).items() if name != "save"},
        "runs": runs,
        "equal_answers": answers["mixed"] == answers["pools"],
    }


def _measure_service(
    args: argparse.Namespace,
    flags: Sequence[str],
    long: ExactPrompts,
    short: ExactPrompts,
    compared: Sequence[list[int]],
    log: IO[bytes],
) -> tuple[dict[str, Any], list[list[int]]]:
    with Service(args.model, [*flags, "--disable-access-log"], log) as service:
        answers = [service.tokens(prompt, LONG_ANSWER_TOKENS) for prompt in compared]
        url = f"http://{HOST}:{service.port}"
        with ServiceClient(url) as connection:
            model = connection.served_model()
            load = _Load(StreamClient(url), model, long, short)
            asyncio.run(load.run(args.streams, args.every, args.seconds))
        return load.row(), answers


class _Load:
    """The requests of one run."""

    def __init__(self, client: StreamClient, model: str, long: ExactPrompts, short: ExactPrompts) -> None:
        self._client, self._model, self._long, self._short = client, model, long, short
        self._streams: list[StreamedAnswer] = []
        self._prompts: list[StreamedAnswer] = []
        self._until_s = 0.0

    async def run(self, num_streams: int, every_s: float, seconds: float) -> None:
        """Keep streams open, and send long prompts at intervals, until the time is up."""
        self._until_s = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_streams):
                tasks.create_task(self._keep_stream())
            while time.perf_counter() + every_s < self._until_s:
                await asyncio.sleep(every_s)
                tasks.create_task(self._send_long())
        self._client.close()

    async def _keep_stream(self) -> None:
        while time.perf_counter() < self._until_s:
            self._streams.append(await self._ask(self._short.take(1)[0], STREAM_TOKENS))

    async def _send_long(self) -> None:
        self._prompts.append(await self._ask(self._long.take(1)[0], LONG_ANSWER_TOKENS))

    async def _ask(self, prompt: list[int], num_tokens: int) -> StreamedAnswer:
        body = {"model": self._model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        answer = await self._client.ask("/v1/completions", {**body, "ignore_eos": True, **STREAMED})
        if answer.failure:
            raise BenchServiceError(f"a request failed: {answer.failure}")
        return answer

    def row(self) -> dict[str, Any]:
        """Return the figures of the run."""
        gaps_ms = [
            1e3 * (later - earlier)
            for answer in self._streams
            for earlier, later in pairwise(answer.arrivals_s)
        ]
        first_ms = [1e3 * (answer.first_s - answer.start_s) for answer in self._prompts]
        answers = [*self._streams, *self._prompts]
        wall_s = max(each.end_s for each in answers) - min(each.start_s for each in answers)
        tokens = sum(answer.output_tokens for answer in answers)
        return {
            "streams": len(self._streams),
            "long_prompts": len(self._prompts),
            **{f"itl_p{at}_ms": round(percentile(gaps_ms, at), 1) for at in (50, 90, 99)},
            **{f"long_ttft_p{at}_ms": round(percentile(first_ms, at), 1) for at in (50, 99)},
            "output_tokens_per_s": round(tokens / wall_s, 1),
            "num_gaps": len(gaps_ms),
        }


if __name__ == "__main__":
    sys.exit(main())
