"""Weights in panels, as the CPU's kernels read them, and the tile for each format.

A weight [N, K] is packed once, at load, into panels `[ceil(N / 16), K, 16]`. The tiles that read them are in
`attention.cpu.tiles` and `attention.cpu.quantised_tiles`. bfloat16 weights stay bfloat16 in memory and are widened in
registers: half the bytes per decoded token and, since activations are float32, the same bits as float32
weights. A checkpoint's quantised weights stay codes with scales; a tile gives the bits of the dequantised weight.
Plain weights that are quantised on load to int8 or int4 are multiplied as integers: their tiles read quantised rows.

Legend: K input features, N output features, B blocks of K.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attention.cpu.codes import ROW_SCALES_BYTES, ZEROS_BYTES, Coding
from attention.cpu.integer_tiles import BLOCK, QUANTISED_BLOCK_BYTES, TIMES_INT4, TIMES_INT8
from attention.cpu.panel_pairs import TIMES_TWO_BF16, TIMES_TWO_F32
from attention.cpu.quantised_tiles import times_quantised
from attention.cpu.tiles import LANES, TIMES_BF16, TIMES_F32
from moe.load.quantised_weight import CODE_TYPES, Kind, QuantisedWeight, int4_codes

_TIMES = {torch.float32: TIMES_F32, torch.bfloat16: TIMES_BF16}
_TIMES_TWO = {torch.float32: TIMES_TWO_F32, torch.bfloat16: TIMES_TWO_BF16}
_TIMES_INTEGERS = {"int8": TIMES_INT8, "int4": TIMES_INT4}
_SCALE_NAMES = {
    torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.uint8: "e8m0",
    torch.float8_e4m3fn: "e4m3",
}  # fmt: skip
_SCALE_TYPES = {name: dtype for dtype, name in _SCALE_NAMES.items()}


class PackedCoding(NamedTuple):
    """Layout of a quantised weight in panels, without its size."""

    kind: Kind
    coding: Coding
    block: int  # inputs that share a scale
    quantises_rows: bool

    @classmethod
    def of(cls, weight: QuantisedWeight) -> "PackedCoding":
        """Return the layout of a weight."""
        # Float32 scales of blocks cover many rows, so the 16 rows of a panel share them.
        shared = (
            weight.scales.dtype == torch.float32 and weight.kind == "e4m3" and weight.block != weight.in_dim
        )
        coding = Coding(
            weight.kind, _SCALE_NAMES[weight.scales.dtype], shared, weight.row_scales is not None,
            weight.zeros is not None,
        )  # fmt: skip
        return cls(weight.kind, coding, weight.block, weight.quantises_rows)


class Format(NamedTuple):
    """Sizes and kernels to read a weight's panels."""

    times_panel: int  # address of its tile
    times_two: int  # address of the tile for two panels; 0 if there is none
    panel_bytes: int  # from one panel to the next
    scale_bytes: int  # from one panel's scales to those of the next
    k: int  # input features
    block: int  # inputs that share a scale; 0 if there are no scales
    panels: int
    takes_integers: bool  # its tile reads quantised rows (`products.QUANTISE`)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of inputs in the form that its tile reads."""
        return self.k // BLOCK * QUANTISED_BLOCK_BYTES if self.takes_integers else self.k * 4


def format_of(panels: Tensor, scales: Tensor | None = None, quantised: PackedCoding | None = None) -> Format:
    """Describe a weight: panels from `pack` or `pack_codes`, scales from `pack_scales`."""
    if quantised is None:
        times, two = _TIMES[panels.dtype].address, _TIMES_TWO[panels.dtype].address
    elif quantised.quantises_rows:
        times, two = _TIMES_INTEGERS[quantised.kind].address, 0
    else:
        times, two = (each.address for each in times_quantised(quantised.coding))
    return Format(
        times_panel=times,
        times_two=two,
        panel_bytes=panels[0].numel() * panels.element_size(),
        scale_bytes=0 if scales is None else scales[0].numel() * scales.element_size(),
        k=panels.shape[1] * (1 if quantised is None else quantised.coding.inputs_per_byte),
        block=0 if quantised is None else quantised.block,
        panels=panels.shape[0],
        takes_integers=quantised is not None and quantised.quantises_rows,
    )


def pack(weight_NK: Tensor) -> Tensor:
    """Lay out a weight in panels.

    Args:
        weight_NK: [..., N, K], float32 or bfloat16, any strides.

    Returns:
        [..., ceil(N / 16), K, 16] of the same dtype, contiguous; columns after N are zero.
    """
    *lead, n, k = weight_NK.shape
    panels = -(-n // LANES)
    if n % LANES:
        padded = weight_NK.new_zeros(*lead, panels * LANES, k)
        padded[..., :n, :] = weight_NK
        weight_NK = padded
    return weight_NK.reshape(*lead, panels, LANES, k).transpose(-1, -2).contiguous()


def unpack(packed: Tensor, n: int) -> Tensor:
    """Undo `pack`: [..., ceil(n / 16), K, 16] to [..., n, K], a copy."""
    *lead, panels, k, lanes = packed.shape
    return packed.transpose(-1, -2).reshape(*lead, panels * lanes, k)[..., :n, :].contiguous()


def pack_codes(weight: QuantisedWeight) -> Tensor:
    """Lay out codes in panels: [..., panels, K, 16] of their dtype, or two to a byte [..., panels, K / 2, 16] uint8.

    Weights that quantise activations use the order of `attention.cpu.integer_tiles`.
    """
    if not weight.quantises_rows:
        return pack(weight.codes.view(torch.uint8)).view(weight.codes.dtype)
    if weight.codes.dtype == torch.int8:
        return _four_by_four(pack(weight.codes.view(torch.uint8) ^ 0x80)).view(torch.int8)
    low, high = (_four_by_four(pack(half)) for half in _halves_of_eight(int4_codes(weight.codes)))
    return low | high << 4


def _four_by_four(panels: Tensor) -> Tensor:
    """Put every four inputs of a column next to each other: [..., K, 16], stored as [K / 4, 16, 4]."""
    *lead, k, lanes = panels.shape
    return panels.reshape(*lead, k // 4, 4, lanes).transpose(-1, -2).reshape(panels.shape)


def _four_apart(panels: Tensor) -> Tensor:
    """Undo `_four_by_four`."""
    *lead, k, lanes = panels.shape
    return panels.reshape(*lead, k // 4, lanes, 4).transpose(-1, -2).reshape(panels.shape)


def _halves_of_eight(codes: Tensor) -> Tensor:
    """Split [..., K] into [2, ..., K / 2]: the first four of every eight, and the others."""
    return codes.reshape(*codes.shape[:-1], -1, 2, 4).movedim(-2, 0).flatten(-2)


def pack_scales(weight: QuantisedWeight) -> Tensor:
    """Lay out scales, second scales and zeros as in `attention.cpu.codes`: [..., panels, bytes] uint8.

    Raises:
        QuantisedWeightError: FP8 scales of blocks differ within 16 rows.
    """
    if PackedCoding.of(weight).coding.is_shared:
        return weight.block_scales(LANES).view(torch.uint8)
    parts = [_bytes(pack(weight.scales))]
    if weight.zeros is not None:
        zeros = pack(weight.zeros)
        parts.append(zeros[..., :ZEROS_BYTES] | zeros[..., ZEROS_BYTES:] << 4)
    blocks = torch.cat(parts, dim=-1).flatten(-2)
    if weight.row_scales is None:
        return blocks
    return torch.cat((_bytes(pack(weight.row_scales[..., None])).flatten(-2), blocks), dim=-1)


def unpack_quantised(codes: Tensor, scales: Tensor, n: int, quantised: PackedCoding) -> QuantisedWeight:
    """Undo `pack_codes` and `pack_scales`, for N = n; a copy."""
    kind, coding, block, quantises_rows = quantised
    row_scales = zeros = None
    if quantises_rows:
        plain = _unpack_integers(codes, n)
    else:
        plain = unpack(codes.view(torch.uint8), n).view(CODE_TYPES[kind])
    if coding.has_row_scales:
        first, scales = scales[..., :ROW_SCALES_BYTES], scales[..., ROW_SCALES_BYTES:]
        row_scales = first.contiguous().view(torch.float32).flatten(-2)[..., :n].contiguous()
    blocks = scales.reshape(*scales.shape[:-1], -1, coding.block_bytes)
    if coding.has_zeros:
        blocks, packed = blocks[..., :-ZEROS_BYTES], blocks[..., -ZEROS_BYTES:]
        zeros = unpack(torch.cat((packed & 15, packed >> 4), dim=-1), n)
    wide = blocks.contiguous().view(_SCALE_TYPES[coding.scale])
    if coding.is_shared:
        wide = wide.expand(*wide.shape[:-1], LANES)
    return QuantisedWeight(
        codes=plain, kind=kind, scales=unpack(wide, n), block=block, row_scales=row_scales, zeros=zeros,
        quantises_rows=quantises_rows,
    )  # fmt: skip


def _bytes(panels: Tensor) -> Tensor:
    return panels.view(torch.uint8)


def _unpack_integers(codes: Tensor, n: int) -> Tensor:
    """Undo what `pack_codes` does with int8 and int4."""
    if codes.dtype == torch.int8:
        return (unpack(_four_apart(codes.view(torch.uint8)), n) ^ 0x80).view(torch.int8)
    low, high = (unpack(_four_apart(half), n) for half in (codes & 15, codes >> 4))
    plain = torch.stack([half.reshape(*half.shape[:-1], -1, 4) for half in (low, high)], dim=-2).flatten(-3)
    return plain[..., ::2] | plain[..., 1::2] << 4
