"""Log-probabilities found on a GPU, in the interpreter, against the CPU's of the same row."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from scheduler.policy.request import Logprobs
from scheduler.sampling.sampler import RowLogprobs
from tests.scheduler.gpu.sampled_rows import VOCABULARY, close, logits
from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton: pip install -r requirements-dev.txt"
)
TOKENS = [3, 499, 0, 7, 250]
Pairs = list[tuple[Logprobs, Logprobs]]


def odd_logits() -> torch.Tensor:
    """Rows with equal logits at the border of the likeliest, both zeros, -inf, and one token that has all the weight."""
    rows = logits(5, seed=8)
    rows[1] = rows[1].round()
    rows[2, ::2], rows[2, 1::2] = 0.0, -0.0
    rows[3, 10:] = -float("inf")
    rows[4, 250] = 300.0
    return rows


def told_of_odd_rows(with_rank: bool) -> Pairs:
    """Rows that ask for several numbers of likeliest tokens, or for ids, in another order than they lie in."""
    from scheduler.sampling.gpu import logprobs  # noqa: PLC0415 - in the interpreter

    logprobs.KEYED_ROWS = 2  # so that rows come in parts
    rows, kinds = odd_logits(), [(9, ()), (40, ()), (2, ()), (20, (3, 2, 499)), (0, ())]
    order = [4, 1, 0, 3, 2]
    asked = [logprobs.Asked(place, place, *kinds[place]) for place in order]
    found = logprobs.measure(rows, asked, torch.tensor(TOKENS)).flatten().numpy()
    assert len(found) == logprobs.size_of(asked, VOCABULARY)
    ours = logprobs.answers(found, asked, TOKENS, VOCABULARY, with_rank=with_rank)
    wanted = []
    for place, each in zip(order, asked, strict=True):
        row = rows[
            place
        ].numpy()  # of equal logits the CPU may pick others at the border; here the lower ids are
        ids = each.ids or np.lexsort((np.arange(VOCABULARY), -row))[: each.num_top].tolist()
        wanted.append(RowLogprobs(row).of(TOKENS[place], 0, ids=ids, with_rank=with_rank))
    return list(zip(ours, wanted, strict=True))


@pytest.mark.parametrize("with_rank", [False, True])
def test_numbers_ids_and_ranks_are_those_of_the_cpu(interpreter: RankPool, with_rank: bool) -> None:
    pairs: Pairs = interpreter.run(told_of_odd_rows, with_rank)[0]
    for ours, wanted in pairs:
        assert close(ours, wanted), (ours, wanted)
    assert {len(ours.top_ids) for ours, _ in pairs} == {9, 40, 2, 3, 0}
    assert any(ours.rank > 1 for ours, _ in pairs) == with_rank


def told_of_a_short_row() -> tuple[Logprobs, Logprobs]:
    from scheduler.sampling.gpu.logprobs import Asked, answers, measure  # noqa: PLC0415 - in the interpreter

    rows, asked = torch.tensor([[0.5, 2.0, 0.5]]), [Asked(0, 0, 20)]
    found = measure(rows, asked, torch.tensor([2])).flatten().numpy()
    return answers(found, asked, [2], 3)[0], RowLogprobs(rows[0].numpy()).of(2, 20)


def test_more_than_the_vocabulary_is_all_of_it(interpreter: RankPool) -> None:
    ours, wanted = interpreter.run(told_of_a_short_row)[0]
    assert close(ours, wanted) and ours.top_ids == [1, 0, 2]


def numbers_alone_and_among_others() -> list[np.ndarray]:
    from scheduler.sampling.gpu.logprobs import Asked, measure  # noqa: PLC0415 - in the interpreter

    rows, tokens = logits(4, seed=3), torch.tensor([5, 6, 7, 8])
    among = measure(rows, [Asked(row, row, 3) for row in range(4)], tokens)[2]
    return [among.numpy(), measure(rows[2:3].clone(), [Asked(0, 2, 3)], tokens)[0].numpy()]


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(interpreter: RankPool) -> None:
    among, alone = interpreter.run(numbers_alone_and_among_others)[0]
    assert np.array_equal(among, alone)
