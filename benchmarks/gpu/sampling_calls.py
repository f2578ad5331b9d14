"""Sampling on the device: a step's rows by one set of launches, against the CPU's sampler, token for token.

Legend: R rows, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call, bytes_of
from benchmarks.gpu.served import sequence_of
from scheduler.policy.request import SamplingParams
from scheduler.sampling.gpu.draws import plan_draws
from scheduler.sampling.gpu.sampling import SamplingScratch, choose_tokens
from scheduler.sampling.sampler import sample

KINDS = {
    "greedy": SamplingParams(max_tokens=8, temperature=0.0),
    "temperature": SamplingParams(max_tokens=8, temperature=0.8),
    "top p": SamplingParams(max_tokens=8, temperature=0.8, top_p=0.95),
    "top k": SamplingParams(max_tokens=8, temperature=1.0, top_k=50, min_p=0.02),
}


def sampling_call(
    bench: Bench, seed: int, *, rows: int, vocabulary: int, kinds: Sequence[str] = tuple(KINDS)
) -> Call:
    """Choose tokens; rows take turns at the kinds, and have seeds of their own."""
    generator = bench.generator(seed)
    logits = torch.randn(rows, vocabulary, generator=generator, device=bench.device).mul_(3.0)
    params = [
        dataclasses.replace(KINDS[kinds[row % len(kinds)]], seed=1000 * seed + row) for row in range(rows)
    ]
    sequences = [sequence_of([1, 2, 3], [], each) for each in params]
    draws = plan_draws(sequences, vocabulary, bench.device)
    scratch = SamplingScratch(rows, vocabulary, bench.device)
    out = torch.empty(rows, dtype=torch.int64, device=bench.device)

    def oracle(shift: int = 0) -> Tensor:
        chosen = sample(logits.roll(shift, 0).cpu(), sequences).token_ids
        return bench.integers(chosen).float()

    return Call(
        run=functools.partial(choose_tokens, logits, draws, scratch, out=out),
        prepare=functools.partial(out.fill_, -1),
        result=lambda ids: ids.float(),
        oracle=oracle,
        control=functools.partial(oracle, 1),
        num_bytes=bytes_of(logits),
    )
