"""Engines on the GPU path size their cache by the measured memory, here of fake counters of a device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.paged_cache import PagedCache
from moe.model import Model
from scheduler.assembly import assemble
from scheduler.policy.config import EngineConfig
from scheduler.sampling.device_sampler import DeviceSampler
from scheduler.step.device_memory import MARGIN_BYTES
from scheduler.step.sizing import KVMemoryError
from tests.support.engines.serving import WaveDoorbell
from tests.support.gpu.memory import FakeMemory
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.ranks import RankPool

MIB = 1 << 20
WEIGHTS, STEP = 300 * MIB, 200 * MIB
BLOCK = 12 << 10  # of 16 tokens


LIMITS: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 8, "max_num_seqs": 3}


def built_with(
    directory: Path, step: int, settings: dict[str, Any], *, is_real: bool = False
) -> tuple[int, int, str]:
    """Return the cache's bytes, its blocks, and the text with the measured parts. Steps compute only if `is_real`."""
    memory = FakeMemory(total=1 << 30, weights=WEIGHTS, step=step)
    config = EngineConfig(
        **{"directory": directory, "kv_cache_bytes": 8 * MIB, "device": "interpreter", **LIMITS, **settings}
    )
    seen: list[tuple[int, int]] = []
    own = Model.forward

    def forward(self: Model, token_T: Tensor, cache: PagedCache, logits_R: Tensor, **options: Any) -> Tensor:
        seen.append((self.step.num_tokens, len(logits_R)))
        if is_real:
            return own(self, token_T, cache, logits_R, **options)
        return torch.zeros(len(logits_R), VOCABULARY)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "forward", forward)
        if not is_real:
            patch.setattr(Model, "logits_of", lambda _model, rows_R: torch.zeros(len(rows_R), VOCABULARY))
        built = assemble(config, WaveDoorbell(), memory=memory)
    assert not built.model.load_counts.table.any(), "the largest step must not be counted"
    assert seen.count((8, 3)) == 2, "the largest step runs twice"
    built.engine.close()
    return built.kv_cache_bytes, built.num_blocks, built.memory


def really_built(directory: Path, budget: int) -> tuple[int, int, str]:
    return built_with(directory, STEP, {"memory_bytes": budget}, is_real=True)


def why_not(directory: Path, step: int, settings: dict[str, Any]) -> str:
    with pytest.raises(KVMemoryError) as error:
        built_with(directory, step, settings)
    return str(error.value)


def out_of_memory_in_largest(directory: Path) -> str:
    """Let the largest step run out of memory, and no other."""

    def begin(_sampler: DeviceSampler, logits_RV: Tensor, contexts: Any) -> None:
        if len(contexts) == LIMITS["max_num_seqs"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB. And more.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceSampler, "begin", begin)
        return why_not(directory, STEP, {})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint("qwen3_moe", path)
    return path


def test_the_cache_gets_what_the_weights_and_the_largest_step_leave(
    interpreter: RankPool, directory: Path
) -> None:
    budget = WEIGHTS + STEP + MARGIN_BYTES + 9 * BLOCK + 5
    num_bytes, num_blocks, words = interpreter.run(built_with, directory, STEP, {"memory_bytes": budget})[0]
    assert num_bytes == 9 * BLOCK + 5 and num_blocks == 9
    assert words.startswith(
        "weights 0.29 GiB, largest step 0.20 GiB, CUDA graphs 0.00 GiB, KV cache 0.00 GiB"
    )
    _, num_blocks, _ = interpreter.run(built_with, directory, STEP + 3 * BLOCK, {"memory_bytes": budget})[0]
    assert num_blocks == 6


@pytest.mark.slow
def test_the_largest_step_runs_in_the_real_model(interpreter: RankPool, directory: Path) -> None:
    budget = WEIGHTS + STEP + MARGIN_BYTES + 9 * BLOCK
    _, num_blocks, _ = interpreter.run(really_built, directory, budget, timeout_s=300.0)[0]
    assert num_blocks == 9


def test_a_device_without_memory_for_one_sequence_is_refused_with_the_measured_sizes(
    interpreter: RankPool, directory: Path
) -> None:
    budget = WEIGHTS + STEP + MARGIN_BYTES + 3 * BLOCK  # a sequence of 64 tokens has 4
    text = interpreter.run(why_not, directory, STEP, {"memory_bytes": budget})[0]
    assert "--max-model-len 64" in text
    assert text.endswith("measured: weights 0.29 GiB, largest step 0.20 GiB, CUDA graphs 0.00 GiB")
    text = interpreter.run(why_not, directory, STEP, {"memory_bytes": budget - 4 * BLOCK})[0]
    assert "leaves nothing for the KV cache" in text


def test_a_given_cache_is_kept_if_it_fits_beside_the_step(interpreter: RankPool, directory: Path) -> None:
    num_bytes, num_blocks, _ = interpreter.run(built_with, directory, STEP, {"kv_cache_bytes": 5 * BLOCK})[0]
    assert (num_bytes, num_blocks) == (5 * BLOCK, 5)
    text = interpreter.run(why_not, directory, STEP, {"kv_cache_bytes": 600 * MIB})[0]
    assert text.startswith("--kv-cache-memory is 0.59 GiB, but 0.51 GiB is left of the GPU's 1.00 GiB")


def test_a_largest_step_without_memory_is_named(interpreter: RankPool, directory: Path) -> None:
    text = interpreter.run(out_of_memory_in_largest, directory)[0]
    assert text.startswith(
        "the GPU has not enough memory for the largest step or its CUDA graphs, with 0.29 GiB in use: CUDA out of memory; "
    )
