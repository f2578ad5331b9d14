"""Sampling on a GPU model's device, on CPU tensors here: the CPU sampler's tokens and logprobs, with one read per step."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dispatch.gpu.host_copy import HostCopy
from scheduler.policy.request import Logprobs, TokenBias
from scheduler.policy.sequence import Sequence
from scheduler.sampling import device_sampler, plan
from scheduler.sampling.device_sampler import (
    DeviceSampler,
    choose_tokens,
    measure,
    measured_size,
    read_measured,
)
from scheduler.sampling.plan import LogprobQuery, make_plan
from scheduler.sampling.sampler import RowLogprobs, Sampled, prompt_logprobs, sample
from tests.scheduler.sampling.test_sampler import logits
from tests.scheduler.sampling.test_sampler import sequence as plain_sequence
from tests.support.models.no_reads import CountedReads, NoReads
from tests.support.requests.logprobs import close

VOCABULARY = 500
CPU = torch.device("cpu")
INFINITE = float("inf")
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
    """A structure that allows only even ids."""

    has_ended: bool = False
    failure: str | None = None
    seen: list[int] = field(default_factory=list)
    is_late: bool = False
    is_ready: bool = True

    def begin_step(self) -> None: ...

    def mask(self, logits_V: np.ndarray, after: Rows[int] = ()) -> None:
        logits_V[1::2] = -np.inf

    def look_ahead(self, drafts: Rows[int]) -> int:
        return next((place for place, each in enumerate(drafts) if each % 2), len(drafts))

    def advance(self, token_id: int) -> None:
        self.seen.append(token_id)


def sequence(output_ids: tuple[int, ...] = (), *, is_structured: bool = False, **params: object) -> Sequence:
    """Return a sequence with prompt 1, 2, 3."""
    made = plain_sequence(output_ids, **params)
    made.matcher = EvenIds() if is_structured else None
    return made


def choose(rows: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """Return the tokens, found without a read."""
    made, given = make_plan(sequences, rows.shape[1], CPU), rows.clone()
    with NoReads():
        ids = choose_tokens(given, made)
    chosen: list[int] = ids.tolist()
    return chosen


class Both(NamedTuple):
    """Results of both samplers, and the host's reads from the device for one of them."""

    ours: Sampled
    wanted: Sampled
    reads: list[str]
    num_host_rows: int


def sample_both(rows: torch.Tensor, sequences: list[Sequence]) -> Both:
    sampler, counted, given = DeviceSampler(CPU), CountedReads(), rows.clone()
    with counted:
        ours = sampler.sample(given, sequences)
    return Both(ours, sample(rows.clone(), sequences), counted.reads, sampler.num_host_rows)


def check_same(both: Both) -> None:
    assert both.ours.token_ids == both.wanted.token_ids
    for ours, wanted in zip(both.ours.logprobs, both.wanted.logprobs, strict=True):
        assert close(ours, wanted), (ours, wanted)


@pytest.mark.parametrize("seed", range(8))
def test_drawn_tokens_are_those_of_the_cpu_for_all_ways_of_drawing(seed: int) -> None:
    sequences = [sequence((4,), seed=100 * seed + each, **params) for params in DRAWN for each in range(9)]
    rows = logits(len(sequences), seed)
    assert choose(rows, sequences) == sample(rows.clone(), sequences).token_ids


def test_a_row_is_sampled_and_measured_alike_alone_and_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [sequence(seed=5, num_logprobs=3, **params) for params in DRAWN]
    rows = logits(len(sequences), seed=2)
    together = DeviceSampler(CPU).sample(rows.clone(), sequences)
    monkeypatch.setattr(plan, "MOST_ROWS", 3)
    in_parts = DeviceSampler(CPU).sample(rows.clone(), sequences)
    alone = [DeviceSampler(CPU).sample(rows[[at]], [each]) for at, each in enumerate(sequences)]
    assert together == in_parts
    assert together.token_ids == [each.token_ids[0] for each in alone]
    assert together.logprobs == [each.logprobs[0] for each in alone]


def test_odd_rows_get_the_tokens_that_they_get_on_the_cpu() -> None:
    """Equal logits, NaN, infinities, only -inf, and one token with all the weight."""
    rows = torch.zeros(6, VOCABULARY)
    rows[1, [9, 40]] = float("nan")
    rows[2] = -INFINITE
    rows[3, 77] = INFINITE
    rows[4] = -INFINITE
    rows[4, 123] = -4.0
    rows[5, 300:] = -200.0
    for fields in (
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0.0},
    ):
        sequences = [sequence(seed=seed, **fields) for seed in range(6)]
        assert choose(rows, sequences) == sample(rows.clone(), sequences).token_ids


@pytest.mark.parametrize(
    ("rows", "start"),
    [
        (torch.zeros(1, 8).half(), "logits_RV is torch.float16"),
        (torch.zeros(8, 1).T.expand(2, 8), "logits_RV is torch.float32 with strides"),
    ],
)
def test_logits_of_another_kind_are_refused(rows: torch.Tensor, start: str) -> None:
    with pytest.raises(ValueError, match=start):
        choose_tokens(rows, make_plan([sequence(temperature=0.0)], 8, CPU))


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_fields_is_the_cpus(seed: int) -> None:
    choice = np.random.default_rng(seed)
    more: list[dict[str, Any]] = [{}, {"num_logprobs": 3}, {"num_logprobs": 0, "logprob_token_ids": (1, 30)}]
    sequences = []
    for _ in range(40):
        drawn, ruled = (kinds[choice.integers(len(kinds))] for kinds in (DRAWN, RULED))
        fields = {**ruled, **drawn, "seed": int(choice.integers(2**63)), **more[choice.integers(3)]}
        if choice.random() < 0.3:
            fields["temperature"] = 0.0
        outputs = tuple(choice.integers(3, 40, choice.integers(9)).tolist())
        sequences.append(sequence(outputs, is_structured=choice.random() < 0.3, **fields))
    both = sample_both(logits(len(sequences), seed), sequences)
    check_same(both)
    assert both.reads == ["numpy of a tensor"]


def test_a_row_of_which_nothing_is_left_gets_the_cpus_token_and_is_counted() -> None:
    """The second row's rule allows only tokens that the model gives -inf, so the rule does not apply."""
    rows = logits(3, seed=6)
    rows[1, [5, 6]] = -INFINITE
    rows[2, 5] = -INFINITE
    fields: dict[str, Any] = {"temperature": 0.0, "allowed_token_ids": (5, 6)}
    both = sample_both(
        rows, [sequence(temperature=0.0), sequence(num_logprobs=1, **fields), sequence(**fields)]
    )
    check_same(both)
    assert both.ours.token_ids[1] not in (5, 6) and both.ours.token_ids[2] == 6
    assert both.num_host_rows == 1


def test_a_step_that_samples_nothing_is_waited_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is counted, and reported, when the device is done."""
    copies: list[int] = []

    class Counted(HostCopy):
        def read(self) -> np.ndarray:
            copies.append(1)
            found: np.ndarray = super().read()
            return found

    monkeypatch.setattr(device_sampler, "HostCopy", Counted)
    drawing = DeviceSampler(CPU).begin(torch.empty(0, VOCABULARY), [])
    assert drawing.is_settled and not copies
    assert drawing.read() == Sampled([], []) and len(copies) == 1


def test_only_rows_that_the_cpu_may_choose_again_leave_the_tokens_open() -> None:
    """The next step may take settled tokens from the device."""
    for fields, is_settled in (
        ({"temperature": 0.0}, True),
        ({"temperature": 1.0, "top_p": 0.5, "frequency_penalty": 1.0, "num_logprobs": 2}, True),
        ({"temperature": 0.0, "allowed_token_ids": (5, 6)}, False),
    ):
        drawing = DeviceSampler(CPU).begin(logits(2, seed=3), [sequence(), sequence(**fields)])
        assert drawing.is_settled == is_settled
        assert drawing.token_R.tolist() == drawing.read().token_ids


def test_a_warm_up_samples_in_every_way() -> None:
    seen = []

    def note(rows: torch.Tensor, made: plan.SamplingPlan) -> torch.Tensor:
        ways = tuple(draw.is_filtered for draw in made.draws)
        seen.append((ways, bool(made.masked_rows), bool(made.edited_E.numel()), bool(made.asked)))
        return choose_tokens(rows, made)

    DeviceSampler(CPU, note).warm_up(40)
    # Greedy, greedy with rules and logprobs, and drawn without and with filters.
    assert seen == [((), *[False] * 3), ((), *[True] * 3), ((False, True), *[False] * 3)]


def test_prompt_tokens_get_the_cpus_logprobs_and_ranks() -> None:
    rows, next_ids, counted = logits(70, seed=7), [index * 7 % 500 for index in range(70)], CountedReads()
    with counted:
        ours = DeviceSampler(CPU).score(rows, next_ids, 4)
    wanted = prompt_logprobs(rows, next_ids, 4)
    assert all(close(one, other) for one, other in zip(ours, wanted, strict=True))
    assert counted.reads == ["numpy of a tensor"] and min(each.rank for each in ours) > 0


TOKENS = [3, 499, 0, 7, 250]


def odd_logits() -> torch.Tensor:
    """Return rows with equal logits at the top-k border, both zeros, -inf, and one token with all the weight."""
    rows = logits(5, seed=8)
    rows[1] = rows[1].round()
    rows[2, ::2], rows[2, 1::2] = 0.0, -0.0
    rows[3, 10:] = -INFINITE
    rows[4, 250] = 300.0
    return rows


@pytest.mark.parametrize("with_rank", [False, True])
def test_numbers_ids_and_ranks_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch, with_rank: bool) -> None:
    """Rows request different numbers of top tokens, or ids, in an order other than that of the batch."""
    monkeypatch.setattr("scheduler.sampling.device_sampler.MOST_ROWS", 2)  # rows come in several parts
    rows, order = odd_logits(), [4, 1, 0, 3, 2]
    kinds: list[tuple[int, tuple[int, ...]]] = [(9, ()), (40, ()), (2, ()), (20, (3, 2, 499)), (0, ())]
    asked = [LogprobQuery(place, place, *kinds[place]) for place in order]
    found = measure(rows, asked, torch.tensor(TOKENS)).flatten().numpy()
    assert len(found) == measured_size(asked, VOCABULARY)
    told = read_measured(found, asked, TOKENS, VOCABULARY, with_rank=with_rank)
    for place, each, ours in zip(order, asked, told, strict=True):
        row = rows[place].numpy()  # of equal logits at the border the CPU may pick others; here lower ids win
        ids = each.ids or np.lexsort((np.arange(VOCABULARY), -row))[: each.num_top].tolist()
        wanted: Logprobs = RowLogprobs(row).of(TOKENS[place], 0, ids=ids, with_rank=with_rank)
        assert close(ours, wanted), (ours, wanted)
    assert {len(ours.top_ids) for ours in told} == {9, 40, 2, 3, 0}
    assert any(ours.rank > 1 for ours in told) == with_rank


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    rows, asked = torch.tensor([[0.5, 2.0, 0.5]]), [LogprobQuery(0, 0, 20)]
    found = measure(rows, asked, torch.tensor([2])).flatten().numpy()
    ours = read_measured(found, asked, [2], 3)[0]
    assert close(ours, RowLogprobs(rows[0].numpy()).of(2, 20)) and ours.top_ids == [1, 0, 2]
