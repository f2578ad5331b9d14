"""Criteria for a correct result, with fake kernels and without triton."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call, check, distance, num_copies, time_calls, time_queued

BENCH = Bench(torch.device("cpu"), torch.float32)


def make_call(run: Callable[[Tensor], Any], **changes: Any) -> Callable[[Bench, int], Call]:
    """Return a call of a kernel that should double its input."""

    def make(bench: Bench, seed: int) -> Call:
        x = bench.normal(bench.generator(seed), 64, 8)
        about: dict[str, Any] = {"oracle": lambda: 2 * x, "control": lambda: 2 * x.roll(1, 0), "num_bytes": 0}
        return Call(run=lambda: run(x), **{**about, **changes})

    return make


def test_the_right_answer_is_right() -> None:
    row = check(BENCH, "double", make_call(lambda x: x + x))
    assert row.is_right
    assert row.figures["error"] == 0.0
    assert row.note == ""


def noisy(x: Tensor) -> Tensor:
    return 2 * x + 1e-3 * torch.randn_like(x)


def with_one_wrong(x: Tensor) -> Tensor:
    wrong = 2 * x
    wrong[3, 3] += 1e-3
    return wrong


def with_nan(x: Tensor) -> Tensor:
    wrong = 2 * x
    wrong[3, 3] = float("nan")
    return wrong


@pytest.mark.parametrize("run", [torch.clone, noisy, with_one_wrong, with_nan])
def test_wrong_answers_are_wrong(run: Callable[[Tensor], Tensor]) -> None:
    assert not check(BENCH, "double", make_call(run)).is_right


def test_other_bits_in_the_second_run_are_wrong_and_told() -> None:
    runs = iter((0.0, 1e-7))
    row = check(BENCH, "double", make_call(lambda x: 2 * x + next(runs)))
    assert not row.is_right
    assert row.note == "bits differ between runs"


def test_a_control_that_is_near_makes_a_check_worthless_and_so_wrong() -> None:
    assert not check(BENCH, "double", make_call(lambda x: 2 * x, control=lambda: _doubled())).is_right


def _doubled() -> Tensor:
    return 2 * BENCH.normal(BENCH.generator(0), 64, 8)


def test_what_a_run_changes_in_place_is_put_back_and_what_is_checked_is_chosen() -> None:
    own = torch.zeros(8)

    def run(_x: Tensor) -> tuple[str, Tensor]:
        return "ids", own.add_(1)

    about: dict[str, Any] = {
        "prepare": own.zero_,
        "result": lambda outcome: outcome[1],
        "oracle": lambda: torch.ones(8),
        "control": lambda: torch.zeros(8),
    }
    assert check(BENCH, "count", make_call(run, **about)).is_right


def test_distances_are_relative() -> None:
    assert distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == (0.0, 0.0)
    error, worst = distance(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    assert error == pytest.approx(1 / 5)
    assert worst == pytest.approx(1 / (25 / 2) ** 0.5)
    assert distance(torch.ones(2), torch.zeros(2))[0] > 1


def test_without_a_gpu_a_call_is_made_once_and_said_to_be_interpreted() -> None:
    calls: list[int] = []
    timed = time_calls(BENCH, [lambda: calls.append(1), lambda: calls.append(2)])
    assert (timed.how, timed.num_runs, calls) == ("interpreted", 1, [1])
    assert time_queued(BENCH, lambda: calls.append(3)) >= 0.0
    assert num_copies(BENCH, 1) == 1
