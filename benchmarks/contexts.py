"""How much time does a long context add to a decode step, and how much do snapshots save? Compared with `transformers`' generate.

One rank decodes with random models: Qwen3-Next's shape with attention in all layers and with attention in one of four layers
(the others are recurrent), DeepSeek-V3's latents, and V3.2's latents with an index of 512 tokens. Then prompts of one of 8 shared
beginnings and a unique end run one by one, with and without snapshots, for the time to the first token.

Expected bound: recurrent layers and chosen tokens cost the same at any context; attention grows with it, an index only by its keys.

Run: `python -m benchmarks.contexts [--contexts 128,1024,4096,8192] [--threads 2] [--save]`.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.random_model import ensure_random_model
from benchmarks.profile import NoDoorbell, decode
from kvcache.paged_cache import BLOCK_TOKENS, PagedCache
from scheduler.assembly import Assembled, assemble
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import Request, SamplingParams

SHAPES = ("qwen3-next-attention", "qwen3-next", "deepseek-v3", "deepseek-v3.2")
PEER_SHAPE, PEER_TOKENS = "qwen3-next", 32
_WARM_UPS, _STEPS = 5, 15
_SHARED, _SHARED_TOKENS, _OWN_TOKENS, _ROUNDS = 8, 1024, 64, 3


def main(arguments: list[str] | None = None) -> int:
    """Print tables and one JSON line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.contexts",
        description="The cost of a long context, and the savings from snapshots.",
    )
    parser.add_argument("--contexts", default="128,1024,4096,8192")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/contexts-<date>-<cpu>.json"
    )
    options = parser.parse_args(arguments)
    contexts = [int(text) for text in options.contexts.split(",")]
    card = environment_card()
    print_card(card)
    steps = {}
    print(f"\nms per decode step of one sequence{'':14}" + "".join(f"{context:>9}" for context in contexts))
    for shape in SHAPES:
        directory = ensure_random_model(shape=shape, dtype=torch.bfloat16)
        possible = [context for context in contexts if context < max_length(directory)]
        steps[shape] = step_times(directory, possible, options.threads)
        print(f"{shape:48}" + "".join(f"{steps[shape][context]:9.2f}" for context in possible), flush=True)
    directory = ensure_random_model(shape=PEER_SHAPE, dtype=torch.bfloat16)
    peer = {context: peer_time(directory, context, options.threads) for context in contexts[:2]}
    print(
        f"{'transformers, ' + PEER_SHAPE:48}" + "".join(f"{each:9.2f}" for each in peer.values()), flush=True
    )
    first_tokens = {mode: first_token_time(directory, options.threads, mode) for mode in ("none", "align")}
    share = first_tokens["align"] / first_tokens["none"]
    print(
        f"\nfirst token after {_SHARED_TOKENS} shared and {_OWN_TOKENS} own tokens: {first_tokens['none']:.0f} ms, with "
        f"snapshots {first_tokens['align']:.0f} ms ({share:.2f} x)"
    )
    result = {
        "environment": card, "options": vars(options), "step_ms": steps, "transformers_ms": peer,
        "first_token_ms": first_tokens,
    }  # fmt: skip
    print_tail({"benchmark": "contexts", **result})
    if options.save:
        save_result("contexts", {"benchmark": "contexts", **result})
    return 0


def max_length(directory: Path) -> int:
    """Return the largest number of positions of a model."""
    return int(
        AutoModelForCausalLM.from_pretrained(
            directory, trust_remote_code=False, device_map="meta"
        ).config.max_position_embeddings
    )


def engine(directory: Path, threads: int, **settings: Any) -> Assembled:
    """Build an engine of a single rank."""
    return assemble(
        EngineConfig(
            **{
                "directory": directory,
                "kv_cache_bytes": 1 << 30,
                "max_num_seqs": 8,
                "threads": threads,
                **settings,
            }
        ),
        NoDoorbell(),
    )


def step_times(directory: Path, contexts: list[int], threads: int) -> dict[int, float]:
    """Return the median milliseconds of a decode step by context; the contexts are measured in turn."""
    built = engine(directory, threads)
    blocks = max(contexts) // BLOCK_TOKENS + 1
    cache = PagedCache(built.model.skeleton.cache_shapes, blocks, 2)
    for pages in (*cache.keys, *cache.values, *cache.indexes):
        pages.normal_(generator=torch.Generator().manual_seed(1))
    times: dict[int, list[float]] = {context: [] for context in contexts}
    runs = {context: decode(built, cache, 1, context) for context in contexts}
    for round_number in range(_WARM_UPS + _STEPS):
        for context, run in runs.items():
            begun_s = time.perf_counter()
            run()
            if round_number >= _WARM_UPS:
                times[context].append(time.perf_counter() - begun_s)
    return {context: statistics.median(each) * 1e3 for context, each in times.items()}


def peer_time(directory: Path, context: int, threads: int) -> float:
    """Return the milliseconds per token of `generate` after a prompt of `context` tokens."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=False, dtype=torch.float32
    ).eval()
    prompt = torch.randint(
        5, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0)
    )
    taken = []
    for count in (1, 1 + PEER_TOKENS):
        begun_s = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        taken.append(time.perf_counter() - begun_s)
    torch.set_num_threads(1)
    return (taken[1] - taken[0]) / PEER_TOKENS * 1e3


def first_token_time(directory: Path, threads: int, mode: str) -> float:
    """Return the median milliseconds to the first token of prompts with beginnings that were served before."""
    built = engine(directory, threads, max_model_len=_SHARED_TOKENS + _OWN_TOKENS + 2, mamba_cache_mode=mode)
    generator = torch.Generator().manual_seed(0)
    vocabulary = built.model.lm_head.shape[0]

    def drawn(count: int) -> list[int]:
        tokens: list[int] = torch.randint(5, vocabulary, (count,), generator=generator).tolist()
        return tokens

    shared = [drawn(_SHARED_TOKENS) for _ in range(_SHARED)]
    taken = []
    for round_number in range(1 + _ROUNDS):
        for index, beginning in enumerate(shared):
            request = Request(
                request_id=f"{round_number} {index}",
                prompt_ids=tuple(beginning + drawn(_OWN_TOKENS)),
                params=SamplingParams(max_tokens=1, temperature=0.0),
                arrival_s=0.0,
            )
            begun_s = time.perf_counter()
            built.scheduler.add(request)
            while built.scheduler.has_work:
                batch = built.scheduler.schedule()
                built.scheduler.commit(batch, *built.runner.run(batch))
            if round_number:
                taken.append(time.perf_counter() - begun_s)
    return statistics.median(taken) * 1e3


if __name__ == "__main__":
    sys.exit(main())
