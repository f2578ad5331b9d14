"""Collections of garbage while an engine serves skip what it has loaded at its start. A GPU's share of memory is passed on."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scheduler.policy.config import EngineConfig, EngineSettings
from scheduler.step.sizing import WORKSPACE_BYTES, KVMemoryError
from server.options.pools import single_pool
from server.options.table import Options
from server.serve.preflight.memory import AttentionHeads
from server.serve.rank import engine
from server.serve.store.rendezvous import Place

STUBS = (
    "address_elsewhere", "check_nodes_together", "PrefixStore", "_join", "_tell_decisions",
    "front_stream", "_peer_network",
)  # fmt: skip


class Cycle:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.own = self


def test_serving_begins_with_all_loaded_objects_frozen_and_no_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[Any] = []
    seen: list[tuple[bool, bool, int]] = []

    def assemble(*_: object, **__: object) -> object:
        Cycle()
        loaded.append([Cycle()])
        return SimpleNamespace(engine=SimpleNamespace(close=list))

    def walk(*_: object) -> None:
        tracked = gc.get_objects()
        has_garbage = any(type(each) is Cycle for each in tracked)
        seen.append((has_garbage, any(each is loaded[0] for each in tracked), gc.get_freeze_count()))

    for name in STUBS:
        monkeypatch.setattr(engine, name, lambda *_, **__: None)
    monkeypatch.setattr(
        engine, "JobStore", lambda *_, **__: SimpleNamespace(open=lambda: None, open_doorbell=lambda _: None)
    )
    monkeypatch.setattr(engine, "_fronts", lambda *_, **__: ({}, None))
    monkeypatch.setattr(engine, "loading_of", lambda *_, **__: SimpleNamespace(note=lambda *_, **__: None))
    monkeypatch.setattr(
        engine, "engine_config", lambda *_: SimpleNamespace(kv_cache_bytes=0, memory_bytes=None)
    )
    monkeypatch.setattr(engine, "assemble", assemble)
    monkeypatch.setattr(engine, "_walk", walk)
    before = gc.get_freeze_count()
    try:
        options: Any = SimpleNamespace(
            cluster_key=None,
            model="m",
            join=None,
            standby=None,
            engine=EngineSettings(),
            pools=None,
            has_own_pool=False,
            pools_among=lambda _ranks: single_pool(1),
        )
        place = Place(
            rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=1
        )
        engine._serve(options, place, {})
        ((has_garbage, is_tracked, frozen),) = seen
        assert not has_garbage and not is_tracked and frozen > before
    finally:
        gc.unfreeze()


GIB = 1 << 30


def gpu_config(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> EngineConfig:
    """Return the settings of a rank on a GPU with 100 GiB free, for a model with 40 GiB of weights."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (100 * GIB, 140 * GIB))
    monkeypatch.setattr(engine, "attention_heads", lambda _options: AttentionHeads(1, (), False, False, 4096))
    monkeypatch.setattr(engine, "rank_bytes", lambda _options, _ranks: 40 * GIB)
    share = settings.pop("gpu_memory_utilization", None)
    options = Options(model="m", device="cuda", gpu_memory_utilization=share)
    options = options.with_engine(max_num_seqs=8, max_num_batched_tokens=64, **settings)
    place = Place(
        rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=1
    )
    return engine.engine_config(options, place)


def test_a_gpu_gets_a_share_to_measure_and_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpu_config(monkeypatch, gpu_memory_utilization=0.5)
    assert config.memory_bytes == 50 * GIB and config.kv_cache_bytes == 10 * GIB - WORKSPACE_BYTES
    assert gpu_config(monkeypatch).memory_bytes == 90 * GIB
    with pytest.raises(KVMemoryError, match=r"steps about 2.0 GiB, which leaves nothing"):
        gpu_config(monkeypatch, gpu_memory_utilization=0.41)


def test_a_given_cache_of_a_gpu_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpu_config(monkeypatch, kv_cache_bytes=3 * GIB)
    assert config.memory_bytes is None and config.kv_cache_bytes == 3 * GIB
