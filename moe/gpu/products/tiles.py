"""Choose the tile of a launch of the grouped product, by the rows per expert and the weights' format.

The choice depends on the rows per slot with even loads, which follow from the step's capacity and are equal on
all ranks, never on the experts that rows chose. A row has the same bits with every tile: tiles of a format add over the
inner dimension in the same order, with the same instruction of an architecture (64 lines of 16 inputs on Hopper's wgmma,
for any number of rows; with a gate, 4-bit weights have two lines of a column in one product). If a scale multiplies the product of a tile's
inputs, those tiles also have the same inner size.

On Hopper, plain weights with many rows use another kernel (`flow_kernel`) with the same bits.

The table of `attention.gpu.tiles` has a kernel's name for each range of rows ("grouped_few", "grouped_decode", "grouped_32",
"grouped_64", "grouped_prefill", and "grouped_flow" on Hopper). Its shapes have a weight's sides, so a layer's two products
have separate entries.
"""

from typing import NamedTuple, TypeVar

from attention.gpu.tiles import device_names, shape_key, tile_of
from moe.gpu.limits import TILE_INPUTS
from moe.gpu.weights.formats import FOUR_BIT_WORD, DeviceFormat, PlacedWeights, codes_per_word

MANY_ROWS = 64  # per slot; from here on, reading weights costs less than multiplying
MOST_REGISTERS = 255  # that a thread can have
MOST_PROGRAMS = 32  # that a multiprocessor can run


class GroupedTile(NamedTuple):
    """Shape of a program's work."""

    rows: int
    columns: int
    inner: int
    group: int  # tiles of rows that share a tile of columns
    warps: int
    stages: int
    registers: int = MOST_REGISTERS  # of a thread at most; fewer let more programs run on a multiprocessor
    programs: int = (
        MOST_PROGRAMS  # per multiprocessor; with fewer than the most, each takes several tiles in turn
    )


class FlowTile(NamedTuple):
    """Shape of a program's work in `flow_kernel`."""

    rows: int
    columns: int  # of the output; with a gate, a program multiplies twice as many features
    inner: int
    group: int  # tiles of rows that share a tile of columns
    warps: int
    stages: int
    programs: int = 1  # per multiprocessor; each takes several tiles in turn


AnyTile = TypeVar("AnyTile", GroupedTile, FlowTile)


class Range(NamedTuple):
    """Tiles for launches with up to a number of rows per slot."""

    kernel: str  # name in the table
    below: float  # rows per slot
    plain: GroupedTile
    quantised: GroupedTile  # a cache line of each row, and FP8's scale for 128 inputs


LEAST_LINES = 64  # of one instruction on Hopper
LEAST_INNER = 32  # two instructions, and a word of codes for each of the threads that share a row
DECODE_TILE = GroupedTile(16, 64, 64, 1, 4, 5)  # few rows per expert: read weights fast
QUANTISED_DECODE_TILE = GroupedTile(16, 64, TILE_INPUTS, 1, 4, 4)
PREFILL_TILE = GroupedTile(
    128, 128, 64, 8, 8, 4
)  # many rows, and two sums: one program fills a multiprocessor
# Without a gate two programs fit, so that one multiplies while the other begins or ends its tile.
SINGLE_PREFILL_TILE = GroupedTile(128, 128, 64, 8, 8, 3, 128)
QUANTISED_PREFILL_TILE = GroupedTile(64, 128, TILE_INPUTS, 8, 8, 3)
FLOW = "grouped_flow"  # name in the table
LEAST_FLOW_ROWS = MANY_ROWS  # per slot; with fewer, both kernels wait for weights
# Each of two groups of warps multiplies 64 rows with 256 features: the widest instruction, and all registers for sums.
FLOW_TILE = FlowTile(128, 128, 64, 8, 8, 4)
SINGLE_FLOW_TILE = FlowTile(128, 256, 64, 8, 8, 4)
DESCRIBED_BYTES = 16  # rows of a tensor with a descriptor begin at multiples
# Loads are uneven, so a tile has more rows than an expert has on average. A weight is then read, and decoded, once.
RANGES = (
    # Most experts have no row, so few programs run.
    Range("grouped_few", 0.5, DECODE_TILE, QUANTISED_DECODE_TILE),
    Range("grouped_decode", 12, DECODE_TILE, QUANTISED_DECODE_TILE),
    Range("grouped_32", 28, GroupedTile(32, 64, 64, 1, 4, 4), GroupedTile(32, 64, TILE_INPUTS, 1, 4, 4)),
    Range(
        "grouped_64", MANY_ROWS, GroupedTile(64, 64, 64, 1, 4, 4), GroupedTile(64, 64, TILE_INPUTS, 1, 4, 3)
    ),
    Range("grouped_prefill", float("inf"), PREFILL_TILE, QUANTISED_PREFILL_TILE),
)


def range_of(expected_pairs: int, num_slots: int) -> Range:
    """Return the range of a launch.

    Args:
        expected_pairs: Pairs on this rank with even loads, at the size that all ranks agreed on.
        num_slots: Slots of this rank; equal on all ranks.
    """
    return next(each for each in RANGES if expected_pairs < each.below * num_slots)


def choose_tile(
    expected_pairs: int, num_slots: int, *, is_quantised: bool = False, has_gate: bool = True
) -> GroupedTile:
    """Choose the tile of a launch. See `range_of`. With a gate, a program multiplies two tiles of a weight."""
    chosen = range_of(expected_pairs, num_slots)
    if is_quantised:
        return chosen.quantised
    return SINGLE_PREFILL_TILE if chosen.plain == PREFILL_TILE and not has_gate else chosen.plain


def shape_of(weights: PlacedWeights) -> str:
    """Return the weights' key in the table: the kind of their codes (or plain weights' type), and their sides."""
    codes, kind = weights.codes, weights.format.kind
    return shape_key(codes.dtype if kind == "plain" else kind, N=codes.shape[1], K=weights.in_dim)


def tile_of_launch(
    expected_pairs: int, num_slots: int, weights: PlacedWeights, *, has_gate: bool = True
) -> GroupedTile | FlowTile:
    """Return the table's tile for a launch on the weights' device, otherwise that of `choose_tile`, or a `FlowTile`.

    Raises:
        ValueError: The table would change the order of sums between steps.
    """
    names, shape = device_names(weights.codes.device), shape_of(weights)
    if expected_pairs >= LEAST_FLOW_ROWS * num_slots and _can_flow(weights, names):
        flow = FLOW_TILE if has_gate else SINGLE_FLOW_TILE
        return check_steps(shape, tile_of(FLOW, shape, flow, names), flow, weights.format, weights.in_dim)
    is_quantised = weights.format.kind != "plain"
    fallback = choose_tile(expected_pairs, num_slots, is_quantised=is_quantised, has_gate=has_gate)
    tile = tile_of(range_of(expected_pairs, num_slots).kernel, shape, fallback, names)
    return check_steps(shape, tile, fallback, weights.format, weights.in_dim, has_gate=has_gate)


def _can_flow(weights: PlacedWeights, names: tuple[str, ...]) -> bool:
    """Return whether a device with these names has the kernel for many rows, and it takes the weights."""
    return "sm_90" in names and weights.codes.element_size() == 2 and why_no_flow(weights) is None


def why_no_flow(weights: PlacedWeights) -> str | None:
    """Return why the kernel for many rows does not support weights, to follow "the weights". None if it does."""
    codes, kind = weights.codes, weights.format.kind
    if kind != "plain":
        return f"are {kind}, not plain"
    if codes.element_size() * weights.in_dim % DESCRIBED_BYTES or codes.data_ptr() % DESCRIBED_BYTES:
        return f"have {weights.in_dim} inputs of {codes.dtype}, which do not begin at multiples of {DESCRIBED_BYTES} bytes"
    return None


def check_steps(
    shape: str, tile: AnyTile, fallback: AnyTile, form: DeviceFormat, in_dim: int, *, has_gate: bool = False
) -> AnyTile:
    """Return a tile of the table if it does not change rows' bits.

    Raises:
        ValueError: It does.
    """
    if not adds_alike(tile, fallback, form, in_dim, has_gate=has_gate):
        is_free = _is_chained(tile, form, in_dim) and _is_chained(fallback, form, in_dim)
        needed = f"in multiples of {LEAST_INNER}" if is_free else f"{fallback.inner}"
        raise ValueError(
            f"tiles.json: a grouped product of {shape} has inner {tile.inner} and columns {tile.columns}; it needs inner "
            f"{needed} and columns in multiples of {_least_columns(tile, form, in_dim, has_gate)}, so that a row has the same bits in all steps"
        )
    return tile


def _least_columns(tile: GroupedTile | FlowTile, form: DeviceFormat, in_dim: int, has_gate: bool) -> int:
    """Return the least number of columns. With a gate, one product of 4-bit weights has two lines of each column."""
    is_joint = codes_per_word(form, in_dim) == FOUR_BIT_WORD and form.block < min(tile.inner, in_dim)
    return LEAST_LINES // 2 if has_gate and is_joint else LEAST_LINES


def adds_alike(
    tile: GroupedTile | FlowTile,
    other: GroupedTile | FlowTile,
    form: DeviceFormat,
    in_dim: int,
    *,
    has_gate: bool = False,
) -> bool:
    """Return whether two tiles add a row's products in the same order. The other one is right for the format."""
    if tile.columns % _least_columns(tile, form, in_dim, has_gate):
        return False
    if _is_chained(tile, form, in_dim) and _is_chained(other, form, in_dim):
        return tile.inner % max(LEAST_INNER, form.block if form.block < tile.inner else 0) == 0
    return tile.inner == other.inner


def _is_chained(tile: GroupedTile | FlowTile, form: DeviceFormat, in_dim: int) -> bool:
    """Return whether all products of a row are added to one sum, one instruction's inputs after another.

    Otherwise a scale multiplies the sum of each tile's inputs.
    """
    return form.kind == "plain" or form.block >= in_dim or form.block < tile.inner
