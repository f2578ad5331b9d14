"""Sampling on GPUs, in Triton's interpreter, against the CPU's; and compiled."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from scheduler.sampling.gpu.draws import plan_draws
from scheduler.sampling.sampler import sample
from tests.scheduler.gpu.sampled_rows import VOCABULARY, drawn_rows, logits, ruled_rows, sequence
from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton: pip install -r requirements-dev.txt"
)
CPU = torch.device("cpu")


def choose(rows: torch.Tensor, sequences: list[Any], part: int = 512, candidates: int = 512) -> list[int]:
    from scheduler.sampling.gpu.sampling import SamplingScratch, choose_tokens  # noqa: PLC0415 - in the interpreter

    vocabulary = rows.shape[1]
    scratch = SamplingScratch(len(rows), vocabulary, CPU, part=part, candidates=candidates)
    ids: list[int] = choose_tokens(rows.clone(), plan_draws(sequences, vocabulary, CPU), scratch).tolist()
    return ids


def draw(seeds: list[int], kinds: slice, part: int) -> None:
    sequences = drawn_rows(seeds, kinds)
    rows = logits(len(sequences))
    assert choose(rows, sequences, part) == sample(rows.clone(), sequences).token_ids


def test_drawn_tokens_are_those_of_the_cpu(interpreter: RankPool) -> None:
    interpreter.run(draw, [0], slice(0, 2), 512)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_drawn_tokens_are_those_of_the_cpu_for_all_ways_of_drawing(interpreter: RankPool, seed: int) -> None:
    interpreter.run(draw, [seed], slice(None), 128)


def follow_rules() -> None:
    sequences = ruled_rows()
    rows = logits(len(sequences), seed=1)
    wanted = sample(rows.clone(), sequences).token_ids
    assert choose(rows, sequences) == wanted
    plain = sample(rows.clone(), [sequence(seed=3, temperature=0.0)] * len(rows)).token_ids
    assert wanted != plain  # the rules do matter here


def test_rules_structures_and_penalties_are_those_of_the_cpu(interpreter: RankPool) -> None:
    interpreter.run(follow_rules)


def cut_otherwise() -> None:
    sequences = drawn_rows([5], slice(None))
    rows = logits(len(sequences), seed=2)
    whole = choose(rows, sequences, part=512)
    assert choose(rows, sequences, part=64, candidates=3) == whole
    assert [choose(rows[at : at + 1], sequences[at : at + 1])[0] for at in (1, 7)] == [whole[1], whole[7]]


@pytest.mark.slow
def test_tokens_do_not_depend_on_how_a_row_is_cut_or_what_room_there_is_or_the_batch(
    interpreter: RankPool,
) -> None:
    interpreter.run(cut_otherwise)


def meet_odd_rows() -> None:
    """Equal logits, NaN, infinities, nothing but -inf, and one token that has all the weight."""
    rows = torch.zeros(6, VOCABULARY)
    rows[1, [9, 40]] = float("nan")
    rows[2] = -float("inf")
    rows[3, 77] = float("inf")
    rows[4] = -float("inf")
    rows[4, 123] = -4.0
    rows[5, 300:] = -200.0
    sequences = [sequence(seed=seed, temperature=1.0) for seed in range(6)]
    assert choose(rows, sequences) == sample(rows.clone(), sequences).token_ids
    greedy = [sequence(temperature=0.0)] * 6
    assert choose(rows, greedy) == sample(rows.clone(), greedy).token_ids


def test_odd_rows_get_the_tokens_that_they_get_on_the_cpu(interpreter: RankPool) -> None:
    interpreter.run(meet_odd_rows)


def refusals() -> list[str]:
    from scheduler.sampling.gpu.sampling import SamplingScratch, choose_tokens  # noqa: PLC0415 - in the interpreter

    draws = plan_draws([sequence(temperature=0.0)], 8, CPU)
    texts = []
    for rows in (torch.zeros(1, 8).half(), torch.zeros(8, 1).T.expand(2, 8), torch.zeros(1, 9)):
        with pytest.raises(ValueError) as caught:
            choose_tokens(rows, draws, SamplingScratch(1, 8, CPU))
        texts.append(str(caught.value))
    return texts


def test_logits_of_another_kind_are_refused(interpreter: RankPool) -> None:
    starts = ("logits_RV are torch.float16", "logits_RV are torch.float32, strides", "logits_RV are 1 x 9")
    for text, start in zip(interpreter.run(refusals)[0], starts, strict=True):
        assert text.startswith(start)


def test_masks_are_packed_by_the_bit_the_lowest_first() -> None:
    draws = plan_draws([sequence(temperature=0.0), sequence(is_structured=True)], 40, CPU)
    assert draws.mask_row_R.tolist() == [-1, 0]
    bits = np.unpackbits(draws.masks_MW.numpy().view(np.uint8), bitorder="little")[:40]
    assert bits.tolist() == [1, 0] * 20
