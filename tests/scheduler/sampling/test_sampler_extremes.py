"""Whatever a client may ask for within the ranges that the front lets through, a row is sampled: one request's odd
numbers must not end the rank, and with it everybody's service."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.request import Request, SamplingParams
from scheduler.policy.sequence import Sequence
from scheduler.sampling.sampler import sample

VOCABULARY = 64
TINY = (5e-324, 1e-320, 1e-45, 1e-30, 1e-6)
ROWS = {
    "as models have them": torch.linspace(-8, 8, VOCABULARY),
    "all equal": torch.zeros(VOCABULARY),
    "one stands out": torch.nn.functional.one_hot(torch.tensor(7), VOCABULARY) * 1e4,
    "huge": torch.linspace(-3e38, 3e38, VOCABULARY),
    "most are excluded": torch.full((VOCABULARY,), -math.inf).index_fill(0, torch.tensor([3]), 1.0),
    "all are excluded": torch.full((VOCABULARY,), -math.inf),
}


def values(low: float, high: float) -> st.SearchStrategy[float]:
    """Anything in a range, its ends and the tiniest numbers above 0 often."""
    tiny = [each for each in TINY if low <= each <= high]
    return st.floats(low, high) | st.sampled_from([low, high, *tiny])


PARAMS = st.fixed_dictionaries(
    {
        "temperature": values(0, 100),
        "top_p": values(5e-324, 1),
        "top_k": st.sampled_from([0, 1, 5, VOCABULARY, 2**31 - 1]),
        "min_p": values(0, 1),
        "presence_penalty": values(-2, 2),
        "frequency_penalty": values(-2, 2),
        "repetition_penalty": values(5e-324, 100),
        "min_tokens": st.integers(0, 3),
        "stop_token_ids": st.sampled_from([(), (3,), tuple(range(VOCABULARY))]),
        "num_logprobs": st.sampled_from([None, 0, 3, VOCABULARY + 1]),
        "seed": st.sampled_from([0, 2**63, 2**64 - 1]),
    }
)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
@settings(max_examples=120, deadline=None)
@given(params=PARAMS)
def test_every_row_is_sampled_whatever_is_asked(row: str, params: dict[str, object]) -> None:
    request = Request(
        request_id="r",
        prompt_ids=(1, 2, 3),
        params=SamplingParams(max_tokens=10, **params),  # type: ignore[arg-type]
        arrival_s=0.0,
    )
    sequence = Sequence.from_request(request)
    sequence.token_ids += (5, 5, 6)
    sampled = sample(ROWS[row].clone().unsqueeze(0), [sequence])
    assert 0 <= sampled.token_ids[0] < VOCABULARY


@pytest.mark.parametrize("temperature", TINY)
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    params = SamplingParams(max_tokens=2, temperature=temperature, top_p=0.9)
    request = Request(request_id="r", prompt_ids=(1,), params=params, arrival_s=0.0)
    row = ROWS["as models have them"].clone().unsqueeze(0)
    assert sample(row, [Sequence.from_request(request)]).token_ids == [VOCABULARY - 1]
