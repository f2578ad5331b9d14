"""Question: how long do streams pause while a service loads LoRA adapters?

`wideep serve` on two ranks with random weights. Streams of the base model decode all the time, while adapters of attention, router and
experts are loaded one after the other. A stream's pause is its longest gap from the first order until the last adapter is ready. Its
gaps before are those of ordinary steps. Answers of the base model must not change, and every adapter must answer.

Expected bound: adapters are read and checked next to the steps, within the budget of expert moves, so a gap grows by the share of
the cores that loading takes.

Run: `python -m benchmarks.adapter_loads [--adapters 8] [--rank 16] [--ranks 2] [--streams 8] [--prompt-tokens 64] [--tokens 4000] [--save]`.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.adapters import write_random_adapter
from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.random_model import config_of, ensure_random_model
from benchmarks.serving.live_answers import longest_pause_of_all_s, running_streams, wait_for_pieces_after
from benchmarks.serving.service import HOST, Service, greedy_tokens
from server.http.client import ServiceClient

_PROBE_TOKENS = 16
_USUAL_S = 2.0  # of streams without loads


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line; return the exit status, which is 1 if an answer changed."""
    args = _parser().parse_args(arguments)
    card = environment_card()
    print_card(card)
    with tempfile.TemporaryDirectory(prefix="wideep_bench_") as work:
        folders = [Path(work) / f"adapter{number}" for number in range(args.adapters)]
        for number, folder in enumerate(folders):
            write_random_adapter(folder, config_of("qwen3-moe"), number, rank=args.rank, is_dense=False)
        flags = [
            "--disable-access-log", f"--data-parallel-size={args.ranks}", "--enable-lora", f"--max-loras={args.adapters}",
            f"--max-lora-rank={args.rank}",
        ]  # fmt: skip
        with (
            (Path(work) / "log").open("wb") as log,
            Service(str(ensure_random_model()), flags, log) as service,
        ):
            row = asyncio.run(_Loads(service.port, folders, args).measure())
    print(
        f"{args.adapters} adapters: {row['seconds']:.2f} s in all, longest load {row['longest_load_s']:.2f} s; longest pause "
        f"{row['pause_s']:.3f} s, before {row['usual_s']:.3f} s; answers {'equal' if row['is_right'] else 'CHANGED'}"
    )
    result = {"benchmark": "adapter_loads", "environment": card, "options": vars(args), **row}
    if args.save:
        save_result("adapter_loads", result)
    print_tail(result)
    return int(not row["is_right"])


class _Loads:
    """Streams of a service, and loads of adapters."""

    def __init__(self, port: int, folders: Sequence[Path], args: argparse.Namespace) -> None:
        self._port, self._folders, self._args = port, folders, args
        self._probe = list(range(100, 100 + args.prompt_tokens))

    async def measure(self) -> dict[str, Any]:
        """Load the adapters while streams run."""
        before = await asyncio.to_thread(greedy_tokens, self._port, self._probe, _PROBE_TOKENS)
        async with running_streams(
            self._port, count=self._args.streams, prompt_tokens=self._args.prompt_tokens, num_tokens=self._args.tokens
        ) as streams:  # fmt: skip
            begun_s = time.perf_counter()
            await asyncio.sleep(_USUAL_S)
            ordered_s = time.perf_counter()
            load_s = [await asyncio.to_thread(self._load, folder) for folder in self._folders]
            ended_s = time.perf_counter()
            await wait_for_pieces_after(streams, ended_s)
            after = await asyncio.to_thread(greedy_tokens, self._port, self._probe, _PROBE_TOKENS)
            answered = [await asyncio.to_thread(self._answer, folder.name) for folder in self._folders]
        return {
            "seconds": ended_s - ordered_s,
            "longest_load_s": max(load_s),
            "pause_s": longest_pause_of_all_s(streams, ordered_s, ended_s),
            "usual_s": longest_pause_of_all_s(streams, begun_s, ordered_s),
            "is_right": before == after and all(count == _PROBE_TOKENS for count in answered),
        }

    def _load(self, folder: Path) -> float:
        begun_s = time.perf_counter()
        with ServiceClient(f"http://{HOST}:{self._port}") as service:
            service.post("/v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})
        return time.perf_counter() - begun_s

    def _answer(self, model: str) -> int:
        """Return the number of tokens of an adapter's answer."""
        body = {
            "model": model, "prompt": self._probe, "max_tokens": _PROBE_TOKENS, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        with ServiceClient(f"http://{HOST}:{self._port}") as service:
            return int(service.post("/v1/completions", body).json()["usage"]["completion_tokens"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--save", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
