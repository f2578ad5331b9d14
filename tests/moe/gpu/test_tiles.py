"""Which tile a launch takes."""

import pytest

from moe.gpu import tiles
from moe.gpu.tiles import choose_tile


@pytest.mark.parametrize(
    ("num_pairs", "wanted"), [(8, tiles.DECODE_TILE), (8191, tiles.DECODE_TILE), (8192, tiles.PREFILL_TILE)]
)
def test_room_for_many_rows_per_slot_takes_the_tile_for_many(
    num_pairs: int, wanted: tiles.GroupedTile
) -> None:
    assert choose_tile(num_pairs, 128) == wanted


@pytest.mark.parametrize("is_fp8", [False, True])
def test_tiles_of_a_format_take_the_inner_dimension_in_the_same_steps(is_fp8: bool) -> None:
    made = [choose_tile(num_pairs, 1, is_fp8=is_fp8) for num_pairs in (1, 1 << 20)]
    assert made[0] != made[1]
    assert made[0].inner == made[1].inner
    assert all(tile.columns % 64 == 0 for tile in made)  # what Hopper's instruction takes at least
