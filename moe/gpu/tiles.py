"""Which tile of the grouped product a launch takes: one for decode and one for prefill per weight format.

The choice depends on the rows that a slot gets where loads are even, which follows from the step's capacity and is known
to all ranks alike, never on which experts the rows chose. Tiles of a format add over the inner dimension in the same order and steps, with the same instruction of
an architecture (64 columns on Hopper's wgmma, whatever the number of rows), so a row has the same bits in a decode step
and beside prompts. The table of `attention.gpu.tiles` may say otherwise for a device, in all but the steps.
"""

from typing import NamedTuple

from attention.gpu.tiles import device_names, shape_key, tile_of
from moe.gpu.formats import PlacedWeights
from moe.gpu.limits import TILE_INPUTS

MANY_ROWS = 64  # per slot, from which reading weights costs less than multiplying


class GroupedTile(NamedTuple):
    """The shape of a program's work."""

    rows: int
    columns: int
    inner: int
    group: int  # tiles of rows that take turns at a tile of columns
    warps: int
    stages: int


LEAST_COLUMNS = 64  # of one instruction of Hopper
DECODE_TILE = GroupedTile(16, 64, 64, 1, 4, 5)  # few rows per expert: read weights fast
PREFILL_TILE = GroupedTile(128, 128, 64, 8, 8, 3)  # many: keep the tensor cores busy
# Of quantised weights, in bytes or halves: a line of memory of each row, and FP8's scale for 128 inputs.
QUANTISED_DECODE_TILE = GroupedTile(16, 64, TILE_INPUTS, 1, 4, 4)
QUANTISED_PREFILL_TILE = GroupedTile(64, 128, TILE_INPUTS, 8, 8, 3)


def choose_tile(expected_pairs: int, num_slots: int, *, is_quantised: bool = False) -> GroupedTile:
    """Pick the tile of a launch.

    Args:
        expected_pairs: that this rank gets where loads are even, at the size that all ranks agreed on.
        num_slots: of this rank; as many on all ranks.
        is_quantised: whether weights are.
    """
    if expected_pairs < MANY_ROWS * num_slots:
        return QUANTISED_DECODE_TILE if is_quantised else DECODE_TILE
    return QUANTISED_PREFILL_TILE if is_quantised else PREFILL_TILE


def shape_of(weights: PlacedWeights) -> str:
    """Name weights as the table does: by the kind of their codes, or plain ones' type, and their sides."""
    codes, kind = weights.codes, weights.format.kind
    return shape_key(codes.dtype if kind == "plain" else kind, N=codes.shape[1], K=weights.in_dim)


def tile_of_launch(expected_pairs: int, num_slots: int, weights: PlacedWeights) -> GroupedTile:
    """Return what the table has for a launch on the weights' device, else `choose_tile`'s.

    Raises:
        ValueError: the table would change the order of sums between steps.
    """
    fallback = choose_tile(expected_pairs, num_slots, is_quantised=weights.format.kind != "plain")
    kernel = "grouped_decode" if expected_pairs < MANY_ROWS * num_slots else "grouped_prefill"
    shape = shape_of(weights)
    return check_steps(shape, tile_of(kernel, shape, fallback, device_names(weights.codes.device)), fallback)


def check_steps(shape: str, tile: GroupedTile, fallback: GroupedTile) -> GroupedTile:
    """Return a tile of the table, if rows keep their bits with it.

    Raises:
        ValueError: they would not.
    """
    if tile.inner != fallback.inner or tile.columns % LEAST_COLUMNS:
        raise ValueError(
            f"tiles.json: a grouped product of {shape} has inner {tile.inner} and columns {tile.columns}; with inner "
            f"{fallback.inner} and columns in multiples of {LEAST_COLUMNS} a row's bits are those of the other steps"
        )
    return tile
