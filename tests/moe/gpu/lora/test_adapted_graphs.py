"""Replayed steps with adapters have the bits of the same steps without a graph, also after the adapters have changed places."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor

from scheduler.step.graphs import CudaRecorder, Run, StepGraphs
from tests.moe.lora.test_adapted_model import make_case, place_all
from tests.support.engines.serving import build
from tests.support.gpu.interpreted import needs_triton
from tests.support.gpu.path import SETTINGS, Part, build_interpreted, run_steps
from tests.support.gpu.recorded import FakeGraphs
from tests.support.models.adapters import write_adapter
from tests.support.models.families import SHALLOW, VOCABULARY, make_model
from tests.support.ranks import RankPool

pytestmark = needs_triton

LENGTHS = (7, 4)
DECODES = [[Part(0, 0, 5), Part(1, 0, 3)], [Part(0, 5, 6), Part(1, 3, 4)]]
PROMPTS = [[Part(0, 0, 5)], [Part(0, 5, 6), Part(1, 0, 3)], [Part(0, 6, 7), Part(1, 3, 4)]]
# Places of both sequences' adapters; whether the adapters have changed places before.
CASES = [((0, 1), False), ((0, -1), True)]


class CountingGraphs(FakeGraphs):
    """CUDA's graphs. What they launch is not known."""

    def __init__(self) -> None:
        super().__init__()
        self._recorder = CudaRecorder()

    def capture(self, run: Run) -> Run:
        """Capture, and note the replays."""
        replay, number = self._recorder.capture(run), len(self.launches)
        self.launches.append([])

        def counted() -> Tensor:
            self.replayed.append(number)
            return replay()

        return counted


class Found(NamedTuple):
    """Logits by case, and the captures that were replayed."""

    eager: list[list[np.ndarray]]
    replayed: list[list[np.ndarray]]
    captures: list[list[int]]
    launches: list[list[str]]  # of each capture


def run_all(
    directory: Path,
    paths: Sequence[Path],
    steps: list[list[Part]],
    sizes: Sequence[int],
    cases: list[Any],
    device: str = "interpreter",
) -> Found:
    """Capture while no adapter has a place. Then run each case with graphs and without."""
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}
    if device == "interpreter":
        built, recorder = build_interpreted(directory, **settings), FakeGraphs()
    else:
        built, recorder = build(directory, device=device, **SETTINGS, **settings), CountingGraphs()
    generator = np.random.default_rng(3)
    sequences = [generator.integers(3, VOCABULARY, length).tolist() for length in LENGTHS]
    model, step, cache = built.model, built.runner.step, built.runner.cache
    graphs = StepGraphs(model.forward, step, cache)  # type: ignore[arg-type]
    graphs.capture((2,), recorder, prompt_sizes=sizes)
    found, are_exchanged = Found([], [], [], recorder.launches), False
    place_all(built, paths)
    for adapters, is_exchanged in cases:
        if is_exchanged and not are_exchanged:
            place_all(built, paths[::-1])
            are_exchanged = True
        for forward, results in ((model.forward, found.eager), (graphs, found.replayed)):
            before = len(recorder.replayed)
            results.append(
                run_steps(built, sequences, steps, forward=forward, only_last=True, adapters=adapters)
            )
        found.captures.append(recorder.replayed[before:])
    return found


def check(found: Found, num_replays: int) -> None:
    for index, (eager, replayed) in enumerate(zip(found.eager, found.replayed, strict=True)):
        for own, same in zip(replayed, eager, strict=True):
            assert np.array_equal(own, same), f"case {index}"
        assert len(found.captures[index]) == num_replays
    assert not np.array_equal(found.eager[0][0], found.eager[-1][0]), "adapters change something"


def write_model(family: str, root: Path, **settings: Any) -> list[Path]:
    model = make_model(family, **settings)
    model.save_pretrained(root / "model")
    modules = ("q_proj", "o_proj", "gate", "embed_tokens", "lm_head")
    return [
        write_adapter(
            root / f"adapter{index}", model, modules=modules, rank=4 + 13 * index, seed=index
        ).directory
        for index in range(2)
    ]


def test_a_replay_serves_adapters_that_came_after_its_capture(interpreter: RankPool, tmp_path: Path) -> None:
    paths = write_model("qwen3_moe", tmp_path, num_hidden_layers=1)
    cases = [((0, 1), False), ((-1, -1), False), ((0, 1), True)]
    [found] = interpreter.run(run_all, tmp_path / "model", paths, DECODES, (), cases)
    check(found, 1)
    plain, adapted = found.launches
    assert found.captures == [[1], [0], [1]]
    assert "shrink_rows" in adapted and "look_up_rows" in adapted and "shrink_rows" not in plain


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_replayed_prompts_and_decodes_have_the_bits_of_eager_ones(
    family: str, interpreter: RankPool, tmp_path: Path
) -> None:
    case = make_case(family, tmp_path, of_model=SHALLOW.get(family))
    [found] = interpreter.run(run_all, case.directory, case.paths, PROMPTS, (8,), CASES, timeout_s=900.0)
    check(found, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_gpu_replays_the_bits_of_eager_steps(family: str, tmp_path: Path) -> None:
    case = make_case(family, tmp_path)
    check(run_all(case.directory, case.paths, PROMPTS, (8,), CASES, "cuda"), 3)
