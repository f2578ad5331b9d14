"""Loads run one after another through an engine's loop, and decodes begin on a full cache without a prefill."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.ranks.engine_loop import EngineLoop, room
from scheduler.policy.batch import StepBatch
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import RequestOutput
from tests.support.engines.serving import request
from tests.support.models.families import make_model


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> EngineLoop:
    """Return a loop of a small model on the CPU, with overlapped steps."""
    directory: Path = tmp_path_factory.mktemp("loop")
    make_model("qwen3_moe", num_hidden_layers=1).save_pretrained(directory)
    return EngineLoop(
        EngineConfig(
            directory=directory,
            kv_cache_bytes=1 << 20,
            max_num_seqs=6,
            max_num_batched_tokens=32,
            max_model_len=64,
            enable_prefix_caching=False,
            overlaps_steps=True,
        )
    )


def test_decodes_at_a_context_prompts_beside_them_and_ordinary_loads(loop: EngineLoop) -> None:
    runner: Any = loop.assembled.runner
    launch, batches = runner.launch, list[StepBatch]()

    def launched(batch: StepBatch, *arguments: Any, **options: Any) -> Any:
        batches.append(batch)
        return launch(batch, *arguments, **options)

    runner.launch = launched
    tokens: list[int] = []
    with loop:
        for batch in (1, 4):
            batches.clear()
            seconds = loop.decode_steps_s(batch, 30, 6)
            assert len(seconds) == 6 and min(seconds) > 0
            assert all(each.num_prefill_tokens == 0 for each in batches)
            full = [each for each in batches if len(each.items) == batch]
            contexts = [item.end for each in full[8:14] for item in each.items]
            assert abs(sum(contexts) / len(contexts) - 30) < 6 and max(contexts) < 30 + room(batch, 30, 6, 32)
            assert not loop.assembled.scheduler.has_work
        first_s, between_s = loop.arrivals_s(streams=2, context=8, prompt=5, count=16, every_s=0.0)
        assert len(first_s) == 16 and between_s and min(first_s + between_s) > 0
        assert not loop.assembled.scheduler.has_work
        engine = loop.assembled.engine

        def collect(outputs: list[RequestOutput]) -> None:
            for output in outputs:
                tokens.extend(output.token_ids)

        loop.run(lambda: engine.submit(request("0", range(3, 9), max_tokens=5)), collect)
    assert len(tokens) == 5, "an ordinary load runs as well"


def test_an_error_of_the_loop_reaches_the_caller(tmp_path: Path) -> None:
    make_model("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path)
    broken = EngineLoop(
        EngineConfig(directory=tmp_path, kv_cache_bytes=1 << 20, max_num_seqs=2, max_model_len=64)
    )

    def fail() -> None:
        raise ValueError("a broken load")

    with broken, pytest.raises(RuntimeError, match="a broken load"):
        broken.run(fail, lambda _outputs: None)
