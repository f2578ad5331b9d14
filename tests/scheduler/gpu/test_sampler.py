"""What the runner gets from sampling on a GPU is what it gets on the CPU, read by the host at once."""

from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from scheduler.policy.request import Logprobs, TokenBias
from scheduler.policy.sequence import Sequence
from scheduler.sampling.sampler import Sampled, prompt_logprobs, sample
from tests.scheduler.gpu.sampled_rows import DRAWN, RULED, VOCABULARY, close, logits, sequence
from tests.support.no_reads import CountedReads
from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton: pip install -r requirements-dev.txt"
)
CPU = torch.device("cpu")
INFINITE = -float("inf")


class Both(NamedTuple):
    """What both samplers gave, and what the host read of the device for one of them."""

    ours: Sampled
    wanted: Sampled
    reads: list[str]
    num_host_rows: int


def sample_both(rows: torch.Tensor, sequences: list[Sequence]) -> Both:
    from scheduler.sampling.gpu.sampler import DeviceSampler  # noqa: PLC0415 - in the interpreter

    sampler, counted, given = DeviceSampler(len(rows), VOCABULARY, CPU), CountedReads(), rows.clone()
    with counted:
        ours = sampler.sample(given, sequences)
    return Both(ours, sample(rows.clone(), sequences), counted.reads, sampler.num_host_rows)


def check_same(both: Both) -> None:
    assert both.ours.token_ids == both.wanted.token_ids
    for ours, wanted in zip(both.ours.logprobs, both.wanted.logprobs, strict=True):
        assert close(ours, wanted), (ours, wanted)


def plain_step() -> Both:
    return sample_both(logits(3), [sequence(temperature=0.0, num_logprobs=count) for count in (2, None, 0)])


def mixed_step() -> Both:
    """Some rows with logprobs, some that are changed before they are sampled, some of both."""
    sequences = [
        sequence(temperature=0.0, num_logprobs=2),
        sequence(temperature=0.0),
        sequence((7,), temperature=1.0, num_logprobs=0, repetition_penalty=3.0, seed=1),
        sequence(is_structured=True, temperature=0.0, num_logprobs=1),
        sequence((9,), temperature=1.0, seed=2, num_logprobs=3, logprob_token_ids=(4, 2, 499)),
        sequence((4, 4), temperature=0.9, seed=3, min_p=0.01, num_logprobs=5, frequency_penalty=1.0),
        sequence(is_structured=True, temperature=1.0, seed=4, logit_bias=(TokenBias(2, 9.0),)),
        sequence(
            (5,), temperature=0.0, num_logprobs=4, bad_words=((5, 6), (7,)), allowed_token_ids=(6, 7, 8)
        ),
    ]
    return sample_both(logits(len(sequences), seed=4), sequences)


def test_a_step_of_plain_rows_is_the_cpus_with_one_read(interpreter: RankPool) -> None:
    both: Both = interpreter.run(plain_step)[0]
    check_same(both)
    assert both.reads == ["numpy of a tensor"]


def test_logprobs_are_of_the_logits_before_anything_changed_them_with_one_read(interpreter: RankPool) -> None:
    both: Both = interpreter.run(mixed_step)[0]
    check_same(both)
    assert both.reads == ["numpy of a tensor"] and both.num_host_rows == 0


def any_step(seed: int) -> Both:
    """Rows that combine all fields at random."""
    choice = np.random.default_rng(seed)
    more: list[dict[str, Any]] = [{}, {"num_logprobs": 3}, {"num_logprobs": 0, "logprob_token_ids": (1, 30)}]
    sequences = []
    for _ in range(16):
        drawn, ruled = (kinds[choice.integers(len(kinds))] for kinds in (DRAWN, RULED))
        fields = {**ruled, **drawn, "seed": int(choice.integers(2**63)), **more[choice.integers(3)]}
        if choice.random() < 0.3:
            fields["temperature"] = 0.0
        outputs = tuple(choice.integers(3, 40, choice.integers(9)).tolist())
        sequences.append(sequence(outputs, is_structured=choice.random() < 0.3, **fields))
    return sample_both(logits(len(sequences), seed), sequences)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_fields_is_the_cpus(interpreter: RankPool, seed: int) -> None:
    both: Both = interpreter.run(any_step, seed)[0]
    check_same(both)
    assert both.reads == ["numpy of a tensor"]


def step_that_leaves_nothing() -> Both:
    """All that the second row's rule allows is -inf of the model's own, so that the rule gives way."""
    rows = logits(3, seed=6)
    rows[1, [5, 6]] = INFINITE
    rows[2, 5] = INFINITE
    fields: dict[str, Any] = {"temperature": 0.0, "allowed_token_ids": (5, 6)}
    return sample_both(
        rows, [sequence(temperature=0.0), sequence(num_logprobs=1, **fields), sequence(**fields)]
    )


def test_a_row_of_which_nothing_is_left_gets_the_cpus_token_and_is_counted(interpreter: RankPool) -> None:
    both: Both = interpreter.run(step_that_leaves_nothing)[0]
    check_same(both)
    assert both.ours.token_ids[1] not in (5, 6) and both.ours.token_ids[2] == 6
    assert both.num_host_rows == 1


def step_without_rows() -> tuple[Sampled, int, int]:
    from scheduler.sampling.gpu.sampler import DeviceSampler  # noqa: PLC0415 - in the interpreter

    waits: list[int] = []
    sampler = DeviceSampler(1, VOCABULARY, CPU, wait=lambda: waits.append(1))
    sampled, before = sampler.sample(torch.empty(0, VOCABULARY), []), len(waits)
    sampler.sample(logits(1), [sequence(temperature=0.0)])
    return sampled, before, len(waits)


def test_a_step_that_samples_nothing_is_waited_for_all_the_same(interpreter: RankPool) -> None:
    """Else the next step would overwrite what the device has not copied yet."""
    assert interpreter.run(step_without_rows)[0] == (Sampled([], []), 1, 1)


def scores() -> tuple[list[Logprobs], list[Logprobs], list[str]]:
    from scheduler.sampling.gpu.sampler import DeviceSampler  # noqa: PLC0415 - in the interpreter

    rows, next_ids, counted = logits(5, seed=7), [1, 2, 3, 3, 499], CountedReads()
    sampler = DeviceSampler(1, VOCABULARY, CPU)
    with counted:
        ours = sampler.score(rows, next_ids, 4)
    return ours, prompt_logprobs(rows, next_ids, 4), counted.reads


def test_prompt_tokens_get_the_cpus_logprobs_and_ranks(interpreter: RankPool) -> None:
    ours, wanted, reads = interpreter.run(scores)[0]
    assert all(close(one, other) for one, other in zip(ours, wanted, strict=True))
    assert reads == ["numpy of a tensor"] and min(each.rank for each in ours) > 0


def warm() -> list[tuple[Any, ...]]:
    """The forms of each kernel that a warm-up launches, and that a mixed step launches after it."""
    from scheduler.sampling.gpu import sampler as module  # noqa: PLC0415 - in the interpreter

    forms: list[tuple[Any, ...]] = []
    choose = module.choose_tokens

    def note(rows: torch.Tensor, draws: Any, scratch: Any) -> torch.Tensor:
        forms.append((draws.draws, bool(draws.masked_rows), draws.edit_id_E.numel() > 0))
        return choose(rows, draws, scratch)

    module.choose_tokens = note
    try:
        module.DeviceSampler(2, 40, CPU).warm_up()
    finally:
        module.choose_tokens = choose
    return forms


@pytest.mark.slow
def test_a_warm_up_launches_every_form_of_the_kernels(interpreter: RankPool) -> None:
    forms = interpreter.run(warm)[0]
    assert {(draws, masks) for draws, masks, _ in forms} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    assert any(edits for *_, edits in forms)
