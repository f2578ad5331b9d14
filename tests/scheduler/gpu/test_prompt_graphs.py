"""Replayed steps with prompts have the bits of the same steps without a graph: heads, windows, sinks, latents, recurrences."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from scheduler.step.graphs import StepGraphs
from tests.support.gpu.interpreted import needs_triton
from tests.support.gpu.path import Part, build_interpreted, run_steps
from tests.support.gpu.recorded import FakeGraphs
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.ranks import RankPool

SIZES = (8, 16)
LENGTHS = (20, 12, 25)
# A chunk; the rest of the prompt, across a block's end, next to another one; prompts next to one and to two decodes;
# a step of 21 rows, which is larger than all sizes; decodes alone.
STEPS = [
    [Part(0, 0, 7)],
    [Part(0, 7, 17), Part(1, 0, 3)],
    [Part(0, 17, 18), Part(1, 3, 10)],
    [Part(0, 18, 19), Part(1, 10, 11), Part(2, 0, 5)],
    [Part(0, 19, 20), Part(2, 5, 25)],
    [Part(1, 11, 12)],
]
REPLAYED = 5
# In float32. The bits of torch's products depend on the number of rows; latents are attended absorbed, not expanded.
TOLERANCE = 2e-5


class Found(NamedTuple):
    """Logits of each part's last token, by sequence, and counts of experts."""

    as_before: list[np.ndarray]  # without sizes for prompts
    padded: list[np.ndarray]  # padded to the sizes, without graphs
    replayed: list[np.ndarray]
    counts: list[np.ndarray]
    num_replays: int


def run_all(directory: Path, settings: dict[str, Any]) -> Found:
    """Run the steps in three ways on one engine: a prompt's first part needs no state of an earlier run."""
    built = build_interpreted(directory, **settings)
    generator = np.random.default_rng(3)
    sequences = [generator.integers(3, VOCABULARY, length).tolist() for length in LENGTHS]
    model, step, cache = built.model, built.runner.step, built.runner.cache
    graphs = StepGraphs(model.forward, step, cache)  # type: ignore[arg-type]
    found, counts = [], []
    for kind in ("as before", "padded", "replayed"):
        if kind == "padded":
            step.fix_prompts(SIZES)  # type: ignore[attr-defined]
        if kind == "replayed":
            graphs.capture((1,), FakeGraphs(), prompt_sizes=SIZES)
        model.load_counts.clear()
        forward = graphs if kind == "replayed" else model.forward
        found.append(run_steps(built, sequences, STEPS, forward=forward, only_last=True))
        counts.append(model.load_counts.table.copy())
    as_before, padded, replayed = found
    return Found(as_before, padded, replayed, counts, graphs.num_replays)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("family", "invariant"),
    [
        ("gpt_oss", False), ("deepseek_v3", True), ("qwen3_next", False), ("jamba", False),
        ("deepseek_v32", False),
    ],
)  # fmt: skip
def test_replayed_prompts_have_the_bits_of_the_same_step_without_a_graph(
    family: str, invariant: bool, interpreter: RankPool, tmp_path: Path
) -> None:
    write_checkpoint(family, tmp_path, is_shallow=True)
    (found,) = interpreter.run(run_all, tmp_path, {"batch_invariant": invariant}, timeout_s=400.0)
    for before, padded, replayed in zip(found.as_before, found.padded, found.replayed, strict=True):
        np.testing.assert_array_equal(replayed, padded)
        np.testing.assert_allclose(replayed, before, atol=TOLERANCE, rtol=0)
    for counts in found.counts[1:]:
        np.testing.assert_array_equal(counts, found.counts[0])
    assert found.counts[0].sum() > 0
    assert found.num_replays == REPLAYED
