"""Overlapped steps of several ranks serve the same answers as steps one after another, also if ranks have different work.

Engines on the CPU compute a step at its launch. They replace a device, which queues work in the same order.
"""

import itertools
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from dispatch.dispatcher import Dispatcher
from dispatch.errors import PeerLost
from scheduler.assembly import Assembled, assemble
from scheduler.epochs.orders import Order
from scheduler.policy.config import DispatchMode, EngineConfig
from scheduler.policy.request import FinishReason, RankStats, RequestOutput
from tests.fixtures import PoolOf
from tests.scheduler.epochs.test_regrouping import requests, serving
from tests.scheduler.test_overlapped_steps import (
    Answer,
    Workload,
    answers,
    check_same,
    engine_of,
    log_of,
    num_behind,
    workload,
)
from tests.support.engines.crew import Doom
from tests.support.engines.serving import WaveDoorbell, request, serve
from tests.support.models.families import make_model, write_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint."""
    made: Path = tmp_path_factory.mktemp("overlapped")
    make_model("qwen3_moe", num_hidden_layers=2).save_pretrained(made)
    return made


def launch_ahead(_built: Assembled | None = None) -> None:
    """Let ranks on the CPU launch low-latency steps ahead, as on GPUs."""
    Dispatcher.is_replayable = True


class Found(NamedTuple):
    """What a rank served, and its steps."""

    answers: dict[str, Answer]
    num_behind: int  # steps that were launched before the one before was read
    num_steps: int
    num_low_latency: int


def serve_share(directory: Path, seed: int, overlaps: bool, settings: dict[str, Any]) -> Found:
    """Serve this rank's workload. With seed 0, rank 1 has none."""
    if overlaps:
        launch_ahead()
    try:
        built = engine_of(directory, overlaps=overlaps, **settings)
        log, agreed = log_of(built), list[int]()
        launch = built.runner.launch

        def launched(batch: Any, agreed_tokens: int, **options: Any) -> Any:
            agreed.append(agreed_tokens)
            return launch(batch, agreed_tokens, **options)

        built.runner.launch = launched  # type: ignore[method-assign, assignment]
        rank = dist.get_rank()
        given = workload(seed + 100 * rank, count=12)
        if seed == 0 and rank == 1:
            given = Workload(deque(), {})
        found = answers(built, given)
        steps = sum(event == "launch" for event, _ in log)
        return Found(found, num_behind(log), steps, sum(map(bool, agreed)))
    finally:
        Dispatcher.is_replayable = False


@pytest.mark.crossed("seed", every=2)
@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (0, {}),
        (1, {}),
        (2, {"max_num_seqs": 3, "max_num_batched_tokens": 9, "dispatch_mode": DispatchMode.LOW_LATENCY}),
        pytest.param(3, {"dispatch_mode": DispatchMode.NORMAL}, marks=pytest.mark.slow),
        pytest.param(4, {"all2all_backend": "gloo"}, marks=pytest.mark.slow),
        pytest.param(5, {"enable_prefix_caching": False}, marks=pytest.mark.slow),
    ],
)
def test_overlapped_steps_of_two_ranks_give_every_request_the_same_bits(
    pool_of: PoolOf, directory: Path, seed: int, settings: dict[str, Any]
) -> None:
    """All ranks launch the same steps. Those in normal mode wait for the device, so they are launched after a read."""
    both = [pool_of(2).run(serve_share, directory, seed, overlaps, settings) for overlaps in (False, True)]
    assert len({each.num_steps for each in both[1]}) == 1
    for alone, behind in zip(*both, strict=True):
        check_same(behind.answers, alone.answers)
        assert alone.num_behind == 0
        if settings.get("dispatch_mode") is DispatchMode.NORMAL:
            assert behind.num_behind == behind.num_low_latency == 0
        else:
            assert behind.num_low_latency // 3 < behind.num_behind <= behind.num_low_latency


@pytest.mark.crossed("call", every=2)
@pytest.mark.parametrize(("call", "num_planned"), [("launch", 2), ("read", 2), ("sample", 1)])
def test_steps_that_break_off_run_again_in_their_order(directory: Path, call: str, num_planned: int) -> None:
    """A lost rank is found in a launch behind a running step, or when that one is read. Samples follow the read."""
    asked = [
        request("0", range(3, 9), max_tokens=20, temperature=1.0, seed=5, frequency_penalty=1.0),
        request("1", range(30, 50), max_tokens=14),
    ]
    wanted = serve(engine_of(directory, overlaps=False), asked).token_ids
    config = EngineConfig(
        directory=directory, kv_cache_bytes=8 << 20, max_model_len=128, max_num_seqs=6, overlaps_steps=True
    )
    built = assemble(config, WaveDoorbell(), store=HashStore(), is_joining=True)
    engine, tokens, ends = built.engine, dict[str, list[int]](), list[FinishReason]()
    true, calls, planned = getattr(built.runner, call), itertools.count(), list[int]()

    def broken(*arguments: Any, **options: Any) -> Any:
        if next(calls) in (5, 6, 9):
            planned.append(len(engine._planned))
            raise PeerLost(1, "it is lost")
        return true(*arguments, **options)

    def on_fault(epoch: int, _reason: str, *, is_final: bool = False) -> None:
        engine.regroup(Order(epoch + 1, (0,), built.relocation.placement))

    def on_step(outputs: list[RequestOutput], _stats: RankStats) -> None:
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            ends.extend([output.finish_reason] if output.finish_reason else [])
        if len(ends) == len(asked):
            engine.stop()

    setattr(built.runner, call, broken)
    engine.tell_membership(on_fault, lambda _epoch: None)
    engine.regroup(Order(1, (0,), built.relocation.placement))
    for each in asked:
        engine.submit(each)
    engine.run(on_step)
    engine.close()
    assert tokens == wanted and max(planned) == num_planned and len(planned) == 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("steps", [12, 13])
def test_steps_that_a_lost_rank_breaks_off_run_again(tmp_path: Path, backend: str, steps: int) -> None:
    """The survivors have a step that runs, and one that was launched behind it."""
    write_checkpoint("gpt_oss", tmp_path)
    wanted, settings = requests(0, 12), {"all2all_backend": backend, "overlaps_steps": True}
    with serving(
        tmp_path, 3, wanted, at_first=9, dooms={1: Doom(steps)}, prepare=launch_ahead, **settings
    ) as crew:
        crew.until(lambda: crew.lost == [1])
        crew.order([0, 2])
        crew.replay(1, to=2)
        crew.until(lambda: crew.serve_in(1))
        crew.bring_back(1)
        crew.submit(0, wanted[9:10])
        crew.order([0, 1, 2])
        crew.until(lambda: crew.serve_in(2))
        crew.submit(1, wanted[10:])
