"""A weight as in quantised checkpoints: codes of eight or four bits, and a scale per block of a row.

Formats differ mainly in the types of codes and scales, so both are fields:
    FP8 of blocks, channels, tensors      e4m3  float32, bfloat16 or float16
    MXFP8, MXFP4                          e4m3, e2m1  e8m0 per 32 (OCP Microscaling Formats 1.0)
    NVFP4                                 e2m1  e4m3 per 16, and a second scale over all blocks of a row
    int8 of channels                      int8  float32, bfloat16 or float16
    int4 of groups, AWQ, GPTQ             int4  float32, bfloat16 or float16, perhaps with zeros other than 8

Scales are kept per row, even if many rows share them, so that they can be split, merged and joined like the weights.
Two more forms can be made from plain weights on load (`--quantization`): int8 and int4, a bfloat16 scale per 32 inputs of
an output. int4 chooses codes like llama.cpp's q4_0. Products with both quantise the activations too. `dequantised` is
plain torch and the reference for the kernels: value times scale, rounded once to float32.

Legend: N output features (rows), K input features, B blocks of K, R blocks of N.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from moe.load.checkpoint import CheckpointError

Kind = Literal["e4m3", "int8", "e2m1", "int4"]

MXFP4_BLOCK = 32
INTEGER_BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_LIMIT = 256.0  # 2^8; the CPU kernels' scale overflows above it, and weights of 448 * 256 do not occur
SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)
CODE_TYPES = {
    "e4m3": torch.float8_e4m3fn, "int8": torch.int8, "e2m1": torch.uint8, "int4": torch.uint8,
}  # fmt: skip
DAMAGED = "the file is damaged, download it again"
MIDDLE = 8  # zero point of int4 codes without zeros


class QuantisedWeightError(CheckpointError):
    """A quantised weight with invalid values; the message names them."""


@dataclass(frozen=True, kw_only=True)
class QuantisedWeight:
    """One weight, or several of one shape."""

    codes: Tensor  # [..., N, K] float8_e4m3fn or int8, or [..., N, K / 2] uint8: the even input in the lower half
    kind: Kind  # number format of a code; int4: 0 to 15, minus 8 or the block's zero
    scales: Tensor  # [..., N, B] float32, bfloat16, float16, uint8 (e8m0) or float8_e4m3fn
    block: int  # inputs that share a scale; the last block of a row may be short; K if a row has one scale
    row_scales: Tensor | None = None  # [..., N] float32, for all blocks of a row (NVFP4's global scale)
    zeros: Tensor | None = None  # [..., N, B] uint8, for int4
    quantises_rows: bool = False  # made on load: kernels quantise the activations too
    # FP8 for rows that the checkpoint quantises to e4m3, with a scale for `block` inputs; only GPUs do it.
    fp8_rows: bool = False

    def __post_init__(self) -> None:
        assert self.codes.dtype == CODE_TYPES[self.kind], f"{self.kind} codes are {self.codes.dtype}"
        assert self.scales.dtype in SCALE_TYPES, f"scales are {self.scales.dtype}"
        assert self.zeros is None or self.kind == "int4", f"{self.kind} codes have zeros"

    @property
    def in_dim(self) -> int:
        """Number of input features K."""
        return int(self.codes.shape[-1]) * inputs_per_code(self.codes.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the plain weight: [..., N, K]."""
        return (*self.codes.shape[:-1], self.in_dim)

    def __getitem__(self, index: int) -> "QuantisedWeight":
        """Return one of several weights; views."""
        row_scales = None if self.row_scales is None else self.row_scales[index]
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(
            self, codes=self.codes[index], scales=self.scales[index], row_scales=row_scales, zeros=zeros
        )

    def under(self, block: int) -> "QuantisedWeight":
        """Return the same weight with scales for `block` inputs each."""
        return replace(self, block=block)

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by the names of the fields."""
        parts = {name: getattr(self, name) for name in ("codes", "scales", "row_scales", "zeros")}
        return {name: part for name, part in parts.items() if part is not None}

    def check(self, name: str) -> None:
        """Refuse what no kernel can compute with. Values of scales are checked by `check_scales`, without codes.

        Raises:
            QuantisedWeightError: Codes are not a number, zeros are above 15, or a part has the wrong shape.
        """
        per_block = (*self.codes.shape[:-1], -(-self.in_dim // self.block))
        for what, part, wanted in (
            ("scales", self.scales, per_block),
            ("zeros", self.zeros, per_block),
            ("second scales", self.row_scales, per_block[:-1]),
        ):
            if part is not None and tuple(part.shape) != wanted:
                raise QuantisedWeightError(f"{name} has {what} {list(part.shape)}; it needs {list(wanted)}")
        if self.kind == "e4m3" and bool(((self.codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise QuantisedWeightError(f"{name} holds FP8 weights that are not a number")
        if self.zeros is not None and bool((self.zeros > 15).any()):
            raise QuantisedWeightError(
                f"{name} has a zero of {int(self.zeros.max())}; zeros of four bits must be 0 to 15"
            )

    def _factors(self) -> Tensor:
        """Return the factors of the values: [..., N, B] float32."""
        scales = e8m0_values(self.scales) if self.scales.dtype == torch.uint8 else self.scales.float()
        return scales if self.row_scales is None else scales * self.row_scales[..., None]

    def dequantised(self) -> Tensor:
        """Return the plain weight: [..., N, K] float32, new."""
        if self.kind == "int4":
            values = int4_codes(self.codes).float()
            values -= MIDDLE if self.zeros is None else self._per_input(self.zeros.float())
        else:
            values = e2m1_values(self.codes) if self.kind == "e2m1" else self.codes.float()
        return values * self._per_input(self._factors())

    def _per_input(self, per_block: Tensor) -> Tensor:
        """Expand [..., N, B] to [..., N, K]."""
        return per_block.repeat_interleave(self.block, dim=-1)[..., : self.in_dim]

    def block_scales(self, rows: int) -> Tensor:
        """Return scales per block of `rows` rows: [..., R, B].

        Raises:
            QuantisedWeightError: Rows of one block have different scales.
        """
        firsts = self.scales[..., ::rows, :]
        again = firsts.repeat_interleave(rows, dim=-2)[..., : self.scales.shape[-2], :]
        if not torch.equal(again, self.scales):
            raise QuantisedWeightError(
                f"a weight of {self.scales.shape[-2]} rows has different scales within {rows} rows; the kernels "
                f"need one scale for each {rows}"
            )
        return firsts.contiguous()


def check_scales(scales: Tensor, name: str, row_scales: Tensor | None = None, second: str = "") -> None:
    """Refuse scales that no kernel can compute with, for any codes.

    Args:
        scales: [..., R, B], for R rows or blocks of rows, in a type of `SCALE_TYPES`.
        name: Name of their tensor.
        row_scales: [..., R] float32, second scales for all blocks of a row.
        second: Name of the tensor of second scales.

    Raises:
        QuantisedWeightError: A scale, times its second scale, is not a number below 2^8; or a second scale is 0, infinite
            or not a number.
    """
    if row_scales is not None and bool((bad := ~row_scales.isfinite() | (row_scales == 0)).any()):
        raise QuantisedWeightError(
            f"{second} gives a second scale of {row_scales[bad][0].item()}; it must be a finite number, not 0: {DAMAGED}"
        )
    largest = _largest(scales) if row_scales is None else _largest(scales) * row_scales.abs()
    beyond = ~(largest < SCALE_LIMIT)  # true for NaN
    if bool(beyond.any()):
        seen = f"{largest[beyond][0].item()}{f' once multiplied with {second}' if second else ''}"
        raise QuantisedWeightError(
            f"{name} has a scale of {seen}; scales must be numbers below {SCALE_LIMIT:.0f}: {DAMAGED}"
        )


def _largest(scales: Tensor) -> Tensor:
    """Return the largest magnitude of every row: [..., R] float32, NaN if a scale is not a number."""
    if scales.dtype == torch.float8_e4m3fn:  # magnitudes sort like their bytes, NaN last
        return (scales.view(torch.uint8) & 0x7F).amax(-1).view(torch.float8_e4m3fn).float()
    if scales.dtype == torch.uint8:
        return scales.amax(-1).view(torch.float8_e8m0fnu).float()
    return scales.abs().amax(-1).float()


def inputs_per_code(dtype: torch.dtype) -> int:
    """Return the number of inputs per element of a weight stored as `dtype`."""
    return 2 if dtype == torch.uint8 else 1


def int8_weight(weight: Tensor) -> QuantisedWeight:
    """Quantise [..., N, K] to eight bits, K a multiple of 32."""
    blocks = weight.float().reshape(*weight.shape[:-1], -1, INTEGER_BLOCK)
    scales = _bfloat16_above(blocks.abs().amax(-1) / 127)
    codes = (blocks / _divisor(scales)).round().clamp(-127, 127).to(torch.int8)
    return QuantisedWeight(
        codes=codes.flatten(-2), kind="int8", scales=scales, block=INTEGER_BLOCK, quantises_rows=True
    )


def int4_weight(weight: Tensor) -> QuantisedWeight:
    """Quantise [..., N, K] to four bits, K a multiple of 32. The value furthest from 0 gets the code of -8."""
    blocks = weight.float().reshape(*weight.shape[:-1], -1, INTEGER_BLOCK)
    furthest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = (furthest / -8).bfloat16()
    codes = ((blocks / _divisor(scales)).round() + 8).clamp(0, 15).to(torch.uint8).flatten(-2)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return QuantisedWeight(codes=packed, kind="int4", scales=scales, block=INTEGER_BLOCK, quantises_rows=True)


QUANTISE = {"int8": int8_weight, "int4": int4_weight}  # by `--quantization`


def _bfloat16_above(values: Tensor) -> Tensor:
    """Round up, so that quotients by the result do not grow."""
    rounded = values.bfloat16()
    return torch.where(
        rounded.float() < values, torch.nextafter(rounded, torch.full_like(rounded, float("inf"))), rounded
    )


def _divisor(scales: Tensor) -> Tensor:
    """Return the divisor of a block's weights; 1 if all are 0."""
    wide = scales.float().unsqueeze(-1)
    return torch.where(wide == 0, torch.ones_like(wide), wide)


def int4_codes(codes: Tensor) -> Tensor:
    """Unpack [..., n] bytes to [..., 2 * n] codes, the lower half first."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def e2m1_values(codes: Tensor) -> Tensor:
    """Convert [..., n] bytes to [..., 2 * n] float32 values."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    return table[int4_codes(codes).long()]


def e8m0_values(scales: Tensor) -> Tensor:
    """Return 2^(byte - 127) as float32."""
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
