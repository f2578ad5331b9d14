"""Choose the tile of a launch of the grouped product: one for decode and one for prefill per weight format.

The choice depends on the rows per slot with even loads, which follow from the step's capacity and are equal on
all ranks, never on the experts that rows chose. Tiles of a format add over the inner dimension in the same order and
steps, with the same instruction of an architecture (64 columns on Hopper's wgmma, for any number of rows), so a row has
the same bits in decode steps and next to prompts. The table of `attention.gpu.tiles` may change all but the steps.
"""

from typing import NamedTuple

from attention.gpu.tiles import device_names, shape_key, tile_of
from moe.gpu.formats import PlacedWeights
from moe.gpu.limits import TILE_INPUTS

MANY_ROWS = 64  # per slot; from here on, reading weights costs less than multiplying


class GroupedTile(NamedTuple):
    """Shape of a program's work."""

    rows: int
    columns: int
    inner: int
    group: int  # tiles of rows that share a tile of columns
    warps: int
    stages: int


LEAST_COLUMNS = 64  # of one instruction on Hopper
DECODE_TILE = GroupedTile(16, 64, 64, 1, 4, 5)  # few rows per expert: read weights fast
PREFILL_TILE = GroupedTile(128, 128, 64, 8, 8, 3)  # many rows: keep the tensor cores busy
# For quantised weights of eight or four bits: a cache line of each row, and FP8's scale for 128 inputs.
QUANTISED_DECODE_TILE = GroupedTile(16, 64, TILE_INPUTS, 1, 4, 4)
QUANTISED_PREFILL_TILE = GroupedTile(64, 128, TILE_INPUTS, 8, 8, 3)


def choose_tile(expected_pairs: int, num_slots: int, *, is_quantised: bool = False) -> GroupedTile:
    """Choose the tile of a launch.

    Args:
        expected_pairs: Pairs on this rank with even loads, at the size that all ranks agreed on.
        num_slots: Slots of this rank; equal on all ranks.
        is_quantised: True if weights are quantised.
    """
    if expected_pairs < MANY_ROWS * num_slots:
        return QUANTISED_DECODE_TILE if is_quantised else DECODE_TILE
    return QUANTISED_PREFILL_TILE if is_quantised else PREFILL_TILE


def shape_of(weights: PlacedWeights) -> str:
    """Return the weights' key in the table: the kind of their codes (or plain weights' type), and their sides."""
    codes, kind = weights.codes, weights.format.kind
    return shape_key(codes.dtype if kind == "plain" else kind, N=codes.shape[1], K=weights.in_dim)


def tile_of_launch(expected_pairs: int, num_slots: int, weights: PlacedWeights) -> GroupedTile:
    """Return the table's tile for a launch on the weights' device, otherwise that of `choose_tile`.

    Raises:
        ValueError: The table would change the order of sums between steps.
    """
    fallback = choose_tile(expected_pairs, num_slots, is_quantised=weights.format.kind != "plain")
    kernel = "grouped_decode" if expected_pairs < MANY_ROWS * num_slots else "grouped_prefill"
    shape = shape_of(weights)
    return check_steps(shape, tile_of(kernel, shape, fallback, device_names(weights.codes.device)), fallback)


def check_steps(shape: str, tile: GroupedTile, fallback: GroupedTile) -> GroupedTile:
    """Return a tile of the table if it does not change rows' bits.

    Raises:
        ValueError: It does.
    """
    if tile.inner != fallback.inner or tile.columns % LEAST_COLUMNS:
        raise ValueError(
            f"tiles.json: a grouped product of {shape} has inner {tile.inner} and columns {tile.columns}; it needs inner "
            f"{fallback.inner} and columns in multiples of {LEAST_COLUMNS}, so that a row has the same bits in all steps"
        )
    return tile
