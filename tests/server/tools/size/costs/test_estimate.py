"""Step times under a steady load, and the balance of placements."""

from collections.abc import Sequence

import pytest

from server.tools.size.costs.estimate import Estimate, Workload, balancedness, estimate
from server.tools.size.costs.step_times import RankRows, StepCost


class FlatTimes:
    """A step takes 1 ms, plus 1 ms per 1,000 prompt tokens of the rank with most."""

    def step(self, ranks: Sequence[RankRows], balancedness: float) -> StepCost:
        own = 1e-3 + 1e-6 * max(rank.prefill_tokens for rank in ranks)
        return StepCost(own, own, 0.0, 0.0, 0.0, (0.0,) * len(ranks))


def _estimated(work: Workload, *, num_ranks: int = 1, max_running: int = 64, batched: int = 8192) -> Estimate:
    return estimate(
        FlatTimes(),
        work,
        num_ranks=num_ranks,
        balance=1.0,
        max_running=max_running,
        max_batched_tokens=batched,
    )


def test_prompts_come_as_fast_as_answers_end() -> None:
    found = _estimated(Workload(20, 1000, 500))
    assert found.prefill_per_step == pytest.approx(40)
    assert found.input_per_rank == pytest.approx(2 * found.output_per_rank)
    assert found.output_per_rank == pytest.approx(20 / found.tpot_s)


def test_users_that_find_no_room_wait() -> None:
    found = _estimated(Workload(200, 100, 100), num_ranks=2, max_running=30)
    assert (found.running_per_rank, found.waiting_users) == (30, 140)


def test_fewer_users_than_ranks_leave_ranks_idle() -> None:
    alone, one_of_four = _estimated(Workload(1, 100, 100)), _estimated(Workload(1, 100, 100), num_ranks=4)
    assert one_of_four.output_per_rank == pytest.approx(alone.output_per_rank / 4)


def test_prompts_fill_no_step_beyond_its_limit() -> None:
    found = _estimated(Workload(64, 10_000, 10), batched=1000)
    assert found.prefill_per_step + found.output_per_rank * found.tpot_s <= 1000 * 1.001


@pytest.mark.parametrize("users", [200, 800, 3000])
def test_where_prompts_fill_the_steps_all_who_do_not_decode_wait_for_them(users: int) -> None:
    work = Workload(users, 2000, 20)
    found = _estimated(work, max_running=4096)
    answers_per_s = found.output_per_rank / work.output_tokens
    assert users / answers_per_s == pytest.approx(found.ttft_s + work.output_tokens * found.tpot_s, rel=0.05)


def test_a_long_prompt_takes_several_steps() -> None:
    short, long = (
        _estimated(Workload(1, 500, 500), batched=512),
        _estimated(Workload(1, 5000, 500), batched=512),
    )
    assert long.ttft_s > 5 * short.ttft_s


def test_planned_placements_are_more_even_and_one_rank_is_even() -> None:
    assert balancedness(64, 1, 64, is_planned=False) == 1.0
    in_order = balancedness(256, 32, 8, is_planned=False)
    planned = balancedness(256, 32, 9, is_planned=True)
    assert 0.3 < in_order < 0.45, "as TensorRT-LLM's blog 4 measured: 1 / 2.564"
    assert 0.85 < planned <= 0.9
