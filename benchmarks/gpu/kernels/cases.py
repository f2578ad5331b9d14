"""Kernels that a day checks and times, and their shapes: tables of names and makers, for real and tiny shapes.

The goals: paged decode attention at 85 % of the copy's bandwidth, the grouped
GEMM 1.1 times as fast as torch's below 64 rows per expert and at 85 % of the matrix rate from 1,024 rows, and FP8 products
of many rows at two thirds of the speed of cuBLAS for a dense product.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call, MakeCall, bytes_of
from benchmarks.gpu.kernels.attention_calls import (
    decode_call,
    decode_maker,
    latent_call,
    latent_maker,
    prefill_maker,
)
from benchmarks.gpu.kernels.expert_calls import (
    FORMS,
    decoded_maker,
    grouped_maker,
    uneven_counts,
    uneven_maker,
)
from benchmarks.gpu.kernels.fp8_calls import fp8_call, fp8_maker
from benchmarks.gpu.kernels.row_calls import (
    DEEPSEEK_ROUTING,
    GPT_OSS_ROUTING,
    QWEN3_ROUTING,
    linear_call,
    norm_call,
    rotary_call,
    routing_call,
    write_call,
)
from benchmarks.gpu.ranks import models
from benchmarks.gpu.ranks.checks import combine_call, permute_call
from benchmarks.gpu.ranks.models import ExpertShape, sequence_of
from benchmarks.gpu.results import Setting
from scheduler.policy.request import SamplingParams
from scheduler.sampling.gpu.draws import KernelChoice
from scheduler.sampling.plan import make_plan
from scheduler.sampling.sampler import sample

KINDS = {
    "greedy": SamplingParams(max_tokens=8, temperature=0.0),
    "temperature": SamplingParams(max_tokens=8, temperature=0.8),
    "top p": SamplingParams(max_tokens=8, temperature=0.8, top_p=0.95),
    "top k": SamplingParams(max_tokens=8, temperature=1.0, top_k=50, min_p=0.02),
    "top k and p": SamplingParams(max_tokens=8, temperature=0.6, top_k=20, top_p=0.95),
}


def sampling_call(
    bench: Bench, seed: int, *, rows: int, vocabulary: int, kinds: Sequence[str] = tuple(KINDS)
) -> Call:
    """Build a call that samples tokens; rows take turns at the kinds and have separate seeds."""
    generator = bench.generator(seed)
    logits = torch.randn(rows, vocabulary, generator=generator, device=bench.device).mul_(3.0)
    params = [
        dataclasses.replace(KINDS[kinds[row % len(kinds)]], seed=1000 * seed + row) for row in range(rows)
    ]
    sequences = [sequence_of([1, 2, 3], [], each) for each in params]
    plan = make_plan(sequences, vocabulary, bench.device)

    def oracle(shift: int = 0) -> Tensor:
        chosen = sample(logits.roll(shift, 0).cpu(), sequences).token_ids
        return bench.integers(chosen).float()

    return Call(
        run=functools.partial(KernelChoice(bench.device), logits, plan),
        prepare=lambda: None,
        result=lambda ids: ids.float(),
        oracle=oracle,
        control=functools.partial(oracle, 1),
        num_bytes=bytes_of(logits),
    )


_CONTEXTS = (1, 15, 16, 17, 511, 513, 2048, 4097)  # on both sides of blocks and splits
_SPANS = ((0, 300), (37, 1), (512, 200), (1000, 65))
_FEW_ROWS, _MANY_ROWS = 64, 1024  # there are goals below the first and from the second on
_MANY_FP8_ROWS = 256


class TimedCase(NamedTuple):
    """A kernel at a shape, and goals for its figures."""

    name: str
    make: MakeCall
    goals: Mapping[str, float] = {}


def checked_cases(setting: Setting) -> dict[str, MakeCall]:
    """Return every kernel once per model, including edge cases."""
    if setting.is_tiny:
        return _tiny_checked()
    decode = partial(decode_call, contexts=_CONTEXTS)
    cases: dict[str, MakeCall] = {
        "decode qwen3": partial(decode, shape=models.QWEN3),
        "decode qwen3, batch-invariant": partial(decode, shape=models.QWEN3, is_invariant=True),
        "decode gemma": partial(decode, shape=models.GEMMA),
        "decode gpt-oss": partial(decode, shape=models.GPT_OSS),
        "decode gpt-oss, window": partial(decode, shape=models.GPT_OSS_WINDOW),
        "latents deepseek": partial(latent_call, shape=models.DEEPSEEK, contexts=_CONTEXTS),
        "latents deepseek, batch-invariant": partial(
            latent_call, shape=models.DEEPSEEK, contexts=_CONTEXTS, is_invariant=True
        ),
        "prefill qwen3": prefill_maker(models.QWEN3, *_SPANS),
        "prefill deepseek": prefill_maker(models.DEEPSEEK_EXPANDED, *_SPANS),
        "prefill gpt-oss": prefill_maker(models.GPT_OSS, *_SPANS),
        "prefill gpt-oss, window": prefill_maker(models.GPT_OSS_WINDOW, *_SPANS),
    }
    for model, shape in models.EXPERTS.items():
        for side in ("up", "down"):
            for is_decode in (True, False):
                tile = "decode" if is_decode else "prefill"
                cases[f"grouped {model} {side}, {tile} tile"] = uneven_maker(shape, side, is_decode=is_decode)
    uneven_fp8 = partial(
        fp8_call, shape=models.DEEPSEEK_EXPERTS, counts=uneven_counts(models.DEEPSEEK_EXPERTS)
    )
    return {
        **cases,
        **_quantised(models.SMALL_QUANTISED, (True, False)),
        "fp8 rows deepseek up": partial(uneven_fp8, side="up"),
        "fp8 rows deepseek down": partial(uneven_fp8, side="down"),
        "linear qwen3 output": partial(linear_call, rows=5, out_dim=2048, in_dim=4096),
        "routing qwen3": partial(routing_call, rows=300, experts=128, routing=QWEN3_ROUTING),
        "routing gpt-oss": partial(routing_call, rows=300, experts=32, routing=GPT_OSS_ROUTING),
        "routing deepseek": partial(routing_call, rows=300, experts=256, routing=DEEPSEEK_ROUTING),
        "norm 2048": partial(norm_call, rows=300, hidden=2048),
        "norm 2880": partial(norm_call, rows=300, hidden=2880),
        "norm 7168": partial(norm_call, rows=300, hidden=7168),
        "rotary qwen3": partial(rotary_call, rows=300, heads=32, kv_heads=4, dim=128),
        "rotary deepseek": partial(rotary_call, rows=300, heads=128, kv_heads=1, dim=64, is_interleaved=True),
        "write qwen3": partial(write_call, rows=300, kv_heads=4, dim=128),
        "write latents": partial(write_call, rows=300, kv_heads=1, dim=576, has_values=False),
        "permute qwen3": partial(permute_call, rows=300, choices=8, slots=128),
        "permute deepseek": partial(permute_call, rows=300, choices=8, slots=32),
        "combine qwen3": partial(combine_call, rows=300, choices=8, hidden=2048),
        "combine gpt-oss": partial(combine_call, rows=300, choices=4, hidden=2880),
        "sampling qwen3": partial(sampling_call, rows=64, vocabulary=151936),
        "sampling gpt-oss": partial(sampling_call, rows=64, vocabulary=201088),
    }


def timed_cases(setting: Setting) -> dict[str, list[TimedCase]]:
    """Return groups of cases; a group is one unit of the day. Groups with goals come first."""
    if setting.is_tiny:
        return {f"tiny {name}": [TimedCase(name, make)] for name, make in _tiny_timed().items()}
    return {
        "decode qwen3": _decodes(),
        **{f"grouped {model} {side}": _grouped(shape, side) for model, shape in models.EXPERTS.items() for side in ("up", "down")},
        **{f"fp8 rows deepseek {side}": _fp8(side) for side in ("up", "down")},
        "batch-invariant": _invariant(),
        "latents deepseek": [
            TimedCase(f"latents b{batch} at {context}", latent_maker(models.DEEPSEEK, batch, context))
            for batch, context in ((1, 2048), (32, 2048), (128, 2048), (1, 32768), (32, 32768))
        ],
        "decode gpt-oss": [
            TimedCase(f"gpt-oss b{batch} at {context}{words}", decode_maker(shape, batch, context))
            for shape, words in ((models.GPT_OSS, ""), (models.GPT_OSS_WINDOW, ", window 128"))
            for batch, context in ((1, 2048), (32, 2048), (256, 2048), (32, 32768))
        ],
        "prefill": _prefills(),
        "rows": _rows(),
        "sampling": [
            TimedCase(f"{kind}, {rows} rows", partial(sampling_call, rows=rows, vocabulary=151936, kinds=[kind]))
            for kind in ("greedy", "temperature", "top k and p", "top p")
            for rows in (1, 32, 256)
        ],
    }  # fmt: skip


def _decodes() -> list[TimedCase]:
    goal = {"of_copy": 0.85}
    grid = [(batch, 2048) for batch in (256, 128, 32, 8, 1)] + [
        (32, 8192),
        (1, 8192),
        (32, 32768),
        (1, 32768),
    ]
    return [
        TimedCase(
            f"qwen3 b{batch} at {context}",
            decode_maker(
                models.QWEN3, batch, context, with_peers=(batch, context) in ((1, 2048), (32, 2048))
            ),
            goal if batch * context >= 2**16 else {},  # smaller ones are not bound by memory
        )
        for batch, context in grid
    ]


def _grouped(shape: ExpertShape, side: str) -> list[TimedCase]:
    cases = [TimedCase(f"{side}, 1 row for 8 experts", decoded_maker(shape, 8, side))]
    for rows in (1, 4, 16, 32, 64, 256, 1024, 4096):
        goals = {"x grouped_mm": 1.1} if rows < _FEW_ROWS and shape.form == "plain" else {}
        if rows >= _MANY_ROWS:
            goals = {"of_rate": 0.85}
        cases.append(TimedCase(f"{side}, {rows} rows per expert", grouped_maker(shape, rows, side), goals))
    return cases


def _fp8(side: str) -> list[TimedCase]:
    return [
        TimedCase(
            f"{side}, {rows} rows per expert", fp8_maker(models.DEEPSEEK_EXPERTS, rows, side),
            {"x scaled_mm": 1 / 1.5} if rows >= _MANY_FP8_ROWS else {},
        )
        for rows in (1, 16, 32, 64, 96, 256, 1024)
    ]  # fmt: skip


def _invariant() -> list[TimedCase]:
    """Return the kernels that differ with --batch-invariant. Shorter splits would fill a GPU with a small batch."""
    attention = partial(decode_call, shape=models.QWEN3, is_invariant=True)
    return [
        *(
            TimedCase(
                f"qwen3 b{batch} at 2048, splits of {tokens}",
                partial(attention, contexts=[2048] * batch, split_tokens=tokens),
            )
            for tokens in (256, 128)
            for batch in (1, 8, 32, 128, 256)
        ),
        *(
            TimedCase(
                f"linear {words}, {rows} rows", partial(linear_call, rows=rows, out_dim=out_dim, in_dim=4096)
            )
            for words, out_dim in (("qwen3 output", 2048), ("gpt-oss output", 2880))
            for rows in (1, 8, 32)
        ),
    ]


def _prefills() -> list[TimedCase]:
    makers = {
        "qwen3 2048": prefill_maker(models.QWEN3, (0, 2048), with_peers=True),
        "qwen3 8192": prefill_maker(models.QWEN3, (0, 8192), with_peers=True),
        "qwen3 2048 behind 6144": prefill_maker(models.QWEN3, (6144, 2048)),
        "qwen3 16 x 128": prefill_maker(models.QWEN3, *[(0, 128)] * 16),
        "gpt-oss 8192": prefill_maker(models.GPT_OSS, (0, 8192)),
        "gpt-oss 8192, window 128": prefill_maker(models.GPT_OSS_WINDOW, (0, 8192)),
    }
    return [TimedCase(name, make) for name, make in makers.items()]


def _rows() -> list[TimedCase]:
    makers: dict[str, MakeCall] = {}
    for rows in (1, 32, 256, 8192):
        makers |= {
            f"norm 2048, {rows} rows": partial(norm_call, rows=rows, hidden=2048),
            f"rotary qwen3, {rows} rows": partial(rotary_call, rows=rows, heads=32, kv_heads=4, dim=128),
            f"routing qwen3, {rows} rows": partial(
                routing_call, rows=rows, experts=128, routing=QWEN3_ROUTING
            ),
            f"routing deepseek, {rows} rows": partial(
                routing_call, rows=rows, experts=256, routing=DEEPSEEK_ROUTING
            ),
            f"write qwen3, {rows} rows": partial(write_call, rows=rows, kv_heads=4, dim=128),
            f"permute qwen3, {rows} rows": partial(permute_call, rows=rows, choices=8, slots=128),
            f"combine qwen3, {rows} rows": partial(combine_call, rows=rows, choices=8, hidden=2048),
        }
    return [TimedCase(name, make) for name, make in makers.items()]


def _quantised(shape: ExpertShape, kinds: Sequence[bool]) -> dict[str, MakeCall]:
    """Return a case per format and kind of step: decode or not."""
    return {
        f"grouped {form}, {'decode' if is_decode else 'prefill'} tile": uneven_maker(
            shape._replace(form=form), "up", is_decode=is_decode
        )
        for form in FORMS
        for is_decode in kinds
    }


def _tiny_checked() -> dict[str, MakeCall]:
    contexts = (1, 16, 33)
    return {
        "decode": partial(decode_call, shape=models.TINY_ATTENTION, contexts=contexts),
        "decode, sinks": partial(decode_call, shape=models.TINY_SINKS, contexts=contexts),
        "latents": partial(latent_call, shape=models.TINY_LATENT, contexts=contexts),
        "prefill": prefill_maker(models.TINY_SINKS, (0, 5), (20, 3)),
        "grouped up": uneven_maker(models.TINY_BIASED, "up", is_decode=True),
        "grouped down": uneven_maker(models.TINY_EXPERTS, "down", is_decode=False),
        **_quantised(models.TINY_QUANTISED, (True,)),
        "fp8 rows up": partial(fp8_call, shape=models.TINY_FP8, counts=[3, 40], side="up"),
        "fp8 rows down": partial(fp8_call, shape=models.TINY_FP8, counts=[3, 200], side="down"),
        **_tiny_rows(),
    }


def _tiny_timed() -> dict[str, MakeCall]:
    return {
        "decode": decode_maker(models.TINY_ATTENTION, 2, 20),
        "latents": latent_maker(models.TINY_LATENT, 1, 20),
        "prefill": prefill_maker(models.TINY_ATTENTION, (0, 5)),
        "grouped": grouped_maker(models.TINY_EXPERTS, 2, "up"),
        **_tiny_rows(),
    }


def _tiny_rows() -> dict[str, MakeCall]:
    return {
        "routing": partial(
            routing_call,
            rows=3,
            experts=16,
            routing=replace(DEEPSEEK_ROUTING, choices=3, groups=4, groups_chosen=2),
        ),
        "norm": partial(norm_call, rows=3, hidden=48),
        "linear": partial(linear_call, rows=3, out_dim=32, in_dim=48),
        "rotary": partial(rotary_call, rows=3, heads=2, kv_heads=1, dim=16),
        "write": partial(write_call, rows=5, kv_heads=2, dim=24),
        "permute": partial(permute_call, rows=5, choices=2, slots=3),
        "combine": partial(combine_call, rows=5, choices=2, hidden=48),
        "sampling": partial(sampling_call, rows=4, vocabulary=96),
    }
