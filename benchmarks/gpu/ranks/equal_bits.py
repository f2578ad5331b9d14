"""Answers of one rank with --batch-invariant: the same tokens and bits of logprobs, however the requests run.

Greedy and seeded requests run one after another, each alone, without prefix caching and without overlapped steps. Then the same
requests run together: in the same engine, with overlapped steps, in chunks and with prefix hits, with drafts, and in a KV cache that is
too small for all of them. `second turn` runs conversations: each prompt is an earlier prompt, its answer and a few more tokens. They
run in an engine that served the first turn with prefix caching, and are compared with the same prompts alone without it.
`tokens` and `bits` count the requests that were equal. The other figures show that a run did what it is
for: cached tokens, drafts, and `resumed`, the requests that were preempted after their first token. `short of KV cache` is wrong
without such requests, and `second turn` without cached tokens. `default mode` shows the requests that are equal without the option; it
may be any number. The interpreter sums in another order for other shapes, so its bits do not count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.ranks.engine_loop import EngineLoop
from benchmarks.gpu.ranks.models import HYBRID, MODELS, config_of, engine_config
from benchmarks.gpu.results import Row, Setting
from kvcache.paged_cache import BLOCK_TOKENS
from scheduler.policy.request import Request, RequestOutput, SamplingParams
from scheduler.policy.sequence import SequenceStatus
from scheduler.policy.speculative import Method, SpeculativeConfig

_DRAFTS = SpeculativeConfig(method=Method.NGRAM, num_drafts=3, shortest_match=1)
_MORE_TOKENS = 5  # of a second turn's prompt, after the first answer
_SHORT, _TURN, _DEFAULT = "short of KV cache", "second turn", "default mode"
_TINY_WAYS = (_SHORT, _TURN)
_EXPERTS = 32  # of each layer, so that a model is built in seconds


class _Load(NamedTuple):
    """Numbers of the requests."""

    requests: int
    longest: int  # tokens of a prompt
    answer: int
    second_answer: int  # of a second turn
    chunk: int  # tokens of a step in which prompts run in chunks
    few_blocks: int  # a KV cache in which requests that have generated tokens are preempted


_LOAD, _TINY_LOAD = _Load(24, 700, 64, 16, 256, 400), _Load(2, 20, 14, 3, 16, 4)


class _Answer(NamedTuple):
    """A request's tokens, their logprobs, and how it ran."""

    tokens: list[int]
    logprobs: list[float]
    num_cached: int  # prompt tokens found in the prefix cache
    num_drafts: int
    is_resumed: bool  # preempted after its first token


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
    longest = load.longest + load.answer + _MORE_TOKENS + load.second_answer
    blocks = -(-longest // BLOCK_TOKENS)
    limits: dict[str, Any] = {
        "max_num_seqs": load.requests, "max_model_len": blocks * BLOCK_TOKENS, "enable_prefix_caching": False, "batch_invariant": True,
        "kv_cache_bytes": 1 << (24 if setting.is_tiny else 31), "overlaps_steps": False,
        "max_num_batched_tokens": 64 if setting.is_tiny else 8192,
    }  # fmt: skip
    with engine_config(config, setting, **limits) as about, EngineLoop(about) as loop:
        alone = [_answers(loop, [request])[0] for request in requests]
        yield _row(setting, f"{unit}, together", alone, _answers(loop, requests))
        turns = _second_turns(requests, alone, config.vocab_size, load)
        turns_alone = [_answers(loop, [request])[0] for request in turns]
    ways: dict[str, dict[str, Any]] = {
        "chunks and prefix hits": {"enable_prefix_caching": True, "max_num_batched_tokens": load.chunk},
        "overlapped": {"overlaps_steps": True},
        "drafts": {"speculative_config": _DRAFTS},
        _SHORT: {},
        _TURN: {"enable_prefix_caching": True},
        _DEFAULT: {"batch_invariant": False, "overlaps_steps": True},
    }
    for words in _TINY_WAYS if setting.is_tiny else ways:
        with engine_config(config, setting, **{**limits, **ways[words]}) as about, EngineLoop(about) as loop:
            if words == _SHORT:
                pool = loop.assembled.scheduler.pool
                pool.acquire(pool.num_free - load.few_blocks)
            if about.enable_prefix_caching:
                _answers(loop, requests)
            asked, wanted = (turns, turns_alone) if words == _TURN else (requests, alone)
            found = _answers(loop, asked)
        row = _row(setting, f"{unit}, {words}", wanted, found)
        missing = {_SHORT: "resumed", _TURN: "cached"}.get(words)
        if missing is not None and not row.figures[missing]:
            row = replace(row, is_right=False)
        yield replace(row, is_right=True) if words == _DEFAULT else row


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


def _second_turns(
    requests: Sequence[Request], answers: Sequence[_Answer], vocabulary: int, load: _Load
) -> list[Request]:
    """Return the requests that continue these ones: their prompts, answers and some more tokens."""
    generator = torch.Generator().manual_seed(6)
    more = torch.randint(0, vocabulary, (len(requests), _MORE_TOKENS), generator=generator).tolist()
    return [
        replace(
            request,
            prompt_ids=(*request.prompt_ids, *answer.tokens, *tokens),
            params=replace(request.params, max_tokens=load.second_answer),
        )
        for request, answer, tokens in zip(requests, answers, more, strict=True)
    ]


def _answers(loop: EngineLoop, requests: Sequence[Request]) -> list[_Answer]:
    """Run requests together. Return their answers in order."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    resumed: set[str] = set()

    def on_step(found: list[RequestOutput]) -> None:
        for output in found:
            outputs[output.request_id].append(output)
        resumed.update(
            sequence.request.request_id
            for sequence in loop.assembled.scheduler.begun
            if sequence.status is SequenceStatus.WAITING
        )

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
            name in resumed,
        )
        for name, each in outputs.items()
    ]


def _row(setting: Setting, name: str, alone: Sequence[_Answer], found: Sequence[_Answer]) -> Row:
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
            "resumed": sum(each.is_resumed for each in found),
        },
        is_right=counted == len(alone),
    )
