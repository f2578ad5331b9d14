"""Experts that are read ahead of an order: the checkpoint's bytes, no second read, and what is freed."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from expert_placement.placement import linear_placement
from moe.expert_weights import digest, read_slot
from moe.load.checkpoint import CheckpointError
from scheduler.assembly import Assembled, assemble
from scheduler.policy.config import EngineConfig
from tests.support.engines.serving import WaveDoorbell, build
from tests.support.models.families import write_checkpoint

NUM_EXPERTS = 8
MISSING = [4, 5, 6, 7]  # on rank 0 of 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint("gpt_oss", directory)  # has biases
    return directory


def half(checkpoint: Path, available: Callable[[], int] = lambda: 1 << 40) -> Assembled:
    """Return rank 0 of 2, which has not met the other one."""
    config = EngineConfig(
        directory=checkpoint, kv_cache_bytes=8 << 20, max_model_len=160, world_size=2, num_local_ranks=2
    )
    return assemble(config, WaveDoorbell(), store=dist.HashStore(), is_joining=True, available=available)


def read(built: Assembled, version: int = 5) -> tuple[int, str]:
    """Read the other rank's experts ahead. Return the report."""
    told, came = list[tuple[int, str]](), threading.Event()

    def note(*what: Any) -> None:
        told.append(what)  # type: ignore[arg-type]
        came.set()

    built.read_ahead.on_read = note
    num_layers = len(built.model.layers)
    built.read_ahead.begin(linear_placement(num_layers, NUM_EXPERTS, 1).with_version(version), 0)
    assert came.wait(60)
    return told[0]


def refuse(*_: object) -> None:
    raise AssertionError("an expert is read a second time")


def test_the_missing_experts_are_read_once_and_have_the_checkpoint_s_bytes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, whole = half(checkpoint), build(checkpoint, max_model_len=160)
    layers = range(len(built.model.layers))
    assert read(built) == (5, "")
    ready, spare = built.read_ahead.take(), built.relocation.spare
    assert sorted(ready) == [(layer, expert) for layer in layers for expert in MISSING]
    assert built.read_ahead.take() == {}
    held = built.relocation.placement.local(0).tolist()
    monkeypatch.setattr(built.model, "_read_expert", refuse)
    built.model.hold([list(range(NUM_EXPERTS))] * len(held), held, spare, 4, ready)
    assert ready == {} and held == [list(range(NUM_EXPERTS))] * len(held)
    for layer in layers:
        for slot in range(NUM_EXPERTS):
            own, wanted = (
                digest(read_slot(each.model.layers[layer], slot).tensors()) for each in (built, whole)
            )
            assert own == wanted
    built.engine.close()


@pytest.mark.slow
def test_experts_that_an_order_does_not_need_stay_ready(checkpoint: Path) -> None:
    built = half(checkpoint)
    read(built)
    ready, held = built.read_ahead.take(), built.relocation.placement.local(0).tolist()
    built.model.hold([[0, 1, 2, 3, 6]] * len(held), held, built.relocation.spare, 4, ready)
    assert sorted({expert for _, expert in ready}) == [4, 5, 7]
    built.engine.close()


@pytest.mark.slow
def test_a_drop_frees_what_was_read_for_that_version(checkpoint: Path) -> None:
    built = half(checkpoint)
    read(built)
    built.read_ahead.drop(4)
    assert len(built.read_ahead._ready) == len(MISSING) * len(built.model.layers)
    built.read_ahead.drop(5)
    assert built.read_ahead.take() == {} and built.relocation.spare.num_free <= 4
    built.engine.close()


def test_a_drop_does_not_wait_for_the_disk(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = half(checkpoint)
    num_layers, read_expert = len(built.model.layers), built.model.read_expert
    is_reading, may_read, has_dropped = threading.Event(), threading.Event(), threading.Event()

    def read_slowly(*what: Any) -> None:
        if built.read_ahead._ready:  # not the first one
            is_reading.set()
            assert may_read.wait(60)
        read_expert(*what)

    def drop() -> None:
        built.read_ahead.drop(5)
        has_dropped.set()

    monkeypatch.setattr(built.model, "read_expert", read_slowly)
    target = linear_placement(num_layers, NUM_EXPERTS, 1).with_version(5)
    built.read_ahead.begin(target, 0)
    assert is_reading.wait(60)
    threading.Thread(target=drop).start()
    returned = has_dropped.wait(5)
    has_ended = threading.Event()
    built.relocation.later(has_ended.set)
    may_read.set()
    assert returned and has_ended.wait(60)
    assert built.read_ahead._ready == {}, "the mover frees what a drop could not"
    assert built.read_ahead.take() == {} and built.relocation.spare.num_free <= 4
    assert read(built, 6) == (6, "") and len(built.read_ahead.take()) == num_layers * len(MISSING)
    built.engine.close()


def test_what_was_read_for_a_dropped_version_is_not_taken(checkpoint: Path) -> None:
    built = half(checkpoint)
    assert read(built) == (5, "")
    with built.read_ahead._lock:  # as while the mover ends
        built.read_ahead.drop(5)
        built.read_ahead._version = 6  # as if another one were wanted already
    assert built.read_ahead.take() == {}
    built.engine.close()


@pytest.mark.slow
def test_too_little_memory_and_a_broken_checkpoint_are_reported(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = half(checkpoint, lambda: 1 << 10)
    version, problem = read(built)
    num_missing = len(MISSING) * len(built.model.layers)
    assert version == 5 and problem.startswith(
        f"it would read {num_missing} experts; with the other ranks of its host"
    )
    assert "0.0 MiB are available" in problem and built.read_ahead.take() == {}
    built.engine.close()
    built = half(checkpoint)

    ready = list[bool]()

    def fail(*_: object) -> None:
        ready.append(bool(built.read_ahead._ready))
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(built.model, "read_expert", fail)
    assert read(built) == (5, "an expert could not be read: the disk is gone")
    assert ready == [False], "an order that comes now does not take an expert that has not been read"
    assert built.read_ahead.take() == {}
    built.engine.close()
