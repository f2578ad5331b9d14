"""Do drafts pay off over HTTP? n-grams on the demo model, with answers that repeat their prompts; MTP layers on a constructed model.

Two services run side by side, one of them with drafts. They get the same requests in turn, from one client, while the other
sleeps. Answers must be equal. A task asks for a text with a small change (code edits, from HumanEval's prompts) or for its
contents (MT-Bench's turns). Ratios are grouped by how many of a request's drafts were accepted. The models with MTP layers are
those of `benchmarks.models.foreseeing`, with about four of five drafts right, on prompts of random tokens and seeded sampling: a
deep model in which the layer is a small part of a step, and one in which a step or a draft mostly reads the output projection.

Expected bound: a step of 1 + d rows costs the bytes of the rows' experts; with acceptance p it yields (1 - p^(d+1)) / (1 - p) tokens.

Run: `python -m benchmarks.drafts PROMPTS.jsonl ... [--tasks 24] [--tokens 160] [--drafts 4] [--threads 2] [--save]`.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.foreseeing import ensure_foreseeing_model
from benchmarks.serving.service import HOST, Service
from server.http.client import ServiceClient

Tasks = list[str] | list[list[int]]
SHARES = {"deepseek-v3-deep": 0.015, "deepseek-v3": 0.04}  # share of the layers' outputs, see `foresee`
LIKELY = 0.6  # acceptance above which drafts should pay off
_EDIT = "Here is some Python code:\n\n{}\nWrite the same code again, with `# checked` as its first line."
_RECALL = "Here is a text:\n\n{}\n\nSay again what the text says, in its own words."


class TimedAnswer(NamedTuple):
    """Answer of a service to a task."""

    text: str
    tokens: int
    seconds: float  # from the first token to the last
    drafted: int
    accepted: int


class Pair(NamedTuple):
    """Answers to a task without and with drafts."""

    plain: TimedAnswer
    drafting: TimedAnswer

    @property
    def ratio(self) -> float:
        """Tokens per second with drafts over those without."""
        return self.plain.seconds / self.drafting.seconds

    @property
    def acceptance(self) -> float:
        """Share of drafts that were accepted."""
        return self.drafting.accepted / self.drafting.drafted if self.drafting.drafted else 0.0


def main(arguments: list[str] | None = None) -> int:
    """Print tables and one JSON line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description="Do drafts pay off?")
    parser.add_argument(
        "prompts", nargs="+", type=Path, help="JSON lines with `prompt` (code) or `turns` (text)"
    )
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/drafts-<date>-<cpu>.json"
    )
    options = parser.parse_args(arguments)
    card = environment_card()
    print_card(card)
    tasks = tasks_of(options.prompts, options.tasks)
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": options.drafts,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    mtp = {"method": "mtp", "num_speculative_tokens": options.drafts}
    results = {"ngram": summary("n-grams, demo", run("demo", ngram, tasks, options))}
    for shape, share in SHARES.items():
        model = str(ensure_foreseeing_model(shape, share))
        results[shape] = summary(
            f"own layer, {shape}", run(model, mtp, random_prompts(options.tasks // 2), options)
        )
    result = {"benchmark": "drafts", "environment": card, **results}
    result["options"] = {**vars(options), "prompts": [file.name for file in options.prompts]}
    print_tail(result)
    if options.save:
        save_result("drafts", result)
    return 0


def tasks_of(files: list[Path], count: int) -> list[str]:
    """Return tasks with answers that repeat parts of them, taking the files in turn."""
    found = []
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found.append(
            [
                _EDIT.format(row["prompt"]) if "prompt" in row else _RECALL.format(row["turns"][0])
                for row in rows
            ]
        )
    mixed = [task for group in zip(*found, strict=False) for task in group]
    return mixed[:count]


def random_prompts(count: int) -> list[list[int]]:
    """Return prompts of token ids that are valid in all models here."""
    rng = random.Random(0)
    return [[rng.randrange(100, 4000) for _ in range(64)] for _ in range(count)]


def run(model: str, speculative: dict[str, Any], tasks: Tasks, options: argparse.Namespace) -> list[Pair]:
    """Send requests to two services in turn."""
    common = [
        "-dp",
        "1",
        f"--threads={options.threads}",
        "--max-model-len=2048",
        "--no-enable-prefix-caching",
    ]
    given = [*common, f"--speculative-config={json.dumps(speculative)}"]
    pairs = []
    with tempfile.NamedTemporaryFile() as log, Service(model, common, log) as plain, Service(model, given, log) as drafting:  # fmt: skip
        for warm_up in tasks[:2]:
            ask(plain, warm_up, options.tokens)
            ask(drafting, warm_up, options.tokens)
        for number, task in enumerate(tasks):
            order = (plain, drafting) if number % 2 else (drafting, plain)
            first, second = (ask(service, task, options.tokens) for service in order)
            pair = Pair(first, second) if number % 2 else Pair(second, first)
            assert pair.plain.text == pair.drafting.text, "drafts changed an answer"
            if pair.plain.tokens > 8:
                pairs.append(pair)
    return pairs


def ask(service: Service, task: object, num_tokens: int) -> TimedAnswer:
    """Stream the answer to a chat message or the completion of token ids."""
    is_chat = isinstance(task, str)
    asked = (
        {"messages": [{"role": "user", "content": task}]}
        if is_chat
        else {"prompt": task, "ignore_eos": True, "temperature": 0.5, "seed": 0}
    )
    body = {
        "temperature": 0, **asked, "max_tokens": num_tokens,
        "repetition_penalty": 1.0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    text, times, usage = "", [], dict[str, Any]()
    path = f"/v1/{'chat/' if is_chat else ''}completions"
    with ServiceClient(f"http://{HOST}:{service.port}", answer_timeout_s=600) as client:
        for event in client.events(path, body):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["delta"].get("content") if is_chat else choice["text"]
                if piece:
                    text += piece
                    times.append(time.perf_counter())
    details = usage["completion_tokens_details"]
    accepted = details.get("accepted_prediction_tokens", 0)
    drafted = accepted + details.get("rejected_prediction_tokens", 0)
    return TimedAnswer(text, usage["completion_tokens"], times[-1] - times[0], drafted, accepted)


def summary(name: str, pairs: list[Pair]) -> dict[str, Any]:
    """Print and return medians, for requests with mostly accepted drafts and for the others."""
    told: dict[str, Any] = {}
    for title, group in (
        ("likely", [pair for pair in pairs if pair.acceptance > LIKELY]),
        ("unlikely", [pair for pair in pairs if pair.acceptance <= LIKELY]),
    ):
        if not group:
            continue
        drafted, accepted = sum(p.drafting.drafted for p in group), sum(p.drafting.accepted for p in group)
        tokens = sum(pair.plain.tokens for pair in group)
        plain_s, drafting_s = (sum(pair[at].seconds for pair in group) for at in (0, 1))
        told[title] = {
            "requests": len(group),
            "acceptance": accepted / drafted if drafted else 0.0,
            "rows_per_step": 1 + drafted / (tokens - accepted),
            "plain_step_ms": 1e3 * plain_s / tokens,
            "drafting_step_ms": 1e3 * drafting_s / (tokens - accepted),
            "plain_tokens_per_s": tokens / plain_s,
            "drafting_tokens_per_s": tokens / drafting_s,
            "median_ratio": statistics.median(pair.ratio for pair in group),
            "least_ratio": min(pair.ratio for pair in group),
        }
        print(f"{name}, acceptance {'above' if title == 'likely' else 'up to'} {LIKELY:.0%}: " + ", ".join(
            f"{key} {value:.3g}" for key, value in told[title].items()
        ), flush=True)  # fmt: skip
    return told


if __name__ == "__main__":
    sys.exit(main())
