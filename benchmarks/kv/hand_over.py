"""How much of the transfer of a prompt's state is not hidden behind the prompt when a prefill rank hands a request over?

Two services run the same prompts, one at a time: one rank, and a prefill rank with a decode rank. The time between the first and
the second token has everything that a hand-over adds. A plain rank's time is subtracted, and the rest is compared with the time of
all copies (`vllm:kv_offload_store_time_total` and `vllm:kv_offload_load_time_total`) and with the time to the first token.
Prompts have whole blocks, so the decode rank computes no prompt token again. Answers of both services are compared.

Expected bound: blocks are saved while the prompt runs, so the end of the last save, the front's messages and the load are
not hidden. A load copies and sums each byte once (`benchmarks.kv.transfer`). Target: under 5 % of the transfer at 2,048 tokens.

Run: `python -m benchmarks.kv.hand_over [MODEL] [--prompt-tokens 256,1024,2048] [--rounds 9] [--save]`. MODEL is a directory or
`demo` (default).
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.serving.closed_loop import ExactPrompts
from benchmarks.serving.live_answers import LiveAnswer, Said
from benchmarks.serving.service import HOST, BenchServiceError, Service, metric_samples
from server.front.tokenizer import Tokenizer
from server.http.client import ServiceClient
from server.serve.preflight.model import resolve_model

SERVICES = {"plain": ["-dp=1"], "pools": ["--pools=prefill:1,decode:1", "--kv-offloading-size=1G"]}
_ANSWER_TOKENS = 12
_SETTLE_S = 0.5  # for copies that still run, and for the ranks' next figures
_COPIES = ("vllm:kv_offload_store_time_total", "vllm:kv_offload_load_time_total")


class Observed(NamedTuple):
    """What one service did with the prompts of one length."""

    first_s: float  # median time to the first token
    second_s: float  # median time from the first to the second token
    copies_s: float  # mean time of all copies of a request
    answers: list[Said]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per length; return the exit status, which is 1 if an answer differs."""
    args = _parser().parse_args(arguments)
    card = environment_card()
    print_card(card)
    model = resolve_model(args.model)
    observed: dict[str, list[Observed]] = {}
    with tempfile.NamedTemporaryFile(prefix="wideep_bench_") as log:
        for name, flags in SERVICES.items():
            observed[name] = _observe(str(model), flags, args, log)
    rows = [
        {"prompt_tokens": length, **row_of(plain, pools)}
        for length, plain, pools in zip(args.prompt_tokens, observed["plain"], observed["pools"], strict=True)
    ]
    for row in rows:
        print(row, flush=True)
    result = {"benchmark": "hand_over", "environment": card, "options": vars(args), "rows": rows}
    if args.save:
        save_result("hand-over", result)
    print_tail(result)
    return int(any(row["changed"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.hand_over", allow_abbrev=False)
    add = parser.add_argument
    add("model", nargs="?", default="demo", help="a directory or 'demo' (default)")
    add(
        "--prompt-tokens",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[256, 1024, 2048],
        help="lengths of prompts, multiples of 16 (default: 256,1024,2048)",
    )
    add("--rounds", type=int, default=9, help="prompts per length (default: %(default)s)")
    add("--save", action="store_true", help="write benchmarks/results/hand-over-<date>-<cpu>.json")
    return parser


def row_of(plain: Observed, pools: Observed) -> dict[str, Any]:
    """Return the figures of one length."""
    exposed_s = max(0.0, pools.second_s - plain.second_s)
    return {
        "ttft_ms": round(1e3 * pools.first_s, 1),
        "plain_ttft_ms": round(1e3 * plain.first_s, 1),
        "second_token_ms": round(1e3 * pools.second_s, 1),
        "plain_second_token_ms": round(1e3 * plain.second_s, 1),
        "exposed_ms": round(1e3 * exposed_s, 1),
        "copies_ms": round(1e3 * pools.copies_s, 1),
        "exposed_share_of_copies": round(exposed_s / pools.copies_s, 4) if pools.copies_s else None,
        "exposed_share_of_ttft": round(exposed_s / pools.first_s, 4),
        "changed": sum(ours != theirs for ours, theirs in zip(plain.answers, pools.answers, strict=True)),
    }


def _observe(model: str, flags: Sequence[str], args: argparse.Namespace, log: IO[bytes]) -> list[Observed]:
    """Run the prompts of all lengths on a service. Every service gets the same ones."""
    tokenizer = Tokenizer(model)
    length = max(args.prompt_tokens) + _ANSWER_TOKENS + 16
    with Service(model, [*flags, f"--max-model-len={length}", "--disable-access-log"], log) as service:
        found = []
        for num_tokens in args.prompt_tokens:
            prompts = ExactPrompts(
                lambda text: tokenizer.encode(text, add_special_tokens=False), num_tokens
            ).take(args.rounds + 1)
            found.append(asyncio.run(_observe_length(service.port, prompts)))
        return found


async def _observe_length(port: int, prompts: Sequence[Sequence[int]]) -> Observed:
    """Run prompts one after the other. The first one is a warm-up.

    Raises:
        BenchServiceError: A stream brought its tokens in one piece.
    """
    body = {"max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    first_s, second_s, answers = list[float](), list[float](), list[Said]()
    before_s = 0.0
    for number, prompt in enumerate(prompts):
        if number == 1:
            before_s = _copies_s(port)
        answer = LiveAnswer(port=port, body={**body, "prompt": list(prompt)}, is_streamed=True)
        answers.append(await answer.read())
        if len(answer.arrivals_s) < 2 or answer.first_wait_s is None:
            raise BenchServiceError("a stream brought all tokens in one piece")
        if number:
            first_s.append(answer.first_wait_s)
            second_s.append(answer.arrivals_s[1] - answer.arrivals_s[0])
    copies_s = (_copies_s(port) - before_s) / max(1, len(prompts) - 1)
    return Observed(statistics.median(first_s), statistics.median(second_s), copies_s, answers)


def _copies_s(port: int) -> float:
    """Return the seconds that all copies have taken so far."""
    time.sleep(_SETTLE_S)
    with ServiceClient(f"http://{HOST}:{port}") as client:
        return float(sum(each.value for each in metric_samples(client) if each.name in _COPIES))


if __name__ == "__main__":
    sys.exit(main())
