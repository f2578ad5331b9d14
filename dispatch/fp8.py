"""DeepSeek's FP8 recipe for rows in transit: e4m3 values with one scale per token and block of 128 channels.

A block's scale is its largest magnitude (at least 1e-4) over 448, the largest e4m3 value; stored values are
x * (448 / largest), rounded to nearest even. Scales are float32. With `ue8m0` only their exponents are kept (so they
must be powers of two, see `round_scale`), four to an int32, the lowest block in the lowest byte.
This is the reference for the compiled and Triton casts, and is used itself if speed is not important. Any device.

A block that holds NaN or an infinity becomes NaN as a whole: a value that is not finite is never hidden, but its
neighbours are lost too. A last block of fewer than 128 channels has a separate scale (DeepEP refuses such rows).

Source: DeepSeek-V3 technical report, section 3.3; the interface of DeepEP's casts. Rejected: scales by multiplication
with a rounded 1/448. If the division is exact, this gives a power of two that is one exponent too high.

Legend: T tokens, H hidden, B blocks of a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128  # channels per scale
FP8_MAX = 448.0  # of e4m3 without infinities
AMAX_FLOOR = 1e-4  # for blocks of zeros, which need a scale too
EXPONENTS_PER_WORD = 4
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_NOT_FINITE = 255  # the exponent of infinities and NaN; the NaN of ue8m0
_INVERSE = 254  # 254 - e is the biased exponent of the inverse of a power of two


class Quantised(NamedTuple):
    """Rows in FP8, and their scales: float32 [T, B], or int32 [T, ceil(B / 4)] in ue8m0."""

    x_TH: Tensor
    scales: Tensor


def num_blocks(hidden: int) -> int:
    """Return the number of scales per row."""
    return -(-hidden // BLOCK)


def num_words(hidden: int) -> int:
    """Return the number of int32 that hold a row's exponents in ue8m0."""
    return -(-num_blocks(hidden) // EXPONENTS_PER_WORD)


def quantise_fp8(x_TH: Tensor, *, round_scale: bool = False, ue8m0: bool = False) -> Quantised:
    """Cast rows to FP8.

    Args:
        x_TH: Any floating dtype and strides; read as float32.
        round_scale: Whether to round scales up to powers of two.
        ue8m0: Whether to pack the scales as exponents; needs `round_scale`.

    Returns:
        float8_e4m3fn [T, H] and its scales, both new and contiguous.

    Raises:
        ValueError: x_TH is not two-dimensional or not floating, or `ue8m0` is set without `round_scale`.
    """
    if x_TH.dim() != 2 or not x_TH.is_floating_point():
        raise ValueError(
            f"x_TH is {x_TH.dtype} {list(x_TH.shape)}; it must be a 2-dimensional floating tensor"
        )
    if ue8m0 and not round_scale:
        raise ValueError(
            "ue8m0 is True but round_scale is False; packed exponents need scales that are powers of two"
        )
    hidden = x_TH.shape[1]
    wide_TBC = _blocks(x_TH.float())
    amax_TB = wide_TBC.abs().amax(dim=2).clamp(min=AMAX_FLOOR)
    # A tensor, because torch would multiply by the inverse of a number, which rounds twice.
    limit_TB = torch.full_like(amax_TB, FP8_MAX)
    scales_TB, factors_TB = amax_TB / limit_TB, limit_TB / amax_TB
    if round_scale:
        scales_TB, factors_TB = _round_up_to_powers_of_two(scales_TB)
    x_fp8 = (wide_TBC * factors_TB.unsqueeze(2)).to(torch.float8_e4m3fn)
    x_fp8 = x_fp8.flatten(1)[:, :hidden].contiguous()
    return Quantised(x_fp8, pack_ue8m0(scales_TB) if ue8m0 else scales_TB)


def dequantise_fp8(x_fp8: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply rows by their scales in float32 and cast to `dtype`.

    Args:
        x_fp8: float8_e4m3fn [..., H].
        scales: float32 [..., B] or ue8m0 int32 [..., ceil(B / 4)], any strides.

    Returns:
        A new contiguous [..., H].

    Raises:
        ValueError: x_fp8 has another dtype, or the scales do not fit the rows.
    """
    hidden = x_fp8.shape[-1]
    if x_fp8.dtype != torch.float8_e4m3fn:
        raise ValueError(f"x_fp8 is {x_fp8.dtype}; it must be torch.float8_e4m3fn")
    wanted = {torch.float32: num_blocks(hidden), torch.int32: num_words(hidden)}.get(scales.dtype)
    if wanted is None or scales.shape != (*x_fp8.shape[:-1], wanted):
        raise ValueError(
            f"scales is {scales.dtype} {list(scales.shape)}; for {hidden} channels it must be float32 "
            f"{[*x_fp8.shape[:-1], num_blocks(hidden)]} or int32 {[*x_fp8.shape[:-1], num_words(hidden)]}"
        )
    factors = unpack_ue8m0(scales, num_blocks(hidden)) if scales.dtype == torch.int32 else scales
    wide = _blocks(x_fp8.float()) * factors.unsqueeze(-1)
    return wide.flatten(-2)[..., :hidden].to(dtype).contiguous()


def pack_ue8m0(scales: Tensor) -> Tensor:
    """Return the exponents of float32 powers of two [..., B] as int32 [..., ceil(B / 4)]; unused bytes are 0."""
    bits = scales.contiguous().view(torch.int32)
    exponents = (bits >> _MANTISSA_BITS).to(torch.uint8)
    exponents = pad(exponents, (0, -scales.shape[-1] % EXPONENTS_PER_WORD))
    return exponents.contiguous().view(torch.int32)


def unpack_ue8m0(packed: Tensor, blocks: int) -> Tensor:
    """Return the float32 scales [..., blocks] of packed exponents; 255 is NaN."""
    # A dimension of size 1 may have any stride; `view` needs contiguous memory.
    dense = packed.clone(memory_format=torch.contiguous_format)
    exponents = dense.view(torch.uint8)[..., :blocks].to(torch.int32)
    scales = (exponents << _MANTISSA_BITS).view(torch.float32)
    return torch.where(exponents == _NOT_FINITE, torch.nan, scales)


def column_major(scales: Tensor) -> Tensor:
    """Return the same values with the last two dimensions stored column by column, the layout of DeepEP's scales."""
    return scales.transpose(-1, -2).contiguous().transpose(-1, -2)


def _blocks(wide: Tensor) -> Tensor:
    """View [..., H] as [..., B, 128], padded with zeros, which do not change the maximum."""
    short = -wide.shape[-1] % BLOCK
    padded = pad(wide, (0, short)) if short else wide.contiguous()
    return padded.view(*wide.shape[:-1], num_blocks(wide.shape[-1]), BLOCK)


def _round_up_to_powers_of_two(scales_TB: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded scales and their inverses. Both are NaN if a scale is not finite."""
    bits = scales_TB.view(torch.int32)
    exponents = (bits >> _MANTISSA_BITS) + ((bits & _MANTISSA) != 0).int()
    scales = (exponents << _MANTISSA_BITS).view(torch.float32)
    factors = ((_INVERSE - exponents) << _MANTISSA_BITS).view(torch.float32)
    is_lost = exponents >= _NOT_FINITE
    return scales.masked_fill(is_lost, torch.nan), factors.masked_fill(is_lost, torch.nan)
