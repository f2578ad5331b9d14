"""Sampling against slow, obvious oracles, and its independence from the batch."""

import math
from collections.abc import Sequence as Rows

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.request import Request, SamplingParams, TokenBias
from scheduler.policy.sequence import Sequence
from scheduler.sampling.sampler import prompt_logprobs, sample

VOCABULARY = 500


def sequence(output_ids: tuple[int, ...] = (), **params: object) -> Sequence:
    """Return a sequence with prompt 1, 2, 3."""
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
    """Return seeded logits with a realistic spread."""
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def histogram(row: torch.Tensor, draws: int = 4000, **params: object) -> np.ndarray:
    """Return the frequencies of tokens over seeds."""
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


def test_penalties_come_in_vllm_s_order_repetition_first() -> None:
    row = torch.zeros(1, VOCABULARY)
    row[0, 9], row[0, 10] = 4.0, 2.9
    both = {"temperature": 0.0, "repetition_penalty": 2.0, "presence_penalty": -1.0}
    # 4 / 2 + 1 = 3 beats 2.9. In the other order, (4 + 1) / 2 = 2.5 would not.
    assert sample(row.clone(), [sequence((9,), **both)]).token_ids == [9]


def test_the_nucleus_is_of_the_mass_that_min_p_leaves() -> None:
    row = torch.tensor([[0.5, 0.3, 0.05, 0.05, 0.05, 0.05]]).log()
    # Without min_p, 0.75 of the mass needs both heads. min_p leaves 0.8, and the first head alone has 0.62.
    assert set(np.flatnonzero(histogram(row, draws=300, top_p=0.75)).tolist()) == {0, 1}
    assert set(np.flatnonzero(histogram(row, draws=300, top_p=0.62, min_p=0.5)).tolist()) == {0}
    assert set(np.flatnonzero(histogram(row, draws=300, top_p=0.62)).tolist()) == {0, 1}


def test_top_k_with_min_p_draws_what_both_allow() -> None:
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert set(np.flatnonzero(histogram(row, draws=300, top_k=3, min_p=0.6)).tolist()) == {0, 1}


def test_rules_hold_in_greedy_and_in_drawn_tokens() -> None:
    row = logits()
    best = int(row.argmax())
    for temperature in (0.0, 1.0):
        rules = {"temperature": temperature, "allowed_token_ids": (3, 4, best), "bad_words": ((best,),)}
        tokens = {sample(row.clone(), [sequence(seed=seed, **rules)]).token_ids[0] for seed in range(60)}
        assert tokens == ({3, 4} if temperature else {3 if row[0, 3] > row[0, 4] else 4})
    biased = {"temperature": 0.0, "logit_bias": (TokenBias(77, 100.0),)}
    assert sample(row.clone(), [sequence(**biased)]).token_ids == [77]


class OneWay:
    """A structure that allows only token 5."""

    has_ended = is_late = False
    is_ready, failure = True, None

    def begin_step(self) -> None: ...

    def mask(self, logits_V: np.ndarray, after: Rows[int] = ()) -> None:
        kept = logits_V[5]
        logits_V.fill(-np.inf)
        logits_V[5] = kept

    def look_ahead(self, drafts: Rows[int]) -> int:
        return len(drafts) if set(drafts) <= {5} else [each == 5 for each in drafts].index(False)

    def advance(self, token_id: int) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "rules",
    [
        {"bad_words": ((5,),)},
        {"allowed_token_ids": (6, 7)},
        {"min_tokens": 3, "stop_token_ids": (5,)},
        {"logit_bias": (TokenBias(5, -100.0), TokenBias(6, 100.0))},
        {"repetition_penalty": 2.0, "presence_penalty": 2.0},
    ],
)
def test_a_structure_holds_whatever_the_rules_say(temperature: float, rules: dict[str, object]) -> None:
    held = sequence(temperature=temperature, num_logprobs=1, **rules)
    held.matcher = OneWay()
    row = logits()
    sampled = sample(row.clone(), [held])
    assert sampled.token_ids == [5]
    assert sampled.logprobs[0] is not None and sampled.logprobs[0].top_ids == [int(row.argmax())]


def test_a_single_token_left_is_drawn_whatever_the_filters() -> None:
    row = logits()
    for filters in (
        {},
        {"top_k": 50},
        {"top_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.5},
    ):
        tokens = {
            sample(row.clone(), [sequence(seed=seed, allowed_token_ids=(9,), **filters)]).token_ids[0]
            for seed in range(20)
        }
        assert tokens == {9}, filters


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
    ruled = {"allowed_token_ids": (4,), "logit_bias": (TokenBias(4, 50.0),)}
    [entry] = sample(row.clone(), [sequence(num_logprobs=1, **ruled)]).logprobs
    assert entry is not None and entry.top_ids == [int(wanted.argmax())]
    assert math.isclose(entry.logprob, float(wanted[4]), abs_tol=1e-6), "rules must not change logprobs"
    assert sample(row.clone(), [sequence()]).logprobs == [None]


def test_logprobs_of_given_ids_replace_the_likeliest() -> None:
    row = logits()
    wanted = row[0].log_softmax(-1)
    asked = {"num_logprobs": 1, "logprob_token_ids": (400, 2, 77)}
    [entry] = sample(row.clone(), [sequence(**asked)]).logprobs
    assert entry is not None and entry.top_ids == [400, 2, 77]
    assert np.allclose(entry.top_logprobs, wanted[[400, 2, 77]], atol=1e-6)


def test_prompt_logprobs_have_the_rank_among_all_tokens() -> None:
    rows = logits(3, seed=5)
    wanted = rows.log_softmax(-1)
    best = int(rows[2].argmax())
    entries = prompt_logprobs(rows, [0, 499, best], 2)
    for row, entry in zip(wanted, entries, strict=True):
        assert math.isclose(entry.logprob, float(row[entry.token_id]), abs_tol=1e-6)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        assert entry.top_ids == row.argsort(descending=True)[:2].tolist()
    assert entries[2].rank == 1
    assert [entry.top_ids for entry in prompt_logprobs(rows, [0, 499, best], 0)] == [[], [], []]
    assert prompt_logprobs(rows, [0, 499, best], 1)[0].top_ids == entries[0].top_ids[:1]


# With any values in the ranges that the front accepts, a row is sampled. Odd numbers in one request must not end the
# rank, and with it the service of all others.
FEW = 64
TINY = (5e-324, 1e-320, 1e-45, 1e-30, 1e-6)
ROWS = {
    "as models have them": torch.linspace(-8, 8, FEW),
    "all equal": torch.zeros(FEW),
    "one is far larger": torch.nn.functional.one_hot(torch.tensor(7), FEW) * 1e4,
    "huge": torch.linspace(-3e38, 3e38, FEW),
    "most are excluded": torch.full((FEW,), -math.inf).index_fill(0, torch.tensor([3]), 1.0),
    "all are excluded": torch.full((FEW,), -math.inf),
}


def values(low: float, high: float) -> st.SearchStrategy[float]:
    """Return a strategy for a range that favours its ends and the tiniest numbers above 0."""
    tiny = [each for each in TINY if low <= each <= high]
    return st.floats(low, high) | st.sampled_from([low, high, *tiny])


PARAMS = st.fixed_dictionaries(
    {
        "temperature": values(0, 100),
        "top_p": values(5e-324, 1),
        "top_k": st.sampled_from([0, 1, 5, FEW, 2**31 - 1]),
        "min_p": values(0, 1),
        "presence_penalty": values(-2, 2),
        "frequency_penalty": values(-2, 2),
        "repetition_penalty": values(5e-324, 100),
        "min_tokens": st.integers(0, 3),
        "stop_token_ids": st.sampled_from([(), (3,), tuple(range(FEW))]),
        "num_logprobs": st.sampled_from([None, 0, 3, FEW + 1]),
        "seed": st.sampled_from([0, 2**63, 2**64 - 1]),
    }
)


@pytest.mark.crossed("row", every=2)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about infinities
@settings(max_examples=120, deadline=None)
@given(params=PARAMS)
def test_every_row_is_sampled_whatever_is_asked(row: str, params: dict[str, object]) -> None:
    sampled = sample(ROWS[row].clone().unsqueeze(0), [sequence((5, 5, 6), **params)])
    assert 0 <= sampled.token_ids[0] < FEW


@pytest.mark.parametrize("temperature", TINY)
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    row = ROWS["as models have them"].clone().unsqueeze(0)
    assert sample(row, [sequence(temperature=temperature, top_p=0.9)]).token_ids == [FEW - 1]
