"""How much quality do `--quantization` and `--kv-cache-dtype` cost? KL divergence and agreement with the unquantised model.

Every prompt runs through the unquantised model and through each quantised form, one after the other in one process on one rank.
A form quantises the weights or the KV cache, not both. Rows of a prompt attend to the cache, so one step shows its rounding.
Next-token distributions of all positions are compared: mean and 99th percentile of KL(unquantised || quantised) in nats, and the
share of positions with the same likeliest token. A model compared with itself gives 0 and 1.

Run: `python -m benchmarks.weights.quantisation PROMPTS.jsonl ... [--model demo|DIRECTORY] [--prompts 100] [--tokens 256] [--forms int8,int4,kv-fp8,kv-int8]
[--save]`. A line of a file is an object with `prompt`, or with `turns`, of which the first is used.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.profile import NoDoorbell
from kvcache.paged_cache import BLOCK_TOKENS, PagedCache
from kvcache.step import Span
from scheduler.assembly import assemble
from scheduler.policy.config import EngineConfig
from server.serve.preflight.model import resolve_model

FORMS = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "kv-fp8": {"kv_cache_dtype": "fp8"},
    "kv-int8": {"kv_cache_dtype": "int8"},
}


def prompts_of(files: list[Path], count: int) -> list[str]:
    """Read the first `count` prompts of each file, file after file."""
    prompts = []
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()[:count]]
        prompts += [row["prompt"] if "prompt" in row else row["turns"][0] for row in rows]
    return prompts


def log_probabilities(directory: Path, sequences: list[list[int]], **settings: Any) -> Iterator[Tensor]:
    """Run sequences through a model with an engine's settings. Yield [tokens, V] float32 for each."""
    longest = max(map(len, sequences))
    config = EngineConfig(
        directory=directory, kv_cache_bytes=1 << 28, max_model_len=longest + 1, max_num_seqs=1,
        max_num_batched_tokens=longest, **settings,
    )  # fmt: skip
    built = assemble(config, NoDoorbell())
    step = built.runner.step
    cache = PagedCache(built.model.skeleton.cache_shapes, -(-longest // BLOCK_TOKENS))
    for sequence in sequences:
        step.fill([Span(0, len(sequence), range(-(-len(sequence) // BLOCK_TOKENS)))])
        inputs = step.inputs(sequence, range(len(sequence)))
        yield built.model.forward(inputs.token_T, cache, inputs.row_R).log_softmax(-1)


def deviation(exact: Iterable[Tensor], found: Iterable[Tensor]) -> dict[str, float]:
    """Compare log probabilities [tokens, V] of sequences with the unquantised model's."""
    divergences, agreements = [], []
    for wanted, ours in zip(exact, found, strict=True):
        divergences.append((wanted.exp() * (wanted - ours)).sum(-1))
        agreements.append((wanted.argmax(-1) == ours.argmax(-1)).float())
    divergence, agreement = torch.cat(divergences).clamp(min=0).numpy(), torch.cat(agreements)
    return {
        "positions": float(divergence.size),
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(np.quantile(divergence, 0.99)),
        "top1_agreement": float(agreement.mean()),
    }


class Sample(NamedTuple):
    """A model, and the tokens of prompts."""

    directory: Path
    sequences: list[list[int]]
    options: argparse.Namespace
    card: dict[str, Any]


def read_sample(
    name: str, summary: str, arguments: list[str] | None, *, least_tokens: int = 1, forms: Iterable[str] = ()
) -> Sample:
    """Parse the arguments of a module of this folder, print the card, and read prompts that have enough tokens.

    `forms`: default of --forms. Without it, that flag does not exist.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.weights.{name}", description=summary)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=100, help="prompts per file")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens read per prompt")
    if forms:
        parser.add_argument("--forms", default=",".join(forms), help="comma-separated forms to measure")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    card = environment_card()
    print_card(card)
    directory = Path(resolve_model(options.model))
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    prompts = prompts_of(options.files, options.prompts)
    sequences = [tokenizer(prompt)["input_ids"][: options.tokens] for prompt in prompts]
    return Sample(directory, [each for each in sequences if len(each) >= least_tokens], options, card)


def main(arguments: list[str] | None = None) -> int:
    """Print a line per form and one JSON line; return the exit status."""
    directory, sequences, options, card = read_sample(
        "quantisation", __doc__.split("\n")[0], arguments, forms=FORMS
    )
    results: dict[str, Any] = {
        "environment": card, "model": options.model, "files": [file.name for file in options.files],
        "prompts": len(sequences), "tokens": options.tokens,
    }  # fmt: skip
    for form in options.forms.split(","):
        results[form] = found = deviation(
            log_probabilities(directory, sequences), log_probabilities(directory, sequences, **FORMS[form])
        )
        print(
            f"{form}: KL mean {found['kl_mean']:.5f}, p99 {found['kl_p99']:.4f} nats; top-1 agreement "
            f"{found['top1_agreement']:.2%} of {found['positions']:.0f} positions"
        )
    if options.save:
        print(f"saved {save_result('quantisation', results).name}")
    print_tail(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
