"""Collections of garbage while an engine serves skip what it has loaded at its start."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from server.serve import engine
from server.serve.store.rendezvous import Place

STUBS = (
    "_own_store", "address_elsewhere", "check_nodes_together", "PrefixStore", "StoreDoorbell", "_join", "_tell_decisions",
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
    monkeypatch.setattr(engine, "_front", lambda *_: {})
    monkeypatch.setattr(engine, "loading_of", lambda *_, **__: SimpleNamespace(note=lambda *_, **__: None))
    monkeypatch.setattr(engine, "engine_config", lambda *_: SimpleNamespace(kv_cache_bytes=0, memory_bytes=None))
    monkeypatch.setattr(engine, "assemble", assemble)
    monkeypatch.setattr(engine, "_walk", walk)
    before = gc.get_freeze_count()
    try:
        options: Any = SimpleNamespace(cluster_key=None, model="m", join=None)
        place = Place(
            rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=1
        )
        engine._serve(options, place, {})
        ((has_garbage, is_tracked, frozen),) = seen
        assert not has_garbage and not is_tracked and frozen > before
    finally:
        gc.unfreeze()
