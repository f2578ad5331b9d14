"""Answers of one rank with --batch-invariant: the same tokens and bits of logprobs, however the requests run.

Greedy and seeded requests run one after another, each alone, without prefix caching and without overlapped steps. Then the same
requests run together: in the same engine, with overlapped steps, in chunks and with prefix hits, with drafts, and in a KV cache that is
too small for all of them. `tokens` and `bits` count the requests that were equal. The other figures show that a run did what it is
for: cached tokens, drafts, preemptions. `default mode` shows the requests that are equal without the option; it
may be any number. The interpreter sums in another order for other shapes, so its bits do not count.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.ranks.engine_loop import EngineLoop
from benchmarks.gpu.ranks.models import HYBRID, MODELS, config_of, engine_config
from benchmarks.gpu.results import Row, Setting
from kvcache.paged_cache import BLOCK_TOKENS
from scheduler.policy.request import Request, RequestOutput, SamplingParams
from scheduler.policy.speculative import Method, SpeculativeConfig

_DRAFTS = SpeculativeConfig(method=Method.NGRAM, num_drafts=3, shortest_match=1)
_TINY_WAYS = 2
_EXPERTS = 32  # of each layer, so that a model is built in seconds


class _Load(NamedTuple):
    """Numbers of the requests."""

    requests: int
    longest: int  # tokens of a prompt
    answer: int
    chunk: int  # tokens of a step in which prompts run in chunks


_LOAD, _TINY_LOAD = _Load(24, 700, 48, 256), _Load(2, 20, 3, 16)


class _Answer(NamedTuple):
    """A request's tokens, their logprobs, and the prompt tokens found in the prefix cache and the drafts tried."""

    tokens: list[int]
    logprobs: list[float]
    num_cached: int
    num_drafts: int


def units(setting: Setting) -> list[str]:
    """Return one unit per model."""
    return ["qwen3"] if setting.is_tiny else [*MODELS, HYBRID]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Compare all ways to run the same requests."""
    config, load = (
        config_of(unit, setting, layers=4 if unit == HYBRID else 2),
        _TINY_LOAD if setting.is_tiny else _LOAD,
    )
    if not setting.is_tiny:
        field = next(
            name for name in ("n_routed_experts", "num_local_experts", "num_experts") if hasattr(config, name)
        )
        setattr(config, field, _EXPERTS)
    requests = _requests(config.vocab_size, load)
    blocks = -(-(load.longest + load.answer) // BLOCK_TOKENS)
    limits: dict[str, Any] = {
        "max_num_seqs": load.requests, "max_model_len": blocks * BLOCK_TOKENS, "enable_prefix_caching": False, "batch_invariant": True,
        "kv_cache_bytes": 1 << (24 if setting.is_tiny else 31), "overlaps_steps": False,
        "max_num_batched_tokens": 64 if setting.is_tiny else 8192,
    }  # fmt: skip
    with engine_config(config, setting, **limits) as about, EngineLoop(about) as loop:
        alone = [_answers(loop, [request])[0] for request in requests]
        token_bytes = about.kv_cache_bytes // (loop.assembled.num_blocks * BLOCK_TOKENS)
        yield _row(setting, f"{unit}, together", alone, _answers(loop, requests), loop)
    ways: dict[str, dict[str, Any]] = {
        "chunks and prefix hits": {"enable_prefix_caching": True, "max_num_batched_tokens": load.chunk},
        "overlapped": {"overlaps_steps": True},
        "drafts": {"speculative_config": _DRAFTS},
        "short of KV cache": {"kv_cache_bytes": (load.requests * blocks // 2) * BLOCK_TOKENS * token_bytes},
        "default mode": {"batch_invariant": False, "overlaps_steps": True},
    }
    for words, options in itertools.islice(ways.items(), _TINY_WAYS if setting.is_tiny else None):
        with engine_config(config, setting, **{**limits, **options}) as about, EngineLoop(about) as loop:
            if about.enable_prefix_caching:
                _answers(loop, requests)
            found = _answers(loop, requests)
        row = _row(setting, f"{unit}, {words}", alone, found, loop)
        yield replace(row, is_right=True) if words == "default mode" else row


def _requests(vocabulary: int, load: _Load) -> list[Request]:
    """Return requests of all lengths. Half of them share the first half of their prompts; half of them are seeded."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, vocabulary, (load.requests, load.longest), generator=generator)
    ids[::2, : load.longest // 2] = ids[0, : load.longest // 2].clone()
    lengths = torch.linspace(load.longest // 3, load.longest, load.requests).long().tolist()
    return [
        Request(
            request_id=str(at), prompt_ids=tuple(ids[at, :length].tolist()), arrival_s=0.0,
            params=SamplingParams(
                max_tokens=load.answer, temperature=float(at % 4 > 1), top_p=0.9, seed=at, num_logprobs=0
            ),
        )
        for at, length in enumerate(lengths)
    ]  # fmt: skip


def _answers(loop: EngineLoop, requests: Sequence[Request]) -> list[_Answer]:
    """Run requests together. Return their answers in order."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}

    def on_step(found: list[RequestOutput]) -> None:
        for output in found:
            outputs[output.request_id].append(output)

    def submit() -> None:
        for request in requests:
            loop.assembled.engine.submit(request)

    loop.run(submit, on_step)
    return [
        _Answer(
            [token for output in each for token in output.token_ids],
            [logprobs.logprob for output in each for logprobs in output.logprobs],
            sum(output.num_cached_tokens for output in each),
            sum(output.num_draft_tokens for output in each),
        )
        for each in outputs.values()
    ]


def _row(
    setting: Setting, name: str, alone: Sequence[_Answer], found: Sequence[_Answer], loop: EngineLoop
) -> Row:
    same_tokens = sum(one.tokens == other.tokens for one, other in zip(alone, found, strict=True))
    same_bits = sum(one[:2] == other[:2] for one, other in zip(alone, found, strict=True))
    counted = same_tokens if setting.is_interpreted else same_bits
    return Row(
        name=name,
        figures={
            "requests": len(alone),
            "tokens": same_tokens,
            "bits": same_bits,
            "cached": sum(each.num_cached for each in found),
            "drafts": sum(each.num_drafts for each in found),
            "preemptions": loop.assembled.scheduler.stats.num_preemptions,
        },
        is_right=counted == len(alone),
    )
