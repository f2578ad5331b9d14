"""Products of many rows with quantised weights: a slot's weight is decoded once, then multiplied like a plain one.

The grouped product decodes a weight again for each tile of rows. With hundreds of rows per expert, decoding limits it: on an
H200, a prototype of the present kernel did 410 TFLOP/s with MXFP4. Here one launch decodes the weights of slots with rows
into a workspace, and the faster product of plain weights reads them.

A row keeps its bits. The decoded values are those that the grouped product multiplies, and each instruction of the tensor cores
adds the same inputs in the same order. Codes of 4 bits are decoded to the order of the rows. Weights of 8-bit words are
stored, and their rows copied, in the order in which words are decoded (`moe.gpu.weights.formats_kernel.in_order_of_words`). Only formats
whose scales multiply the values themselves are decoded (scales for 16, 32 or 64 inputs). Other scales multiply sums inside the
grouped product.

The workspace is bounded, so slots may take several passes. Steps that a CUDA graph may hold do not use it.

Bounds. Decoding reads the codes and writes two bytes per value, as fast as memory allows. So widening pays from `LEAST_ROWS`
rows per slot: below, the time that the faster product saves is shorter than this copy. With 256 rows, gpt-oss-20b's first
product took 664 us in that prototype. The copy alone needs 320 us, and the plain product as much again at 850 TFLOP/s.
Rejected: decoding each weight once at start, which takes four times the memory of 4 bits.

Legend: T rows, P pairs (rows sorted by slot), N out features, K in features, S slots, W weights in memory.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from moe.gpu.limits import TILE_INPUTS
from moe.gpu.products.grouped import grouped_linear, kernel_views
from moe.gpu.products.grouped_kernel import GATES
from moe.gpu.products.tiles import GroupedTile
from moe.gpu.products.widened_kernel import order_rows, widen_tiles
from moe.gpu.weights.formats import FOUR_BIT_WORD, PlacedWeights, codes_per_word

LEAST_ROWS = 512  # per slot, with even loads
MOST_BYTES = 512 << 20  # of a workspace; holds the nine slots of DeepSeek-V3 on 32 ranks at once
# A program's tile, with TILE_INPUTS inputs. More columns take more registers.
_COLUMNS, _ROWS, _WARPS = 32, 64, 4


class Workspace:
    """Memory for decoded weights: one for all layers of a device, on one stream. It is allocated when it is first needed."""

    def __init__(
        self, device: torch.device, most_bytes: int = MOST_BYTES, least_rows: int = LEAST_ROWS
    ) -> None:
        """Allocate nothing yet.

        Args:
            most_bytes: Size that it does not exceed.
            least_rows: Rows per slot from which it is used.
        """
        self.most_bytes, self.least_rows, self._device = most_bytes, least_rows, device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._place_S = torch.empty(0, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated for weights."""
        return len(self._bytes)

    def pays(self, weights: PlacedWeights, dtype: torch.dtype, expected_pairs: int, num_slots: int) -> bool:
        """Return whether `multiply_widened` is the faster product for rows of a type and this many pairs with even loads."""
        return expected_pairs >= self.least_rows * num_slots and self.takes(weights, dtype)

    def takes(self, weights: PlacedWeights, dtype: torch.dtype) -> bool:
        """Return whether products with decoded weights have equal results, and at least one slot's weight fits."""
        form, K = weights.format, weights.in_dim
        word = codes_per_word(form, K)
        is_whole = word == 1 or K % (4 * word) == 0  # groups of words
        is_scaled = form.kind != "plain" and form.block < min(TILE_INPUTS, K)
        return is_whole and is_scaled and not form.fp8_rows and slot_bytes(weights, dtype) <= self.most_bytes

    def hold(self, slots: int, height: int, in_dim: int, dtype: torch.dtype) -> Tensor:
        """Return memory for weights [slots, height, in_dim], which the next call returns again."""
        size = slots * height * in_dim * dtype.itemsize
        assert size <= self.most_bytes, (
            f"{size} bytes of decoded weights; the workspace has {self.most_bytes}"
        )
        if size > self.num_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8, device=self._device)  # free the old one first
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._bytes[:size].view(dtype).view(slots, height, in_dim)

    def places(self, slots: int) -> Tensor:
        """Return int32 [slots]: each slot's weight has the slot's own place."""
        if slots > len(self._place_S):
            self._place_S = torch.arange(slots, dtype=torch.int32, device=self._device)
        return self._place_S[:slots]

    def passes(self, slots: int, bytes_of_one: int) -> Iterator[slice]:
        """Split slots into as few passes as possible, of nearly equal size.

        All begin at an even slot if possible: kernels are compiled again for offsets of another alignment.
        """
        most = self.most_bytes // bytes_of_one
        size = -(-slots // -(-slots // most))
        size += size % 2 if size < most else 0
        return (slice(begin, min(begin + size, slots)) for begin in range(0, slots, size))


def multiply_unquantised(
    x_TK: Tensor,
    weights: PlacedWeights,
    slot_offsets: Tensor,
    places_S: Tensor,
    *,
    num_pairs: int,
    expected_pairs: int | None = None,
    rows_P: Tensor | None = None,
    gate: str = "none",
    biases_WN: Tensor | None = None,
    tile: GroupedTile | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Multiply each row with its slot's weight. See `grouped.grouped_linear`.

    Args:
        tile: Tile for weights that are decoded inside the product. With any, all are.
        workspace: Memory to decode weights first, if that pays. None: they are decoded inside the product.

    Raises:
        ValueError: The kernels do not support a type or shape.
    """
    pairs, S = num_pairs if expected_pairs is None else min(expected_pairs, num_pairs), places_S.numel()
    if workspace is None or tile is not None or not workspace.pays(weights, x_TK.dtype, pairs, S):
        return grouped_linear(
            x_TK, weights, slot_offsets, places_S, num_pairs=num_pairs, expected_pairs=pairs, rows_P=rows_P, gate=gate,
            biases_WN=biases_WN, tile=tile,
        )  # fmt: skip
    return multiply_widened(
        x_TK, weights, slot_offsets, places_S, workspace=workspace, num_pairs=num_pairs, expected_pairs=pairs, rows_P=rows_P,
        gate=gate, biases_WN=biases_WN,
    )  # fmt: skip


def multiply_widened(
    x_TK: Tensor,
    weights: PlacedWeights,
    slot_offsets: Tensor,
    places_S: Tensor,
    *,
    workspace: Workspace,
    num_pairs: int,
    expected_pairs: int | None = None,
    rows_P: Tensor | None = None,
    gate: str = "none",
    biases_WN: Tensor | None = None,
    tile: GroupedTile | None = None,
) -> Tensor:
    """Multiply each row with its slot's weight, as `grouped.grouped_linear` does, by decoded weights.

    Args:
        weights: Some that the workspace takes.
        workspace: Memory that no other stream uses.
        tile: Of plain weights.

    Raises:
        ValueError: The kernels do not support a type or shape.
    """
    weights.check()
    S, height = places_S.numel(), weights.codes.shape[1]
    expected = num_pairs if expected_pairs is None else min(expected_pairs, num_pairs)
    out = x_TK.new_empty(num_pairs, height // 2 if GATES[gate] else height)
    x_TK = _in_order(x_TK, weights, None if rows_P is not None else slot_offsets, S)
    for slots in workspace.passes(S, slot_bytes(weights, x_TK.dtype)):
        places, offsets = places_S[slots], slot_offsets[slots.start : slots.stop + 1]
        size = slots.stop - slots.start
        held_SNK = workspace.hold(size, height, weights.in_dim, x_TK.dtype)
        widen(weights, offsets, places, held_SNK)
        row_scales, biases = (
            None if part is None else part.index_select(0, places) for part in (weights.row_scales, biases_WN)
        )
        grouped_linear(
            x_TK, PlacedWeights(held_SNK, row_scales=row_scales), offsets, workspace.places(size), num_pairs=num_pairs,
            expected_pairs=expected * size // S, rows_P=rows_P, gate=gate, biases_WN=biases, tile=tile, out=out,
        )  # fmt: skip
    return out


def widen(weights: PlacedWeights, slot_offsets: Tensor, places_S: Tensor, out_SNK: Tensor) -> None:
    """Decode the weights of slots with rows into `out_SNK`, with their inputs in the order of `load_tile`."""
    S, height, K = out_SNK.shape
    form, word = weights.format, codes_per_word(weights.format, K)
    codes, scales = kernel_views(weights.codes, weights.scales, form.kind, form.scale, word)
    programs = triton.cdiv(K, TILE_INPUTS) * triton.cdiv(height, _COLUMNS)
    widen_tiles[(programs, S)](
        codes, scales, weights.zeros, places_S, slot_offsets, out_SNK, HEIGHT=height, K=K, COLUMNS=_COLUMNS,
        INNER=TILE_INPUTS, KIND=form.kind, SCALE=form.scale, BLOCK=form.block, SCALE_ROWS=form.rows, WORD=word,
        num_warps=_WARPS,
    )  # fmt: skip


def _in_order(x_TK: Tensor, weights: PlacedWeights, offsets: Tensor | None, num_slots: int) -> Tensor:
    """Return rows with their inputs in the order of decoded weights: a copy for words of 8-bit codes.

    Args:
        offsets: [num_slots + 1], the last of which is the number of rows. None means all rows.
    """
    T, K = x_TK.shape
    word = codes_per_word(weights.format, K)
    if word in (1, FOUR_BIT_WORD) or not T:
        return x_TK
    out = torch.empty_like(x_TK)
    order_rows[(triton.cdiv(T, _ROWS) * triton.cdiv(K, TILE_INPUTS),)](
        x_TK, offsets, out, T, S=num_slots, K=K, ROWS=_ROWS, INNER=TILE_INPUTS, WORD=word, num_warps=_WARPS
    )  # fmt: skip
    return out


def slot_bytes(weights: PlacedWeights, dtype: torch.dtype) -> int:
    """Return the bytes of one slot's decoded weight."""
    return int(weights.codes.shape[1]) * weights.in_dim * dtype.itemsize
