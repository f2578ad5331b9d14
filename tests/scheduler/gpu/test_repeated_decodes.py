"""With --batch-invariant on the GPU path, in Triton's interpreter: generated tokens that are computed again run as decodes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scheduler.assembly import Assembled
from scheduler.policy.batch import StepBatch
from scheduler.policy.request import Request
from scheduler.step.runner import Underway
from tests.scheduler.gpu.test_served_drafts import check_tokens
from tests.scheduler.test_invariance import Answers, collect
from tests.support.engines.serving import occupy, request, serve
from tests.support.gpu.path import build_interpreted
from tests.support.models.families import write_checkpoint
from tests.support.ranks import RankPool

PROMPTS = {"a": range(3, 15), "b": range(40, 54)}
TOKENS = 6
NUM_REPLAYED = 4


class Found(NamedTuple):
    """Answers of a run, and how its rows were computed."""

    answers: Answers
    num_again: int  # tokens beyond one that decodes ran in a step
    num_preemptions: int


def requests() -> list[Request]:
    return [
        request("a", PROMPTS["a"], max_tokens=TOKENS, num_logprobs=0),
        request("b", PROMPTS["b"], max_tokens=TOKENS, num_logprobs=0, temperature=1.0, seed=3, presence_penalty=0.5),
    ]  # fmt: skip


def watch(built: Assembled) -> list[int]:
    """Check at each step that prompts run as prompts, and generated tokens as decodes: a sequence of one row for each."""
    again: list[int] = []
    launch, on_step = built.runner.launch, built.runner.step

    def launched(batch: StepBatch, *arguments: Any, **options: Any) -> Underway:
        underway = launch(batch, *arguments, **options)
        lengths = on_step.query_start_S[: on_step.num_sequences + 1].diff().tolist()
        assert lengths[: on_step.num_decodes] == [1] * on_step.num_decodes
        row = 0
        for item in batch.items:
            is_decode = item.start >= item.sequence.num_prompt_tokens
            assert is_decode == (row < on_step.num_decodes) and (
                is_decode or item.end <= item.sequence.num_prompt_tokens
            )
            row += item.num_tokens
            again.append(item.num_tokens - 1 if is_decode else 0)
        return underway

    built.runner.launch = launched  # type: ignore[method-assign]
    return again


def run_once(directory: Path, asked: Sequence[Request], *, num_blocks: int = 0, **settings: Any) -> Found:
    """Serve requests together. `num_blocks`: most KV blocks that they use; 0 sets no limit."""
    built = build_interpreted(directory, batch_invariant=True, **settings)
    again = watch(built)
    if num_blocks:
        occupy(built, leaving=num_blocks)
    answers = collect(serve(built, asked).outputs)
    return Found(answers, sum(again), built.scheduler.stats.num_preemptions)


def runs(directory: Path) -> tuple[Found, Found, Found]:
    """Serve undisturbed, short of KV cache, and as fronts send requests again after a lost rank."""
    plain = run_once(directory, requests())
    preempted = run_once(directory, requests(), num_blocks=3, max_model_len=48, overlaps_steps=True)
    tokens = {name: tuple(token for token, _ in rows) for name, rows in plain.answers.items()}
    again = [replace(each, replayed_ids=tokens[each.request_id][:NUM_REPLAYED]) for each in requests()]
    return plain, preempted, run_once(directory, again)


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_next", "deepseek_v3"))],
)
def test_preempted_and_resent_requests_end_with_the_tokens_of_undisturbed_ones(
    family: str, interpreter: RankPool, tmp_path: Path
) -> None:
    write_checkpoint(family, tmp_path, is_shallow=True)
    plain, preempted, resent = interpreter.run(runs, tmp_path, timeout_s=400.0)[0]
    assert plain.num_preemptions == plain.num_again == 0
    assert preempted.num_preemptions > 0 and preempted.num_again > 0
    check_tokens(plain.answers, preempted.answers)
    assert resent.num_again >= NUM_REPLAYED // 2, "two rows in most steps"
    check_tokens({name: rows[NUM_REPLAYED:] for name, rows in plain.answers.items()}, resent.answers)
