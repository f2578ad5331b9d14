"""Weights in panels, as the CPU's kernels read them, and which tile multiplies with which.

A weight [N, K] is packed once, at load, into panels `[ceil(N / 16), K, 16]`; the tiles that read them are in
`attention.cpu_tiles` and `attention.cpu_quantised_tiles`. bfloat16 weights stay bfloat16 in memory and are widened in
registers: half the bytes per decoded token and, since activations are float32, the very bits that float32 weights would
give. A checkpoint's quantised weights stay codes beside their scales; a tile gives the bits of the dequantised weight.
int8 and int4, to which plain weights are quantised on load, multiply integers: their tiles read quantised rows.

Legend: K input features, N output features, B blocks of K.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attention.cpu_integer_tiles import BLOCK, QUANTISED_BLOCK_BYTES, TIMES_INT4, TIMES_INT8
from attention.cpu_panel_pairs import TIMES_TWO_BF16, TIMES_TWO_F32
from attention.cpu_quantised_tiles import MAX_BLOCK, TIMES_FP8, TIMES_MXFP4
from attention.cpu_tiles import LANES, TIMES_BF16, TIMES_F32
from moe.load.quantised_weight import QuantisedWeight, inputs_per_code, int4_codes

# By what panels and scales are made of.
_TIMES_PANEL = {
    (torch.float32, None): TIMES_F32,
    (torch.bfloat16, None): TIMES_BF16,
    (torch.float8_e4m3fn, torch.float32): TIMES_FP8,
    (torch.uint8, torch.uint8): TIMES_MXFP4,
    (torch.int8, torch.bfloat16): TIMES_INT8,
    (torch.uint8, torch.bfloat16): TIMES_INT4,
}


_TIMES_TWO = {torch.float32: TIMES_TWO_F32, torch.bfloat16: TIMES_TWO_BF16}


class Format(NamedTuple):
    """How kernels read a weight's panels."""

    times_panel: int  # the address of its tile
    times_two: int  # of that for two panels; 0: there is none
    panel_bytes: int  # from one panel to the next
    scale_bytes: int  # from one panel's scales to the next one's
    k: int  # input features
    block: int  # inputs under one scale; 0: there are none
    panels: int
    takes_integers: bool  # its tile reads quantised rows (`moe.cpu.products.quantise_row`)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of inputs as its tile reads it."""
        return self.k // BLOCK * QUANTISED_BLOCK_BYTES if self.takes_integers else self.k * 4


def format_of(panels: Tensor, scales: Tensor | None, block: int) -> Format:
    """Describe a weight: panels from `pack` or `pack_codes`, scales from `pack_scales`."""
    assert block <= MAX_BLOCK
    two = _TIMES_TWO.get(panels.dtype) if scales is None else None
    return Format(
        times_panel=_TIMES_PANEL[panels.dtype, None if scales is None else scales.dtype].address,
        times_two=0 if two is None else two.address,
        panel_bytes=panels[0].numel() * panels.element_size(),
        scale_bytes=0 if scales is None else scales[0].numel() * scales.element_size(),
        k=panels.shape[1] * inputs_per_code(panels.dtype),
        block=block,
        panels=panels.shape[0],
        takes_integers=scales is not None and scales.dtype == torch.bfloat16,
    )


def pack(weight_NK: Tensor) -> Tensor:
    """Lay out a weight in panels.

    Args:
        weight_NK: [..., N, K], float32 or bfloat16, any strides.

    Returns:
        [..., ceil(N / 16), K, 16] of the same dtype, contiguous; the columns past N are zero.
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

    Those of int8 and int4 are in the order of `attention.cpu_integer_tiles`.
    """
    if not weight.quantises_rows:
        return pack(weight.codes.view(torch.uint8)).view(weight.codes.dtype)
    if weight.codes.dtype == torch.int8:
        return _four_by_four(pack(weight.codes.view(torch.uint8) ^ 0x80)).view(torch.int8)
    low, high = (_four_by_four(pack(half)) for half in _halves_of_eight(int4_codes(weight.codes)))
    return low | high << 4


def _four_by_four(panels: Tensor) -> Tensor:
    """Let four inputs of a column follow each other: [..., K, 16], in which they are [K / 4, 16, 4]."""
    *lead, k, lanes = panels.shape
    return panels.reshape(*lead, k // 4, 4, lanes).transpose(-1, -2).reshape(panels.shape)


def _four_apart(panels: Tensor) -> Tensor:
    """Undo `_four_by_four`."""
    *lead, k, lanes = panels.shape
    return panels.reshape(*lead, k // 4, lanes, 4).transpose(-1, -2).reshape(panels.shape)


def _halves_of_eight(codes: Tensor) -> Tensor:
    """[..., K] to [2, ..., K / 2]: the first four of every eight, and the others."""
    return codes.reshape(*codes.shape[:-1], -1, 2, 4).movedim(-2, 0).flatten(-2)


def pack_scales(weight: QuantisedWeight) -> Tensor:
    """Lay out scales: [..., panels, B] float32 for FP8, [..., panels, B, 16] of their dtype for others.

    Raises:
        QuantisedWeightError: FP8 scales that change within 16 rows.
    """
    if weight.codes.dtype == torch.float8_e4m3fn:
        return weight.block_scales(LANES)
    return pack(weight.scales)


def unpack_quantised(codes: Tensor, scales: Tensor, n: int, block: int) -> QuantisedWeight:
    """Undo `pack_codes` and `pack_scales`, for N = n; a copy."""
    if scales.dtype == torch.bfloat16:
        plain = _unpack_integers(codes, n)
        return QuantisedWeight(
            codes=plain,
            kind="int8" if codes.dtype == torch.int8 else "int4",
            scales=unpack(scales, n),
            block=block,
            quantises_rows=True,
        )
    plain = unpack(codes.view(torch.uint8), n).view(codes.dtype)
    if codes.dtype != torch.float8_e4m3fn:
        return QuantisedWeight(codes=plain, kind="e2m1", scales=unpack(scales, n), block=block)
    rows = scales.repeat_interleave(LANES, dim=-2)[..., :n, :]
    return QuantisedWeight(codes=plain, kind="e4m3", scales=rows, block=block)


def _unpack_integers(codes: Tensor, n: int) -> Tensor:
    """Undo what `pack_codes` does with int8 and int4."""
    if codes.dtype == torch.int8:
        return (unpack(_four_apart(codes.view(torch.uint8)), n) ^ 0x80).view(torch.int8)
    low, high = (unpack(_four_apart(half), n) for half in (codes & 15, codes >> 4))
    plain = torch.stack([half.reshape(*half.shape[:-1], -1, 4) for half in (low, high)], dim=-2).flatten(-3)
    return plain[..., ::2] | plain[..., 1::2] << 4
