"""The kernels that sample without sorting choose the tokens of the CPU, in Triton's interpreter and on a GPU."""

from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import pytest
import torch

from scheduler.policy.sequence import Sequence
from scheduler.sampling.device_sampler import choose_tokens
from scheduler.sampling.plan import make_plan
from scheduler.sampling.sampler import sample
from tests.fixtures import OnDevice
from tests.scheduler.sampling.test_device_sampler import DRAWN, INFINITE, RULED, sequence
from tests.scheduler.sampling.test_sampler import logits
from tests.support.gpu.interpreted import needs_triton
from tests.support.models.no_reads import NoReads

pytestmark = needs_triton
WIDE = 5000  # more tokens than a search holds at once
# Each of them leaves more tokens than that: by top-p of flat rows, by a large top-k, and by equal logits.
MANY: list[dict[str, Any]] = [
    {"temperature": 3.0, "top_p": 0.95},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 3.0, "top_k": 2300, "top_p": 0.9},
    {"temperature": 3.0, "min_p": 1e-5},
    {"temperature": 3.0, "top_k": 20, "top_p": 0.95},
]
EQUAL: list[dict[str, Any]] = [{"top_p": 0.7}, {"top_k": 40}, {"top_k": 2500, "top_p": 0.5}, {"min_p": 0.1}]


def chosen(device: str, rows: torch.Tensor, sequences: Rows[Sequence], twice: bool = False) -> list[int]:
    """Return the kernels' tokens, found without a read."""
    from scheduler.sampling.gpu.draws import KernelChoice  # noqa: PLC0415 - after the interpreter is chosen

    given, plan = rows.to(device), make_plan(sequences, rows.shape[1], torch.device(device))
    choose = KernelChoice(torch.device(device))
    # Launches share memory, which each of them must leave cleared.
    first = choose(given.clone(), plan).tolist() if twice else None
    with NoReads():
        ids = choose(given, plan)
    found: list[int] = ids.tolist()
    assert first in (None, found)
    return found


def likeliest(device: str, rows: torch.Tensor) -> list[int]:
    from scheduler.sampling.gpu.draws import KernelChoice  # noqa: PLC0415 - after the interpreter is chosen

    with NoReads():
        ids = KernelChoice(torch.device(device)).likeliest(rows.to(device))
    found: list[int] = ids.tolist()
    return found


def refused(device: str, rows: torch.Tensor, is_edited: bool) -> str:
    from scheduler.sampling.gpu.draws import KernelChoice  # noqa: PLC0415 - after the interpreter is chosen

    fields: dict[str, Any] = {"repetition_penalty": 2.0} if is_edited else {}
    plan = make_plan([sequence(temperature=0.0, **fields)], rows.shape[1], torch.device(device))
    try:
        KernelChoice(torch.device(device))(rows.to(device), plan)
    except ValueError as error:
        return str(error)
    return ""


def test_all_ways_of_drawing_give_the_tokens_of_the_cpu(on_device: OnDevice) -> None:
    sequences = [sequence((4,), seed=place, **params) for place, params in enumerate(DRAWN)]
    rows = logits(len(sequences), seed=3)
    found = on_device(chosen, rows, sequences)
    assert found == sample(rows.clone(), sequences).token_ids
    assert found == choose_tokens(rows, make_plan(sequences, rows.shape[1], torch.device("cpu"))).tolist()


def wide(seed: int, *, is_short: bool) -> torch.Tensor:
    rows = torch.randn(len(MANY), WIDE, generator=torch.Generator().manual_seed(seed)) * 3
    return rows.bfloat16().float() if is_short else rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_that_keep_many_tokens_get_the_tokens_of_the_cpu(on_device: OnDevice, seed: int) -> None:
    """With logits in bfloat16, many are equal."""
    rows = wide(seed, is_short=seed > 0)
    sequences = [sequence(seed=10 * seed + place, **params) for place, params in enumerate(MANY)]
    assert on_device(chosen, rows, sequences) == sample(rows.clone(), sequences).token_ids


@pytest.mark.slow
def test_equal_logits_are_drawn_by_id(on_device: OnDevice) -> None:
    sequences = [sequence(temperature=1.0, seed=place, **params) for place, params in enumerate(EQUAL)]
    rows = torch.zeros(len(EQUAL), WIDE)
    assert on_device(chosen, rows, sequences, True) == sample(rows.clone(), sequences).token_ids


def test_odd_rows_get_the_tokens_that_they_get_on_the_cpu(on_device: OnDevice) -> None:
    """NaN of both signs, infinities, only -inf, both zeros, and one token with all the weight."""
    rows = torch.zeros(6, 40)
    rows[0, ::2] = -0.0
    rows[1, [9, 30]] = torch.tensor([-float("nan"), float("nan")])
    rows[2] = -INFINITE
    rows[3, 17] = INFINITE
    rows[4] = -INFINITE
    rows[4, 23] = -4.0
    rows[5, 10:] = -200.0
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.9},
    ]
    many = rows.repeat(len(kinds), 1)
    sequences = [sequence(seed=seed, **fields) for fields in kinds for seed in range(6)]
    found = on_device(chosen, many, sequences, True)
    assert found == sample(many.clone(), sequences).token_ids
    assert on_device(likeliest, rows) == found[:6]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_fields_is_the_cpus(on_device: OnDevice, seed: int) -> None:
    choice = np.random.default_rng(seed)
    sequences = []
    for _ in range(12):
        drawn, ruled = (kinds[choice.integers(len(kinds))] for kinds in (DRAWN, RULED))
        fields: dict[str, Any] = {**ruled, **drawn, "seed": int(choice.integers(2**63))}
        outputs = tuple(choice.integers(3, 40, choice.integers(9)).tolist())
        sequences.append(sequence(outputs, is_structured=choice.random() < 0.3, **fields))
    rows = logits(len(sequences), seed)
    assert on_device(chosen, rows, sequences) == sample(rows.clone(), sequences).token_ids


def test_logits_in_bfloat16_give_the_tokens_of_the_same_logits_in_float32(on_device: OnDevice) -> None:
    rows = logits(3, seed=1).bfloat16()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 9},
    ]
    sequences = [sequence(seed=9, **fields) for fields in kinds]
    assert on_device(chosen, rows, sequences) == sample(rows.float(), sequences).token_ids
    assert on_device(likeliest, rows) == rows.float().argmax(dim=1).tolist()


@pytest.mark.parametrize(
    ("rows", "is_edited", "start"),
    [
        (torch.zeros(1, 8, dtype=torch.float64), False, "logits_RV is torch.float64"),
        (torch.zeros(1, 8).bfloat16(), True, "logits_RV is torch.bfloat16"),
        (torch.zeros(8, 2).T, False, "logits_RV is torch.float32 with strides"),
        (torch.zeros(1, 1).expand(1, 2**19).contiguous(), False, "the vocabulary has 524288 tokens"),
    ],
)
def test_logits_of_another_kind_are_refused(
    on_device: OnDevice, rows: torch.Tensor, is_edited: bool, start: str
) -> None:
    assert on_device(refused, rows, is_edited).startswith(start)
