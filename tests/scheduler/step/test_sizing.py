"""How a rank's cache memory is divided into blocks and states."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcache.paged_cache import BLOCK_TOKENS, LayerShape, StateShape
from scheduler.policy.config import ConfigError
from scheduler.step.sizing import CacheSize, KVMemoryError, cache_size
from tests.support.engines.serving import build
from tests.support.models.families import write_checkpoint

ATTENTION = LayerShape(num_kv_heads=2, key_dim=16, value_dim=16)
RECURRENT = LayerShape(state=StateShape(tail=(3, 64), recurrent=(4, 16, 16)))
BLOCK, STATE = 256 * BLOCK_TOKENS, (3 * 64 + 4 * 16 * 16) * 4


def size(
    num_bytes: int, *shapes: LayerShape, length: int = 160, seqs: int = 4, snapshots: bool = True
) -> CacheSize:
    return cache_size(
        shapes, kv_cache_bytes=num_bytes, max_model_len=length, max_num_seqs=seqs, has_snapshots=snapshots
    )


def test_without_states_all_memory_is_blocks_as_many_as_all_requests_need() -> None:
    assert size(12 * BLOCK, ATTENTION) == (12, 0)
    assert size(1 << 30, ATTENTION) == (40, 0)


def test_more_blocks_of_codes_fit() -> None:
    """A token's key and value take 32 bytes per head, and their scales 8, instead of 128."""
    coded = replace(ATTENTION, codes=torch.int8)
    assert coded.token_bytes == 2 * (32 + 8) == ATTENTION.token_bytes // 16 * 5
    assert size(12 * BLOCK, coded, seqs=64) == (12 * 16 // 5, 0)
    assert ATTENTION.device_token_bytes(2) == 128 and coded.device_token_bytes(2) == 80


def test_states_take_at_most_half_and_what_requests_and_snapshots_need() -> None:
    assert size(1 << 30, ATTENTION, RECURRENT) == (40, 4 * 2 + 4 * 4)
    assert size(1 << 30, ATTENTION, RECURRENT, snapshots=False) == (40, 4 * 2)
    found = size(20 * BLOCK + 10 * STATE, ATTENTION, RECURRENT)
    assert found.num_states == (20 * BLOCK + 10 * STATE) // 2 // STATE
    assert found.num_blocks == (20 * BLOCK + 10 * STATE - found.num_states * STATE) // BLOCK


def test_the_longest_request_comes_first_and_three_states() -> None:
    assert size(10 * BLOCK + 3 * STATE, ATTENTION, RECURRENT) == (10, 3)
    assert size(10 * BLOCK + 2 * STATE, ATTENTION, RECURRENT, snapshots=False) == (10, 2)


@pytest.mark.parametrize("layers", [2, 3])
def test_too_little_memory_is_told_with_what_is_needed(layers: int) -> None:
    shapes = [ATTENTION, *[RECURRENT] * (layers - 1)]
    with pytest.raises(
        KVMemoryError, match=r"needs 0 MiB of KV cache and 3 states of 0.0 MiB .*mamba-cache-mode none"
    ):
        size(10 * BLOCK + 3 * (layers - 1) * STATE - 1, *shapes)
    with pytest.raises(KVMemoryError, match="reduce --max-model-len to 144 or less"):
        size(10 * BLOCK - 1, ATTENTION)


def test_a_flag_for_states_is_refused_where_there_are_none(tmp_path: Path) -> None:
    write_checkpoint("mixtral", tmp_path)
    with pytest.raises(
        ConfigError, match="--mamba-cache-mode none is for models with recurrent layers, and mixtral has none"
    ):
        build(tmp_path, max_model_len=64, mamba_cache_mode="none")


def test_without_snapshots_nothing_is_reused(tmp_path: Path) -> None:
    write_checkpoint("lfm2_moe", tmp_path)
    built = build(tmp_path, max_model_len=64, max_num_seqs=4, mamba_cache_mode="none")
    assert built.num_states == 8 and "in 8 slots" in built.states
