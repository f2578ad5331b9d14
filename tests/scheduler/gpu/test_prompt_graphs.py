"""Replayed steps with prompts have the same bits as without a graph, for every kind of model."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.models.foreseeing import foresee
from scheduler.policy.speculative import parse_speculative_config
from scheduler.step.graphs import StepGraphs
from tests.scheduler.drafts.test_served_drafts import MTP, always_draft
from tests.scheduler.gpu.test_served_drafts import NEARLY_RIGHT, requests
from tests.scheduler.test_invariance import Answers, collect
from tests.support.engines.serving import serve
from tests.support.gpu.interpreted import needs_triton
from tests.support.gpu.path import Part, build_interpreted, run_steps
from tests.support.gpu.recorded import FakeGraphs
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.models.mtp import write_mtp_checkpoint
from tests.support.ranks import RankPool

SIZES = (8, 16)
LENGTHS = (20, 12, 25)
# A chunk; the rest of the prompt, across a block's end, next to another one; prompts next to one and to two decodes;
# a step of 21 rows, which is larger than all sizes; decodes alone. The sizes are those to which the rows are padded
# without graphs too, so torch's products have the same bits.
STEPS = [
    [Part(0, 0, 7)],
    [Part(0, 7, 17), Part(1, 0, 3)],
    [Part(0, 17, 18), Part(1, 3, 10)],
    [Part(0, 18, 19), Part(1, 10, 11), Part(2, 0, 5)],
    [Part(0, 19, 20), Part(2, 5, 25)],
    [Part(1, 11, 12)],
]
REPLAYED = 5
# Latents: prompts attend absorbed, not expanded, or torch's products expand another number of latents. In float32.
TOLERANCE = 2e-5


class Found(NamedTuple):
    """Logits of each part's last token, by sequence, and counts of experts."""

    eager: list[np.ndarray]
    replayed: list[np.ndarray]
    counts: list[np.ndarray]
    num_replays: int
    num_samples: int


def run_all(directory: Path, settings: dict[str, Any]) -> Found:
    """Run the steps without graphs, and replay them, on one engine: a prompt's first part needs no state of an earlier run."""
    built = build_interpreted(directory, **settings)
    generator = np.random.default_rng(3)
    sequences = [generator.integers(3, VOCABULARY, length).tolist() for length in LENGTHS]
    model, step, cache = built.model, built.runner.step, built.runner.cache
    graphs = StepGraphs(model.forward, step, cache)  # type: ignore[arg-type]
    found, counts = [], []
    for forward in (model.forward, graphs):
        if forward is graphs:
            graphs.capture((1,), FakeGraphs(), prompt_sizes=SIZES)
        model.load_counts.clear()
        for layer in model.layers:
            layer.sample_TD = None
        found.append(run_steps(built, sequences, STEPS, forward=forward, only_last=True))
        counts.append(model.load_counts.table.copy())
    samples = sum(layer.sample_TD is not None for layer in model.layers)
    eager, replayed = found
    return Found(eager, replayed, counts, graphs.num_replays, samples)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("family", "invariant"),
    [
        ("qwen3_moe", False), ("gpt_oss", False), ("deepseek_v3", False), ("deepseek_v3", True), ("qwen3_next", False),
        ("jamba", False), ("deepseek_v32", False), ("glm5_next", False),
    ],
)  # fmt: skip
def test_replayed_prompts_have_the_bits_of_steps_without_graphs(
    family: str, invariant: bool, interpreter: RankPool, tmp_path: Path
) -> None:
    write_checkpoint(family, tmp_path)
    (found,) = interpreter.run(run_all, tmp_path, {"batch_invariant": invariant}, timeout_s=400.0)
    tolerance = TOLERANCE if family == "deepseek_v3" else 0
    for eager, replayed in zip(found.eager, found.replayed, strict=True):
        np.testing.assert_allclose(replayed, eager, atol=tolerance, rtol=0)
    np.testing.assert_array_equal(*found.counts)
    assert found.counts[0].sum() > 0
    assert found.num_replays == REPLAYED
    assert found.num_samples > 0, "the largest step has no graph, so its rows may be kept"


class Answered(NamedTuple):
    """Answers of a service without graphs and of one that replays."""

    plain: Answers
    replayed: Answers
    captures: list[
        int
    ]  # numbers of the captures that were replayed; the first ones are of steps with prompts
    num_steps: int
    num_drafts: int


def serve_with_drafts(directory: Path) -> Answered:
    """Serve requests that draft with the model's own layers, some of them with prompt logprobs, penalties and rules."""
    found, recorder, counts, steps = [], FakeGraphs(), [0, 0], 0
    for replays in (False, True):
        built = build_interpreted(
            directory, speculative_config=parse_speculative_config(MTP), batch_invariant=True
        )
        always_draft(None, counts, built)
        step: Any = built.runner.step
        if replays:
            graphs = StepGraphs(built.model.forward, step, built.runner.cache)
            graphs.capture([step.graph_sizes[-1]], recorder, prompt_sizes=SIZES)
            built.runner.begin_epoch(built.runner.dispatcher, graphs)
        waves = requests()[:2], requests()[2:]
        found.append(collect(serve(built, *waves).outputs))
        steps = built.runner.figures.steps
    plain, replayed = found
    return Answered(plain, replayed, recorder.replayed, steps, counts[1])


@pytest.mark.slow
@needs_triton
def test_a_service_that_drafts_answers_the_same_from_graphs(interpreter: RankPool, tmp_path: Path) -> None:
    write_mtp_checkpoint("glm4_moe", tmp_path, change=partial(foresee, share=NEARLY_RIGHT))
    (found,) = interpreter.run(serve_with_drafts, tmp_path, timeout_s=400.0)
    assert found.replayed == found.plain
    assert found.num_drafts > 0
    assert set(found.captures) & {0, 1}, "no step with prompts was replayed"
    assert len(found.captures) < found.num_steps, (
        "a step that scores a prompt keeps hidden states, without a graph"
    )
