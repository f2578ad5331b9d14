"""Engines that prepare open requests for new weights: the same answers as without, and few tokens to compute after the switch."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe.vision.tower import Tower
from scheduler.assembly import Assembled
from scheduler.policy.config import DispatchMode
from scheduler.policy.request import Request, RequestOutput
from scheduler.policy.speculative import parse_speculative_config
from scheduler.weights.versions import WeightState
from tests.scheduler.weights.test_ranks_update_together import alone, is_served, merged, stage_all
from tests.scheduler.weights.test_versions_served import Run, fresh, requests
from tests.support.engines.crew import Crew, Doom
from tests.support.engines.serving import PATIENCE_S, occupy, request
from tests.support.engines.versions import serve_version, stage, version, write_other
from tests.support.models.families import write_checkpoint
from tests.support.models.seeing import draw_picture, prompt_of, write_seeing_checkpoint

NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 60, 60


class Counts:
    """Tokens of prompts that a rank had run at a switch and at the end, and those of chunks."""

    def __init__(self, run: Run) -> None:
        self._built = run.built
        weights = run.built.engine.weights
        on_installed = weights.on_installed
        self.at_switch: list[int] = []

        def note(one: Any) -> None:
            self.at_switch.append(self.now)
            on_installed(one)

        weights.on_installed = note

    @property
    def now(self) -> int:
        return self._built.runner.figures.prefill_tokens

    @property
    def after(self) -> int:
        [before] = self.at_switch
        return self.now - before

    @property
    def prepared(self) -> int:
        preparation = self._built.engine._preparation
        return 0 if preparation is None else preparation.num_tokens


def update_in_the_middle(run: Run, other: Path, wanted: list[Request], at: int = 30) -> Counts:
    """Order to serve other weights when the last request has some tokens. Return the counts."""
    new, counts = version(1, other), Counts(run)

    def serve_soon(output: RequestOutput) -> None:
        if len(run.tokens.get(wanted[-1].request_id, ())) >= at and run.built.engine.weights.newest is None:
            run.built.engine.weights.order(serve_version(new))

    run.on_output = serve_soon
    run.through(run.order(stage(new)), run.submit(wanted))
    return counts


def check_tokens(
    run: Run, other: Path, wanted: list[Request], **how: Any
) -> tuple[list[Request], list[list[int]]]:
    """Check that all requests continue as on a rank that starts with the new weights and gets the tokens so far.

    Return the requests with these tokens, and the tokens that follow.
    """
    [before] = run.installed_after
    again = [Request(**{**vars(each), "replayed_ids": tuple(before[each.request_id])}) for each in wanted]
    assert all(len(each.replayed_ids) < OUTPUT_TOKENS for each in again), "a request has ended"
    rest = fresh(other, again, **how)
    assert run.tokens == {
        each.request_id: [*each.replayed_ids, *tokens] for each, tokens in zip(again, rest, strict=True)
    }
    return again, rest


def folders_of(family: str, tmp_path: Path) -> tuple[Path, Path]:
    write_checkpoint(family, tmp_path / "a")
    return tmp_path / "a", write_other(family, tmp_path / "b")


NGRAM = parse_speculative_config(
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen3_moe", {}),
        ("qwen3_next", {}),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", {}, marks=pytest.mark.slow),
        pytest.param("kimi_linear", {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"speculative_config": NGRAM}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"dispatch_mode": DispatchMode.LOW_LATENCY}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"kv_offloading_bytes": 64 << 20}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"enable_lora": True, "max_loras": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"threads": 2}, marks=pytest.mark.slow),
    ],
)
def test_prepared_requests_continue_with_the_same_tokens(
    family: str, how: dict[str, Any], tmp_path: Path
) -> None:
    first, other = folders_of(family, tmp_path)
    wanted = requests("open", max_tokens=OUTPUT_TOKENS)
    run = Run(first, **how)
    counts = update_in_the_middle(run, other, wanted)
    check_tokens(run, other, wanted, **how)
    assert counts.prepared >= NUM_PROMPTS * (PROMPT_TOKENS + 16)
    assert counts.after < NUM_PROMPTS * 40, "their prefixes were cached"
    stats = run.built.scheduler.stats
    assert stats.num_preemptions == 0
    # Tiers hold the blocks that they were saving when the engine stopped.
    assert stats.num_free_blocks == stats.num_blocks or "kv_offloading_bytes" in how


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl_moe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_5_moe", "gemma4"))],
)
def test_prepared_requests_with_images_continue_with_the_same_tokens(family: str, tmp_path: Path) -> None:
    """Rows of images at several layers; recurrent layers; images that one chunk must hold."""
    first, other = tmp_path / "a", tmp_path / "b"
    config = write_seeing_checkpoint(family, first).config
    write_seeing_checkpoint(family, other, seed=1)
    large, small = (draw_picture(*size, seed, config) for seed, size in enumerate(((16, 12), (8, 4))))
    prompts = [prompt_of([5, large, 30], 0), prompt_of([40, small, 9, small], 1), prompt_of([70], 2)]
    tower = Tower(first)
    wanted = [
        request(f"open {at}", each.token_ids, images=each.images(tower), max_tokens=OUTPUT_TOKENS)
        for at, each in enumerate(prompts)
    ]
    run = Run(first)
    counts = update_in_the_middle(run, other, wanted)
    again, rest = check_tokens(run, other, wanted)
    assert counts.prepared >= sum(len(each.token_ids) for each in prompts)
    assert counts.after < len(prompts) * 40, "their prefixes were cached"
    assert fresh(other, [replace(each, images=()) for each in again]) != rest, "images change answers"


def test_chunks_do_not_count_as_load(tmp_path: Path) -> None:
    first, other = folders_of("qwen3_moe", tmp_path)
    run = Run(first)
    counts = update_in_the_middle(run, other, requests("open", max_tokens=OUTPUT_TOKENS))
    assert counts.prepared > 0
    figures, model = run.built.runner.figures, run.built.model
    num_choices = model.net.config.num_experts_per_tok
    served = (figures.prefill_tokens + figures.decode_tokens) * num_choices
    assert [int(each.expert_E.sum()) for each in model.load_counts.layers] == [served] * len(model.layers)
    assert sum(each.num_step_tokens for each in run.stats) == served // num_choices


@pytest.mark.parametrize(
    "how",
    [
        {"enable_prefix_caching": False},
        pytest.param({"overlaps_steps": True}, marks=pytest.mark.slow),
    ],
)
def test_services_that_cannot_prepare_compute_all_tokens_after_the_switch(
    how: dict[str, Any], tmp_path: Path
) -> None:
    first, other = folders_of("qwen3_moe", tmp_path)
    wanted = requests("open", max_tokens=OUTPUT_TOKENS)
    run = Run(first, **how)
    counts = update_in_the_middle(run, other, wanted)
    check_tokens(run, other, wanted, **how)
    assert counts.prepared == 0 and counts.after >= NUM_PROMPTS * PROMPT_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("leaving", range(34, 50, 5))
def test_short_blocks_preempt_no_request_and_change_no_token(
    family: str, leaving: int, tmp_path: Path
) -> None:
    first, other = folders_of(family, tmp_path)
    wanted = requests("open", max_tokens=OUTPUT_TOKENS)
    run = Run(first)
    num_taken = occupy(run.built, leaving=leaving)
    counts = update_in_the_middle(run, other, wanted)
    assert (counts.prepared > 0) == (leaving > 34), "with 34 blocks no copy fits"
    check_tokens(run, other, wanted)
    stats = run.built.scheduler.stats
    assert stats.num_preemptions == 0
    assert stats.num_free_blocks == stats.num_blocks - num_taken


@pytest.mark.slow
def test_a_newer_order_ends_a_preparation(tmp_path: Path) -> None:
    first, other = folders_of("qwen3_moe", tmp_path)
    newest = write_other("qwen3_moe", tmp_path / "c", seed=2)
    wanted = requests("open", max_tokens=OUTPUT_TOKENS)
    run = Run(first)
    preparation: Any = run.built.engine._preparation
    step, weights = preparation.step, run.built.engine.weights
    numbers: list[int] = []

    def step_then_order(posted: Any) -> None:
        numbers.append(posted.version.number)
        if numbers == [1]:
            weights.order(serve_version(version(2, newest)))
            until_s = time.monotonic() + PATIENCE_S
            while weights._next() != 2 or weights._worker is not None:
                assert time.monotonic() < until_s, "version 2 is not loaded"
                threading.Event().wait(0.001)
        step(posted)  # the first version's model was not freed

    preparation.step = step_then_order
    update_in_the_middle(run, other, wanted)
    check_tokens(run, newest, wanted)
    assert numbers[0] == 1 and 2 in numbers
    assert [report.number for report in run.reports if report.state is WeightState.SERVING] == [2]
    stats = run.built.scheduler.stats
    assert stats.num_free_blocks == stats.num_blocks


def note_chunks(built: Assembled) -> None:
    """Let a rank of a crew write the number of its chunks, and of their tokens, next to its checkpoint when it switches."""
    preparation: Any = built.engine._preparation
    weights, rank, calls = built.engine.weights, built.engine._rank, []
    step, on_installed = preparation.step, weights.on_installed

    def step_and_count(posted: Any) -> None:
        calls.append(posted)
        step(posted)

    def note(one: Any) -> None:
        directory = built.model.skeleton.directory
        (directory / f"chunks{rank}").write_text(f"{len(calls)} {preparation.num_tokens}")
        on_installed(one)

    preparation.step, weights.on_installed = step_and_count, note


def chunks_of(directory: Path, rank: int) -> tuple[int, int]:
    calls, tokens = map(int, (directory / f"chunks{rank}").read_text().split())
    return calls, tokens


def check_continued(crew: Crew, first: Path, other: Path, wanted: list[Request]) -> None:
    """Check that each answer begins with the old weights' tokens and ends with the new ones'."""
    old = alone(first, wanted)
    for each in wanted:
        tokens = crew.tokens[each.request_id]
        pairs = zip(tokens, old[each.request_id], strict=True)
        same = next((at for at, (one, other_one) in enumerate(pairs) if one != other_one), len(tokens))
        assert same < len(tokens), "the new weights drew no token"
        again = Request(**{**vars(each), "replayed_ids": tuple(tokens[:same])})
        assert tokens[same:] == alone(other, [again])[each.request_id]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("shares", [(0, 1), (0, 0)], ids=["both", "one idle"])
def test_ranks_prepare_together(family: str, shares: tuple[int, int], tmp_path: Path) -> None:
    first, other = folders_of(family, tmp_path)
    with Crew(first, 2, prepare=note_chunks) as crew:
        stage_all(crew, 1, other)
        wanted = requests("open", count=6, max_tokens=200)
        for place, rank in enumerate(shares):
            crew.submit(rank, wanted[place::2])
        crew.until(crew.has_begun)
        crew.order_weights(merged(crew, 1))
        crew.until(lambda: is_served(crew, 1))
        crew.until(crew.is_done)
        crew.stop()
    check_continued(crew, first, other, wanted)
    (calls, tokens), (other_calls, other_tokens) = (chunks_of(first, rank) for rank in (0, 1))
    assert calls == other_calls > 0
    assert tokens + other_tokens >= 6 * PROMPT_TOKENS
    assert (other_tokens > 0) == (1 in shares)


@pytest.mark.slow
def test_a_rank_that_is_lost_while_it_prepares_leaves_the_others_the_new_weights(tmp_path: Path) -> None:
    first, other = folders_of("qwen3_moe", tmp_path)
    doom = Doom(function="scheduler.weights.preparation.Preparation.step", calls=2)
    with Crew(first, 2, dooms={1: doom}) as crew:
        stage_all(crew, 1, other)
        wanted = requests("open", count=6, max_tokens=200)
        for rank in (0, 1):
            crew.submit(rank, wanted[rank::2])
        crew.until(crew.has_begun)
        crew.order_weights(merged(crew, 1))
        crew.until(lambda: crew.lost == [1])
        crew.order([0])
        crew.until(lambda: crew.serve_in(1))
        assert crew.weight_states(1)[0] is WeightState.SERVING
        crew.replay(1, 0)
        crew.until(crew.is_done)
        stats = crew.stats[0]
        crew.stop()
    assert stats.num_free_blocks == stats.num_blocks
    check_continued(crew, first, other, wanted)
