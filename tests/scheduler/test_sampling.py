"""Sampling against slow, obvious oracles, and its independence of the batch."""

import math

import numpy as np
import torch

from scheduler.request import Request, SamplingParams
from scheduler.sampling import sample
from scheduler.sequence import Sequence

VOCABULARY = 500


def sequence(output_ids: tuple[int, ...] = (), **params: object) -> Sequence:
    """A sequence with prompt 1, 2, 3."""
    made = Sequence.from_request(
        Request(
            request_id="r",
            prompt_ids=(1, 2, 3),
            params=SamplingParams(max_tokens=10, **params),  # type: ignore[arg-type]
            arrival_s=0.0,
        )
    )
    made.token_ids += output_ids
    return made


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Seeded logits with a spread as models have."""
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def histogram(row: torch.Tensor, draws: int = 4000, **params: object) -> np.ndarray:
    """Frequencies of tokens over seeds."""
    counts = np.zeros(VOCABULARY)
    for seed in range(draws):
        counts[sample(row.clone(), [sequence(seed=seed, **params)]).token_ids[0]] += 1
    return counts / draws


def test_temperature_zero_takes_the_likeliest() -> None:
    rows = logits(3)
    assert sample(rows.clone(), [sequence(temperature=0.0)] * 3).token_ids == rows.argmax(-1).tolist()


def test_frequencies_follow_the_softmax_at_the_given_temperature() -> None:
    row = logits()
    wanted = (row[0] / 1.5).softmax(-1).numpy()
    assert np.abs(histogram(row, temperature=1.5) - wanted).sum() < 0.25


def test_top_k_top_p_and_min_p_draw_only_what_their_definitions_allow() -> None:
    row = logits()
    probabilities = row[0].softmax(-1)
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    allowed = {
        "top_k": set(order[:5].tolist()),
        "top_p": set(order[before < 0.6].tolist()),
        "min_p": set((probabilities >= 0.1 * probabilities.max()).nonzero().flatten().tolist()),
    }
    for name, value in (("top_k", 5), ("top_p", 0.6), ("min_p", 0.1)):
        drawn = set(np.flatnonzero(histogram(row, draws=1500, **{name: value})).tolist())
        assert drawn <= allowed[name]
        assert len(drawn) >= 0.7 * len(allowed[name])


def test_top_p_widens_until_it_has_the_mass_on_flat_logits() -> None:
    row = torch.zeros(1, 4000)
    tokens = {sample(row.clone(), [sequence(seed=seed, top_p=0.999)]).token_ids[0] for seed in range(200)}
    assert max(tokens) > 2500


def test_a_seeded_token_does_not_depend_on_the_batch_or_on_earlier_calls() -> None:
    rows = logits(8, seed=3)
    sequences = [sequence(seed=index, top_p=0.9) for index in range(8)]
    together = sample(rows.clone(), sequences).token_ids
    alone = [sample(rows[i : i + 1].clone(), [sequences[i]]).token_ids[0] for i in reversed(range(8))]
    assert together == alone[::-1]


def test_the_next_position_draws_another_number() -> None:
    row = torch.zeros(1, VOCABULARY)
    tokens = [sample(row.clone(), [sequence((7,) * n, seed=5)]).token_ids[0] for n in range(6)]
    assert len(set(tokens)) > 3


def test_penalties_follow_their_definitions() -> None:
    row = torch.zeros(1, VOCABULARY)
    row[0, 9], row[0, 10] = 2.0, 1.9
    assert sample(row.clone(), [sequence((9,), temperature=0.0, presence_penalty=0.2)]).token_ids == [10]
    assert sample(row.clone(), [sequence((9, 9), temperature=0.0, frequency_penalty=0.06)]).token_ids == [10]
    assert sample(row.clone(), [sequence((9,), temperature=0.0, frequency_penalty=0.06)]).token_ids == [9]
    row[0, 1] = 3.0  # token 1 is in the prompt
    assert sample(row.clone(), [sequence(temperature=0.0, presence_penalty=2.0)]).token_ids == [1]
    assert sample(row.clone(), [sequence(temperature=0.0, repetition_penalty=2.0)]).token_ids == [9]


def test_stop_tokens_are_not_sampled_before_min_tokens() -> None:
    row = logits()
    best = int(row.argmax())
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (best,)}
    assert sample(row.clone(), [sequence((5,), **params)]).token_ids != [best]
    assert sample(row.clone(), [sequence((5, 5), **params)]).token_ids == [best]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    row = logits()
    result = sample(row.clone(), [sequence((4,), num_logprobs=3, temperature=0.7, presence_penalty=1.0)])
    entry, wanted = result.logprobs[0], row[0].log_softmax(-1)
    assert entry is not None
    assert math.isclose(entry.logprob, float(wanted[entry.token_id]), abs_tol=1e-6)
    assert entry.top_ids == wanted.argsort(descending=True)[:3].tolist()
    assert sample(row.clone(), [sequence()]).logprobs == [None]
