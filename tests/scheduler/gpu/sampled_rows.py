"""Rows of logits and requests with every way of sampling, for the GPU's sampling and the CPU's beside it."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import torch

from scheduler.policy.request import Logprobs, Request, SamplingParams, TokenBias
from scheduler.policy.sequence import Sequence

VOCABULARY = 500
DRAWN: list[dict[str, object]] = [
    {"temperature": 1.0},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.3},
    {"temperature": 1e-7},
    {"temperature": 50.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 2.0, "top_k": 10_000},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 4.0, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.5, "min_p": 1e-4, "top_p": 0.9},
]
RULED: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 0.0, "frequency_penalty": 0.9, "presence_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 0.6, "frequency_penalty": -0.4},
    {"temperature": 0.0, "allowed_token_ids": (5, 6, 499)},
    {"temperature": 1.0, "allowed_token_ids": (5, 6, 7, 8), "bad_words": ((6,), (30, 5))},
    {"temperature": 1.0, "logit_bias": (TokenBias(3, 60.0), TokenBias(4, -80.0))},
    {"temperature": 0.0, "stop_token_ids": (2,), "min_tokens": 9, "logit_bias": (TokenBias(2, 90.0),)},
]


@dataclass
class EvenIds:
    """A structure that allows even ids only."""

    has_ended: bool = False
    failure: str = ""
    seen: list[int] = field(default_factory=list)

    def mask(self, logits_V: np.ndarray) -> None:
        """Forbid odd ids."""
        logits_V[1::2] = -np.inf

    def advance(self, token_id: int) -> None:
        """Note a token."""
        self.seen.append(token_id)


def sequence(output_ids: tuple[int, ...] = (), *, is_structured: bool = False, **params: object) -> Sequence:
    """A request with prompt 1, 2, 3."""
    made = Sequence.from_request(
        Request(
            request_id="r",
            prompt_ids=(1, 2, 3),
            params=SamplingParams(max_tokens=10, **params),  # type: ignore[arg-type]
            arrival_s=0.0,
        ),
        EvenIds() if is_structured else None,
    )
    made.token_ids += output_ids
    return made


def drawn_rows(seeds: Rows[int], kinds: slice) -> list[Sequence]:
    """Some ways of drawing, at several seeds."""
    return [sequence((4,), seed=seed, **params) for params in DRAWN[kinds] for seed in seeds]


def ruled_rows() -> list[Sequence]:
    """Every rule and penalty, with outputs that they speak of; the last two rows follow a structure."""
    ruled = [sequence((30, 30, 2, 17), seed=3, **params) for params in RULED]
    structured = [{"temperature": 0.0}, {"temperature": 1.0, "logit_bias": (TokenBias(2, 8.0),)}]
    return ruled + [sequence(is_structured=True, **params) for params in structured]


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    """Seeded logits with a spread as models have."""
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def close(ours: Logprobs | None, wanted: Logprobs | None) -> bool:
    """Whether two say the same: exponentials and their sum may round otherwise, a few times 1e-8 of a logarithm."""
    if ours is None or wanted is None:
        return ours is wanted
    numbers = [
        np.array([each.logprob, *each.top_logprobs], np.float64) for each in (ours, wanted)
    ]  # float32 but for the first: an ulp at 100 is 8e-6
    return (ours.token_id, ours.top_ids, ours.rank) == (
        wanted.token_id,
        wanted.top_ids,
        wanted.rank,
    ) and bool(np.allclose(*numbers, rtol=2e-7, atol=1e-6))
