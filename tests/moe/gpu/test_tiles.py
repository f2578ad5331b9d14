"""Which tile a launch takes."""

import pytest
import torch

from moe.gpu import tiles
from moe.gpu.tiles import check_steps, choose_tile, tile_of_launch


@pytest.mark.parametrize(
    ("num_pairs", "wanted"), [(8, tiles.DECODE_TILE), (8191, tiles.DECODE_TILE), (8192, tiles.PREFILL_TILE)]
)
def test_room_for_many_rows_per_slot_takes_the_tile_for_many(
    num_pairs: int, wanted: tiles.GroupedTile
) -> None:
    assert choose_tile(num_pairs, 128) == wanted


def test_eight_ranks_of_32_tokens_take_the_tile_for_few_rows() -> None:
    """256 experts, 8 choices: 32 slots get 256 pairs, 8 each, where loads are even; there is room for 2,048, 64 each."""
    assert choose_tile(32 * 8, 32) == tiles.DECODE_TILE
    assert choose_tile(8 * 32 * 8, 32) == tiles.PREFILL_TILE


@pytest.mark.parametrize("is_quantised", [False, True])
def test_tiles_of_a_format_take_the_inner_dimension_in_the_same_steps(is_quantised: bool) -> None:
    made = [choose_tile(num_pairs, 1, is_quantised=is_quantised) for num_pairs in (1, 1 << 20)]
    assert made[0] != made[1]
    assert made[0].inner == made[1].inner
    assert all(tile.columns % 64 == 0 for tile in made)  # what Hopper's instruction takes at least


def test_where_the_table_is_silent_the_launch_takes_the_fallback() -> None:
    weights = torch.empty(3, 64, 32)
    assert tile_of_launch(9, 3, weights) == tiles.DECODE_TILE
    assert tile_of_launch(900, 3, weights.to(torch.float8_e4m3fn)) == tiles.FP8_PREFILL_TILE


def test_the_table_is_asked_by_device_step_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"float32 N64 K32": {"rows": 32, "columns": 128}}
    table = {"sm_90": {"grouped_decode": entry}}
    monkeypatch.setattr(tiles, "device_names", lambda _device: ("NVIDIA H200", "sm_90"))
    monkeypatch.setattr("attention.gpu.tiles.read_table", lambda: table)
    wanted = tiles.DECODE_TILE._replace(rows=32, columns=128)
    assert tile_of_launch(9, 3, torch.empty(3, 64, 32)) == wanted
    assert tile_of_launch(900, 3, torch.empty(3, 64, 32)) == tiles.PREFILL_TILE
    assert tile_of_launch(9, 3, torch.empty(3, 64, 16)) == tiles.DECODE_TILE


@pytest.mark.parametrize("changed", [{"inner": 128}, {"columns": 32}])
def test_a_table_may_not_change_the_order_of_sums(changed: dict[str, int]) -> None:
    fallback = tiles.DECODE_TILE
    assert check_steps("float32 N64 K32", fallback._replace(rows=32), fallback).rows == 32
    with pytest.raises(ValueError, match=r"tiles\.json: a grouped product of float32 N64 K32 has inner"):
        check_steps("float32 N64 K32", fallback._replace(**changed), fallback)
