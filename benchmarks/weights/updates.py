"""How long do streams pause, and how long does it take, to replace the weights of a service under load?

`wideep serve` on two ranks with random weights of a size. Streams decode all the time. The weights are replaced from a folder again
and again, alternating between two versions. A stream's pause is its longest gap from the order to load until the switch has ended;
its gaps before are those of ordinary steps. Answers after each update are compared with those of the same version before.

Expected bound: ranks load next to the steps, so a step's gap grows by the share of the cores that loading takes. The switch itself
exchanges references; on a GPU it copies the weights within the GPU's memory. Every stream computes its tokens again: streams
times their tokens over the rate of prompts. On a CPU most of this comes before the switch, in chunks between steps, and counts in the
switch's time. Target: a pause of 0.5 s for 2 GB.

Run: `python -m benchmarks.weights.updates [--device cpu] [--ranks 2] [--gigabytes 2] [--streams 8] [--prompt-tokens 64]
[--tokens 4000] [--rounds 3] [--save]`.
"""

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.random_model import config_of, ensure_random_model, spread
from benchmarks.serving.live_answers import (
    LiveAnswer,
    longest_pause_of_all_s,
    running_streams,
    wait_for_pieces_after,
)
from benchmarks.serving.service import HOST, Service, greedy_tokens
from server.http.client import ServiceClient

_PROBE_TOKENS = 16
_BFLOAT16_BYTES = 2
_FLAGS = {
    "cpu": ["--disable-access-log"],
    # Answers can only be compared if no bit depends on the streams. The KV cache leaves room for the second copy.
    "cuda": ["--disable-access-log", "--device=cuda", "--batch-invariant", "--kv-cache-memory=2G"],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per update; return the exit status, which is 1 if an answer is wrong."""
    args = _parser().parse_args(arguments)
    card = environment_card()
    print_card(card)
    with tempfile.TemporaryDirectory(prefix="wideep_bench_", dir=args.directory) as work:
        folders = write_models(Path(work), args.gigabytes)
        with (
            (Path(work) / "log").open("wb") as log,
            Service(
                str(folders[0]), [*_FLAGS[args.device], f"--data-parallel-size={args.ranks}"], log
            ) as service,
        ):
            rows = asyncio.run(Updates(service.port, folders, args).measure())
    for row in rows:
        print(
            f"update {row['number']}: {row['seconds']:6.2f} s in all, load {row['load_s']:.2f} s, switch {row['switch_s']:.3f} s; "
            f"longest pause {row['pause_s']:.3f} s, before {row['usual_s']:.3f} s; answers {'equal' if row['is_right'] else 'CHANGED'}"
        )
    result = {
        "benchmark": "weight_updates",
        "environment": card,
        "options": vars(args),
        "bytes": sum(file.stat().st_size for file in folders[0].glob("*.safetensors")),
        "pause_s": statistics.median(row["pause_s"] for row in rows),
        "seconds": statistics.median(row["seconds"] for row in rows),
        "rows": rows,
    }
    if args.save:
        save_result("weight_updates", result)
    print_tail(result)
    return int(not all(row["is_right"] for row in rows))


def write_models(work: Path, gigabytes: float) -> list[Path]:
    """Write two checkpoints of about this size in bfloat16, with other weights and one configuration."""
    source, like = ensure_random_model(), config_of("qwen3-moe")
    expert_bytes = 3 * like.hidden_size * like.moe_intermediate_size * _BFLOAT16_BYTES
    num_experts = max(like.num_experts, int(gigabytes * 1e9 / (like.num_hidden_layers * expert_bytes)))
    made = []
    for seed in range(2):
        folder = work / f"version{seed}"
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
        config = config_of("qwen3-moe", num_experts=num_experts)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if parameter.dim() == 1:  # gains of norms
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(std=spread(name, parameter.shape[-1]), generator=generator)
        model.save_pretrained(folder, max_shard_size="500MB")
        made.append(folder)
    return made


class Updates:
    """Streams of a service, and updates of its weights."""

    def __init__(self, port: int, folders: Sequence[Path], args: argparse.Namespace) -> None:
        self._port, self._folders, self._args = port, folders, args
        self._probe = list(range(100, 100 + args.prompt_tokens))
        self._known: dict[int, list[int]] = {}  # the probe's answer, by version

    async def measure(self) -> list[dict[str, Any]]:
        """Update the weights in turn while streams run. Returns a row per update."""
        self._known[0] = await asyncio.to_thread(greedy_tokens, self._port, self._probe, _PROBE_TOKENS)
        async with running_streams(
            self._port, count=self._args.streams, prompt_tokens=self._args.prompt_tokens, num_tokens=self._args.tokens
        ) as streams:  # fmt: skip
            return [await self._update(number, streams) for number in range(1, self._args.rounds + 1)]

    async def _update(self, number: int, streams: Sequence[LiveAnswer]) -> dict[str, Any]:
        begun_s = time.perf_counter()
        await asyncio.sleep(1.0)
        usual_s = longest_pause_of_all_s(streams, begun_s, time.perf_counter())
        ordered_s = time.perf_counter()
        info = await asyncio.to_thread(self._replace, self._folders[number % 2])
        ended_s = time.perf_counter()
        await wait_for_pieces_after(streams, ended_s)
        pause_s = longest_pause_of_all_s(streams, ordered_s, time.perf_counter())
        tokens = await asyncio.to_thread(greedy_tokens, self._port, self._probe, _PROBE_TOKENS)
        return {
            "number": number,
            "seconds": ended_s - ordered_s,
            "load_s": info["load_seconds"],
            "switch_s": info["switch_seconds"],
            "pause_s": pause_s,
            "usual_s": usual_s,
            "is_right": self._known.setdefault(number % 2, tokens) == tokens,
        }

    def _replace(self, folder: Path) -> dict[str, Any]:
        with ServiceClient(f"http://{HOST}:{self._port}") as service:
            service.post("/start_weight_update", {})
            service.post("/update_weights", {"path": str(folder)})
            info: dict[str, Any] = service.post("/finish_weight_update", {}).json()
        return info


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=_FLAGS, default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where to write the checkpoints")
    parser.add_argument("--save", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
