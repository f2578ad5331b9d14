"""The layout of the tiers' records: settings and devices that change bits have different ones, and ranks divide a tier alike."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.paged_cache import LayerShape, PagedCache, StateShape
from kvcache.tiers.opening import Kinds, open_disk
from kvcache.tiers.tiers import Units
from kvcache.unit import CacheUnit, block_parts, state_parts
from scheduler.policy.config import EngineConfig
from scheduler.step.cache_tiers import _kinds

ATTENTION = LayerShape(num_kv_heads=2, key_dim=8, value_dim=16)
RECURRENT = LayerShape(state=StateShape(tail=(3, 4), recurrent=(64, 64)))


def kinds_of(*, device: str = "cpu", num_blocks: int = 8, num_states: int = 4, **settings: Any) -> Kinds:
    """Return the kinds of records of a rank with a small cache in the CPU's memory."""
    cache = PagedCache([ATTENTION, RECURRENT], num_blocks, num_states)
    config = EngineConfig(directory=Path(), kv_cache_bytes=1, **settings)
    units = Units(CacheUnit(block_parts(cache)), CacheUnit(state_parts(cache)))
    return _kinds(config, cache, torch.device(device), units)


@pytest.mark.parametrize(
    ("device", "settings", "changes"),
    [
        ("cpu", {}, False),
        ("cpu", {"dispatch_dtype": "fp8"}, True),
        ("cpu", {"all2all_backend": "gloo"}, False),
        ("cpu", {"enable_torch_compile": True}, False),
        ("cuda", {}, False),
        ("cuda", {"dispatch_dtype": "fp8"}, True),
        ("cuda", {"all2all_backend": "deep_ep"}, True),
        ("cuda", {"enable_torch_compile": True}, True),
    ],
)
def test_a_setting_that_changes_bits_changes_the_layout(
    monkeypatch: pytest.MonkeyPatch, device: str, settings: dict[str, Any], changes: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    before, after = kinds_of(device=device), kinds_of(device=device, **settings)
    assert (before.blocks.model != after.blocks.model) is changes
    assert before.blocks.software == after.blocks.software


def test_another_gpu_is_other_software_as_another_processor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("NVIDIA H100", "NVIDIA H200"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        found.append(kinds_of(device="cuda", software_facts="torch 2"))
    one, other = found
    assert one.blocks.software != other.blocks.software and one.blocks.model == other.blocks.model
    assert one.states is not None and one.states.software == one.blocks.software


def test_ranks_with_caches_of_other_sizes_divide_a_tier_alike_and_find_its_blocks(tmp_path: Path) -> None:
    """Each rank measures the free memory at its own start, and one that restarts may find less."""
    first, second = kinds_of(num_blocks=120, num_states=9), kinds_of(num_blocks=119, num_states=8)
    assert first == second and 0 < first.states_share < 1
    key, record, checksum = b"k" * 16, bytes(first.blocks.record_bytes), 7
    running = open_disk(tmp_path, first, 4 << 20)
    assert running.blocks.write(key, [memoryview(record)], checksum)
    other = open_disk(tmp_path, second, 4 << 20)  # while the first one runs
    assert other.blocks.has(key) and other.blocks.num_records == running.blocks.num_records
    for tier in (running, other):
        tier.blocks.close()
        assert tier.states is not None
        tier.states.close()
    again = open_disk(tmp_path, second, 4 << 20)
    assert again.blocks.has(key)
