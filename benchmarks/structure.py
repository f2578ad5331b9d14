"""How much time does an answer's form add to a step?

Decode steps of the demo model (no HTTP, no scheduler) in which all rows, half of them or none are sampled under a form, in
turn in one process, so that noise of the machine affects all. Rows follow documents that are valid under their forms, so the
states are those of real answers. The parts are also timed alone, because a difference of a few percent is lost in the noise
of a shared machine: the mask's bits, their application to a row, the advance by one token, and compiling, with and without
the text's cache. The goal is below 10 % of a step.

Expected bound: the bits take microseconds to tens of them (llguidance reports 50 us on average for 128k tokens); their
application is one pass over V floats.

Run: `python -m benchmarks.structure [DIRECTORY] [--batch 1,8,32] [--threads 1] [--context 150] [--rounds 20] [--save]`.
DIRECTORY defaults to the demo model, which must exist (`wideep serve` creates it). It takes about a minute.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLTokenizer

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.profile import NoDoorbell
from kvcache.paged_cache import PagedCache
from kvcache.step import Span
from scheduler.assembly import Assembled, assemble
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import Request, SamplingParams, Structure
from scheduler.policy.sequence import Sequence
from scheduler.sampling.sampler import sample
from scheduler.structure.compiler import Vocabulary
from scheduler.structure.grammar import GrammarMatcher, compile_structure, open_tokenizer
from server.front.tokenizer import Tokenizer
from server.serve.preflight.model import resolve_model

GOAL = 0.10  # of a step's time
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["new", "vip", "blocked"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string", "maxLength": 40}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
DOCUMENT = {
    "name": "Ada Lovelace, countess",
    "age": 36,
    "email": "ada@example.com",
    "tags": ["new", "vip"],
    "address": {"street": "12 St James's Square", "city": "London"},
}
FORMS = {  # each with a text that is valid under it
    "json_schema": (Structure("json_schema", json.dumps(PERSON)), json.dumps(DOCUMENT, indent=1)),
    "json_object": (Structure("json_object"), json.dumps(DOCUMENT)),
    "regex": (
        Structure("regex", r"([A-Z][a-z]+ ){3,9}[0-9]{4}-[0-9]{2}-[0-9]{2}"),
        "The Long Answer Was Given On 1843-09-05",
    ),
    "choice": (Structure("choice", json.dumps([f"category {n}" for n in range(100)])), "category 77"),
    "grammar": (
        Structure(
            "grammar", 'start: sum\nsum: term ("+" term)*\nterm: "(" sum ")" | NUMBER\nNUMBER: /[0-9]+/\n'
        ),
        "(12+7+(88+1))+10000+(7)",
    ),
}


class Walk:
    """Answers of one row under a form, repeated."""

    def __init__(self, name: str, tokenizer: Tokenizer, tokens: LLTokenizer, vocabulary: Vocabulary) -> None:
        self.structure, text = FORMS[name]
        self._ids = tokenizer.encode(text, add_special_tokens=False)
        self._compiled, self._vocabulary = compile_structure(self.structure, tokens), vocabulary
        params = SamplingParams(max_tokens=1 << 20, temperature=0.0, structure=self.structure)
        self.sequence = Sequence.from_request(
            Request(request_id=name, prompt_ids=(1,), params=params, arrival_s=0.0)
        )
        self._left: Iterator[int] = iter(())

    def start(self) -> GrammarMatcher:
        """Return a matcher at the form's start."""
        return GrammarMatcher(self._compiled.deep_copy(), self._vocabulary, ignore_eos=False)

    def step(self) -> None:
        """Advance by the document's next token, as commit does with the sampled one."""
        token_id = next(self._left, None)
        matcher = self.sequence.matcher
        if token_id is None or matcher is None:
            self._left, self.sequence.matcher = iter(self._ids), self.start()
            return
        matcher.advance(token_id)
        assert not matcher.failure, matcher.failure

    def parts(self, vocabulary_size: int) -> dict[str, list[float]]:
        """Return the seconds of each part, token by token through the document."""
        times: dict[str, list[float]] = {"bits": [], "mask": [], "advance": []}
        matcher, row = self.start(), np.zeros(vocabulary_size, dtype=np.float32)
        for token_id in self._ids:
            row[:] = 0
            times["bits"].append(_seconds(matcher._matcher.deep_copy().compute_bitmask))
            times["mask"].append(_seconds(lambda: matcher.mask(row)))
            assert row[token_id] == 0, f"{token_id} is not allowed in a valid document"
            times["advance"].append(_seconds(lambda: matcher.advance(token_id)))  # noqa: B023 - called at once
        return times


def _seconds(call: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def parts(walks: dict[str, Walk], tokens: LLTokenizer, size: int) -> dict[str, dict[str, float]]:
    """Return microseconds per part of a form: medians over its document's tokens, and the slowest mask."""
    found = {}
    for name, walk in walks.items():
        runs = [walk.parts(size) for _ in range(5)]
        median = {part: statistics.median(t for run in runs for t in run[part]) for part in runs[0]}
        compiles = [_seconds(lambda: compile_structure(walk.structure, tokens)) for _ in range(9)]  # noqa: B023
        found[name] = {
            **{f"{part}_us": 1e6 * value for part, value in median.items()},
            "mask_max_us": 1e6
            * max(statistics.median(times) for times in zip(*(r["mask"] for r in runs), strict=True)),
            "copy_us": 1e6 * statistics.median(_seconds(walk.start) for _ in range(20)),
            "compile_us": 1e6 * statistics.median(compiles),
        }
    return found


def decode(built: Assembled, cache: PagedCache, batch: int, context: int) -> Callable[[], torch.Tensor]:
    """Return a function that runs the model for one decode step and returns the rows' logits."""
    blocks = -(-context // built.runner.step.block_tokens)
    spans = [Span(context - 1, 1, range(row * blocks, (row + 1) * blocks)) for row in range(batch)]
    rows = torch.arange(batch)

    def run() -> torch.Tensor:
        step = built.runner.step
        step.fill(spans)
        return built.model.forward(torch.full((step.num_padded,), 100), cache, rows)

    return run


def step_times(run: Callable[[], torch.Tensor], walks: list[Walk], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps in which all rows, half of them or none have a form, measured in turn."""
    free = [Sequence.from_request(walk.sequence.request) for walk in walks]
    mixes = {
        "all": [walk.sequence for walk in walks],
        "half": [walk.sequence if place % 2 == 0 else free[place] for place, walk in enumerate(walks)],
        "none": free,
    }
    times: dict[str, list[float]] = {name: [] for name in mixes}
    for _ in range(rounds):
        for name, sequences in mixes.items():
            begun_s = time.perf_counter()
            with torch.inference_mode():
                sample(run(), sequences)
            for walk in walks:
                if walk.sequence in sequences:
                    walk.step()
            times[name].append(time.perf_counter() - begun_s)
    return times


def measure(
    built: Assembled,
    cache: PagedCache,
    walks: list[Walk],
    found: dict[str, dict[str, float]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return all figures of one batch size."""
    run = decode(built, cache, len(walks), options.context)
    for walk in walks:
        walk.step()
    step_times(run, walks, 2)
    times = step_times(run, walks, options.rounds)
    step_s = statistics.median(times["none"])
    dearest = max(figures["mask_us"] + figures["advance_us"] for figures in found.values()) / 1e6
    share = len(walks) * dearest / step_s
    return {
        "rounds": options.rounds,
        **{f"step_{name}_ms": 1e3 * statistics.median(values) for name, values in times.items()},
        "measured_ratio": statistics.median(a / n for a, n in zip(times["all"], times["none"], strict=True)),
        "share_by_parts_dearest_form": share,
        "goal_met": share < GOAL,
    }


def main(arguments: list[str] | None = None) -> int:
    """Print tables and one JSON line; return the exit status: 1 if the goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structure", description="The cost of a form per step."
    )
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results/")
    options = parser.parse_args(arguments)
    card = environment_card()
    print_card(card)
    batches = [int(text) for text in options.batch.split(",")]
    directory = options.directory or resolve_model("demo")
    tokenizer = Tokenizer(str(directory))
    loading_s = _seconds(vocabulary_of := _once(tokenizer.vocabulary))
    vocabulary = vocabulary_of()
    opening_s = _seconds(tokens_of := _once(lambda: open_tokenizer(vocabulary)))
    tokens = tokens_of()
    config = EngineConfig(
        directory=directory, kv_cache_bytes=1 << 30, max_model_len=options.context + 1, max_num_seqs=max(batches),
        threads=options.threads,
    )  # fmt: skip
    built = assemble(config, NoDoorbell())
    cache = PagedCache(built.model.skeleton.cache_shapes, max(batches) * (options.context // 16 + 1))
    names = list(FORMS)
    found = parts(
        {name: Walk(name, tokenizer, tokens, vocabulary) for name in names}, tokens, tokenizer.vocab_size
    )
    for name, figures in found.items():
        print(f"{name:>12}  " + "  ".join(f"{part} {value:8.1f}" for part, value in figures.items()))
    results = {}
    for batch in batches:
        walks = [Walk(names[row % len(names)], tokenizer, tokens, vocabulary) for row in range(batch)]
        results[batch] = result = measure(built, cache, walks, found, options)
        print(
            f"\nbatch {batch}: step {result['step_none_ms']:.2f} ms, half with forms {result['step_half_ms']:.2f}, all "
            f"{result['step_all_ms']:.2f} (ratio {result['measured_ratio']:.3f}, by parts "
            f"{100 * result['share_by_parts_dearest_form']:.2f} %)"
        )
    summary: dict[str, Any] = {
        "benchmark": "structure", "environment": card, "vocabulary": tokenizer.vocab_size, "threads": options.threads,
        "context": options.context, "load_vocabulary_ms": 1e3 * loading_s, "open_tokenizer_ms": 1e3 * opening_s,
        "parts": found, "batches": results, "goal": GOAL,
    }  # fmt: skip
    if options.save:
        print(f"saved {save_result('structure', summary)}")
    print_tail(summary)
    return 0 if all(result["goal_met"] for result in results.values()) else 1


def _once(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls `make` once and keeps its result."""
    made: list[Any] = []

    def get() -> Any:
        if not made:
            made.append(make())
        return made[0]

    return get


if __name__ == "__main__":
    sys.exit(main())
