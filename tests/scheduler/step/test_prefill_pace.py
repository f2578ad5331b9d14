"""The prompt tokens of a step follow from the duration of earlier steps."""

from itertools import accumulate
from pathlib import Path

import pytest

from scheduler.step.prefill_pace import (
    DECODE_STEPS,
    ENOUGH_TOKENS,
    LEAST_TOKENS,
    PrefillPace,
    agree_on_prefill,
)
from tests.support.engines.serving import build, request, serve
from tests.support.models.families import write_checkpoint


def learned(target_s: float | None = None, **settings: bool) -> PrefillPace:
    """Return a pace trained on decodes of 20 ms and prompts of 0.1 ms per token."""
    pace = PrefillPace(target_s, **settings)
    for _ in range(50):
        pace.note(0.020, num_decodes=4, num_prefill=0)
        pace.note(0.020 + 0.0512, num_decodes=4, num_prefill=512)
    return pace


def budget(pace: PrefillPace, num_decodes: int = 4) -> int:
    """Return the budget while no request waits."""
    return pace.budget(num_decodes, num_decodes)


def test_there_is_no_limit_before_anything_is_known() -> None:
    pace = PrefillPace(None)
    assert budget(pace) == 0
    pace.note(0.1, num_decodes=0, num_prefill=512)
    assert budget(pace) == 0, "the duration of a decode is unknown"
    pace.note(0.02, num_decodes=1, num_prefill=0)
    assert budget(pace) > 0


def test_a_target_is_kept_to_while_no_step_is_without_prompts() -> None:
    """Steps of 20 ms and 0.1 ms per token, always with both prompts and decodes."""
    pace, num_prefill = PrefillPace(0.050), 512
    for _ in range(100):
        pace.note(0.020 + 0.0001 * num_prefill, num_decodes=4, num_prefill=num_prefill)
        num_prefill = budget(pace)
    assert num_prefill == pytest.approx(300, abs=2), "as if decodes had been seen alone"


def test_the_budget_is_what_fits_beside_the_decodes() -> None:
    assert budget(learned(0.050)) == pytest.approx(300, abs=2)
    assert budget(learned(0.120)) == pytest.approx(1000, abs=5)
    assert budget(learned()) == pytest.approx((DECODE_STEPS - 1) * 200, abs=2)


def test_a_few_streams_do_not_hold_up_many_who_wait() -> None:
    pace = learned()
    for _ in range(50):
        pace.note(0.060, num_decodes=24, num_prefill=0)  # 2 ms more per sequence
    few, many = (pace.budget(4, num_open) for num_open in (4, 24))
    assert few == pytest.approx((DECODE_STEPS - 1) * 200, rel=0.02)
    assert many == pytest.approx((DECODE_STEPS * 0.060 - 0.020) / 0.0001, rel=0.02)
    target = learned(0.050)
    assert target.budget(4, 24) == target.budget(4, 4), "a target must be kept"


def test_prompts_get_on_however_short_the_target_is() -> None:
    assert budget(learned(0.001)) == ENOUGH_TOKENS, "all chunks had one size, so their fixed cost is unknown"


@pytest.mark.parametrize(
    ("chunk_s", "least"),
    [(0.0, LEAST_TOKENS), (0.001, 40), (0.1, ENOUGH_TOKENS)],
    ids=lambda given: str(given),
)
def test_at_least_as_many_tokens_as_take_four_times_as_long_as_a_chunk_does_for_itself(
    chunk_s: float, least: int
) -> None:
    pace = PrefillPace(0.001)
    for num_prefill in (512, 100, 30) * 20:
        pace.note(0.020, num_decodes=4, num_prefill=0)
        pace.note(0.020 + chunk_s + 0.0001 * num_prefill, num_decodes=4, num_prefill=num_prefill)
    assert budget(pace) == pytest.approx(least, abs=1)


def test_tokens_that_cost_the_more_the_more_they_are_leave_nothing_to_a_chunk() -> None:
    pace = PrefillPace(0.001)
    for num_prefill in (512, 300, 256) * 20:
        pace.note(0.020, num_decodes=4, num_prefill=0)
        pace.note(0.020 + 0.0001 * num_prefill**2, num_decodes=4, num_prefill=num_prefill)
    assert budget(pace) == LEAST_TOKENS


def test_ends_of_prompts_do_not_shrink_the_budget() -> None:
    """Chunks of 300 tokens in 5 ms and 0.1 ms per token, each followed by the prompt's last token."""
    pace = PrefillPace(0.060)
    for num_prefill in (300, 1) * 50:
        pace.note(0.020, num_decodes=4, num_prefill=0)
        pace.note(0.025 + 0.0001 * num_prefill, num_decodes=4, num_prefill=num_prefill)
    assert budget(pace) > 250, "350 fit; with the mean of 0.12 and 5.1 ms per token, only 16 would"


def test_a_rank_without_decodes_learns_what_its_prompts_add_to_anothers_decodes() -> None:
    """Steps of 28 ms, plus 0.1 ms for each of up to eight sequences, or for each of 36 prompt tokens."""
    pace = PrefillPace(0.060)
    for step in range(100):
        pace.note(0.028 + 0.0001 * (step % 8 + 1), num_decodes=step % 8 + 1, num_prefill=0)
        pace.note(0.028 + 0.0001 * 36, num_decodes=0, num_prefill=36)
    assert budget(pace, 0) == pytest.approx(320, rel=0.05), (
        "not 40, as if the prompt had caused the whole step"
    )


def test_steps_as_long_as_anothers_prompts_say_nothing_of_this_ranks() -> None:
    pace = learned(0.050)
    before = budget(pace)
    pace.note(5.0, num_decodes=4, num_prefill=3, is_behind=True)
    assert budget(pace) == before


def test_without_a_limit_none_is_asked_for() -> None:
    assert budget(learned(is_limited=False)) == 0


def test_it_follows_a_machine_that_becomes_slower() -> None:
    pace = learned(0.050)
    for _ in range(50):
        pace.note(0.020 + 0.1024, num_decodes=4, num_prefill=512)
    assert budget(pace) == pytest.approx(150, abs=2)


def test_steps_without_tokens_say_nothing() -> None:
    pace = learned(0.050)
    before = budget(pace)
    pace.note(5.0, num_decodes=0, num_prefill=0)
    assert budget(pace) == before


def test_all_keep_to_the_least_budget_while_anybody_decodes() -> None:
    assert agree_on_prefill([300, 0, 200], has_decodes=True) == 200
    assert agree_on_prefill([300, 200], has_decodes=False) is None
    assert agree_on_prefill([0, 0], has_decodes=True) is None


def steps_and_tokens(directory: Path, target_s: float) -> tuple[list[int], dict[str, list[int]]]:
    """Serve a stream and a long prompt together, after both kinds of steps. Return the steps of the second wave."""
    built = build(directory, max_model_len=512, max_num_batched_tokens=256, target_itl_ms=1000 * target_s)
    first = [request("warm", range(3, 40), max_tokens=6)]
    second = [request("stream", [7, 8], max_tokens=30), request("long", [9] * 420, max_tokens=4)]
    served = serve(built, first, second)
    sizes = [stats.num_step_tokens for stats in served.stats]
    return sizes[sizes.index(256) :], served.token_ids


def test_a_long_prompt_is_cut_so_that_streams_keep_their_pace(tmp_path: Path) -> None:
    write_checkpoint("mixtral", tmp_path)
    short, same = steps_and_tokens(tmp_path, 1e-9)
    whole, tokens = steps_and_tokens(tmp_path, 1e9)
    # No request decodes in the step in which both start. Then the other 166 prompt tokens run in the stream's steps.
    chunks = [size - 1 for size in short[1:]]
    chunks = chunks[: list(accumulate(chunks)).index(166) + 1]
    assert all(LEAST_TOKENS <= size <= ENOUGH_TOKENS for size in chunks[:-1]), (
        "chunk sizes follow this machine's steps"
    )
    assert whole[1] == 166 + 1
    assert same == tokens
