"""A weight as quantised checkpoints hold it: codes of eight or four bits, and a scale per block of a row.

What codes and scales are made of is free, because formats differ in little else (DESIGN D15):

    FP8 of blocks, channels, tensors      e4m3  float32, bfloat16 or float16
    MXFP8, MXFP4                          e4m3, e2m1  e8m0 per 32 (OCP Microscaling Formats 1.0)
    NVFP4                                 e2m1  e4m3 per 16, and a second scale over all blocks of a row
    int8 of channels                      int8  float32, bfloat16 or float16
    int4 of groups, AWQ, GPTQ             int4  float32, bfloat16 or float16, perhaps with zeros that are not 8

Scales are kept per row, though some are the same for many rows, because then they can be cut, merged and put together as
the weights are. On load two more may be made of plain weights: int8 and int4, a bfloat16 scale per 32 inputs of an output
(`--quantization`; the second as llama.cpp's q4_0 chooses codes), whose products quantise the rows too. What a weight means
is plain torch, the oracle of the kernels: value times scale, rounded once to float32.

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
SCALE_LIMIT = 256.0  # 2^8, above which the CPU kernels' scale overflows; weights of 448 * 256 have no use
SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)
CODE_TYPES = {
    "e4m3": torch.float8_e4m3fn, "int8": torch.int8, "e2m1": torch.uint8, "int4": torch.uint8,
}  # fmt: skip
DAMAGED = "the file is damaged, fetch it again"
MIDDLE = 8  # what an int4 code of 0 is above, where no zeros are given


class QuantisedWeightError(CheckpointError):
    """A quantised weight with values that cannot be computed with; the message says which."""


@dataclass(frozen=True, kw_only=True)
class QuantisedWeight:
    """One weight, or several of one shape."""

    codes: Tensor  # [..., N, K] float8_e4m3fn or int8, or [..., N, K / 2] uint8: the even input in the lower half
    kind: Kind  # which number a code is; int4: 0 to 15, of which 8 or the block's zero is taken away
    scales: Tensor  # [..., N, B] float32, bfloat16, float16, uint8 (e8m0) or float8_e4m3fn
    block: int  # inputs under one scale; the last block of a row may be short; K where a row has one scale
    row_scales: Tensor | None = None  # [..., N] float32: of all blocks of a row (NVFP4's global scale)
    zeros: Tensor | None = None  # [..., N, B] uint8, of int4
    quantises_rows: bool = False  # made on load: kernels quantise what they multiply it with

    def __post_init__(self) -> None:
        assert self.codes.dtype == CODE_TYPES[self.kind], f"{self.kind} codes are {self.codes.dtype}"
        assert self.scales.dtype in SCALE_TYPES, f"scales are {self.scales.dtype}"
        assert self.zeros is None or self.kind == "int4", f"{self.kind} codes have zeros"

    @property
    def in_dim(self) -> int:
        """Input features K."""
        return int(self.codes.shape[-1]) * inputs_per_code(self.codes.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that it stands for: [..., N, K]."""
        return (*self.codes.shape[:-1], self.in_dim)

    def __getitem__(self, index: int) -> "QuantisedWeight":
        """One of several weights; views."""
        row_scales = None if self.row_scales is None else self.row_scales[index]
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(
            self, codes=self.codes[index], scales=self.scales[index], row_scales=row_scales, zeros=zeros
        )

    def under(self, block: int) -> "QuantisedWeight":
        """The same under scales of so many inputs."""
        return replace(self, block=block)

    def tensors(self) -> dict[str, Tensor]:
        """All that it is made of, by the names of the fields."""
        parts = {name: getattr(self, name) for name in ("codes", "scales", "row_scales", "zeros")}
        return {name: part for name, part in parts.items() if part is not None}

    def check(self, name: str) -> None:
        """Refuse what no kernel computes; what scales say `check_scales` checks, which needs no codes.

        Raises:
            QuantisedWeightError: codes that are not a number, zeros above 15, or parts of another shape.
        """
        per_block = (*self.codes.shape[:-1], -(-self.in_dim // self.block))
        for what, part, wanted in (
            ("scales", self.scales, per_block),
            ("zeros", self.zeros, per_block),
            ("second scales", self.row_scales, per_block[:-1]),
        ):
            if part is not None and tuple(part.shape) != wanted:
                raise QuantisedWeightError(f"{name} has {what} {list(part.shape)}; it takes {list(wanted)}")
        if self.kind == "e4m3" and bool(((self.codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise QuantisedWeightError(f"{name} holds FP8 weights that are not a number")
        if self.zeros is not None and bool((self.zeros > 15).any()):
            raise QuantisedWeightError(
                f"{name} has a zero of {int(self.zeros.max())}; zeros of four bits are 0 to 15"
            )

    def _factors(self) -> Tensor:
        """What values are multiplied with: [..., N, B] float32."""
        scales = e8m0_values(self.scales) if self.scales.dtype == torch.uint8 else self.scales.float()
        return scales if self.row_scales is None else scales * self.row_scales[..., None]

    def dequantised(self) -> Tensor:
        """The weight that it stands for: [..., N, K] float32, new."""
        if self.kind == "int4":
            values = int4_codes(self.codes).float()
            values -= MIDDLE if self.zeros is None else self._per_input(self.zeros.float())
        else:
            values = e2m1_values(self.codes) if self.kind == "e2m1" else self.codes.float()
        return values * self._per_input(self._factors())

    def _per_input(self, per_block: Tensor) -> Tensor:
        """[..., N, B] to [..., N, K]."""
        return per_block.repeat_interleave(self.block, dim=-1)[..., : self.in_dim]

    def block_scales(self, rows: int) -> Tensor:
        """Scales per block of `rows` rows: [..., R, B].

        Raises:
            QuantisedWeightError: rows of one block have different scales.
        """
        firsts = self.scales[..., ::rows, :]
        again = firsts.repeat_interleave(rows, dim=-2)[..., : self.scales.shape[-2], :]
        if not torch.equal(again, self.scales):
            raise QuantisedWeightError(
                f"a weight of {self.scales.shape[-2]} rows has scales that change within {rows} rows; the kernels "
                f"take one scale for each {rows}"
            )
        return firsts.contiguous()


def check_scales(scales: Tensor, name: str, row_scales: Tensor | None = None, second: str = "") -> None:
    """Refuse scales that no kernel computes with, whatever the codes are.

    Args:
        scales: [..., R, B], of R rows or blocks of rows, in a type of `SCALE_TYPES`.
        name: of their tensor.
        row_scales: [..., R] float32, what all blocks of a row are multiplied with as well.
        second: the tensor that it is of.

    Raises:
        QuantisedWeightError: a scale is not a number or, times its second one, 2^8 and more; a second one is not a
            number or 0.
    """
    if row_scales is not None and bool((bad := ~row_scales.isfinite() | (row_scales == 0)).any()):
        raise QuantisedWeightError(
            f"{second} makes a second scale of {row_scales[bad][0].item()}; it is a number, and not 0: {DAMAGED}"
        )
    largest = _largest(scales) if row_scales is None else _largest(scales) * row_scales.abs()
    beyond = ~(largest < SCALE_LIMIT)  # NaN is not below either
    if bool(beyond.any()):
        seen = f"{largest[beyond][0].item()}{f' once multiplied with {second}' if second else ''}"
        raise QuantisedWeightError(
            f"{name} has a scale of {seen}; scales are numbers below {SCALE_LIMIT:.0f}: {DAMAGED}"
        )


def _largest(scales: Tensor) -> Tensor:
    """The largest magnitude of every row: [..., R] float32; NaN where one is not a number."""
    if scales.dtype == torch.float8_e4m3fn:  # magnitudes are in the order of their bytes, NaN above all
        return (scales.view(torch.uint8) & 0x7F).amax(-1).view(torch.float8_e4m3fn).float()
    if scales.dtype == torch.uint8:
        return scales.amax(-1).view(torch.float8_e8m0fnu).float()
    return scales.abs().amax(-1).float()


def inputs_per_code(dtype: torch.dtype) -> int:
    """How many inputs an element of a weight kept as `dtype` stands for."""
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
    """Quantise [..., N, K] to four bits, K a multiple of 32: the value furthest from 0 becomes -8 scales."""
    blocks = weight.float().reshape(*weight.shape[:-1], -1, INTEGER_BLOCK)
    furthest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = (furthest / -8).bfloat16()
    codes = ((blocks / _divisor(scales)).round() + 8).clamp(0, 15).to(torch.uint8).flatten(-2)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return QuantisedWeight(codes=packed, kind="int4", scales=scales, block=INTEGER_BLOCK, quantises_rows=True)


QUANTISE = {"int8": int8_weight, "int4": int4_weight}  # by `--quantization`


def _bfloat16_above(values: Tensor) -> Tensor:
    """Round up: what is divided by it is at most as large as before."""
    rounded = values.bfloat16()
    return torch.where(
        rounded.float() < values, torch.nextafter(rounded, torch.full_like(rounded, float("inf"))), rounded
    )


def _divisor(scales: Tensor) -> Tensor:
    """Of a block's weights; 1 where all are 0."""
    wide = scales.float().unsqueeze(-1)
    return torch.where(wide == 0, torch.ones_like(wide), wide)


def int4_codes(codes: Tensor) -> Tensor:
    """[..., n] bytes to [..., 2 * n], the lower half first."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def e2m1_values(codes: Tensor) -> Tensor:
    """[..., n] bytes to [..., 2 * n] float32."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    return table[int4_codes(codes).long()]


def e8m0_values(scales: Tensor) -> Tensor:
    """2^(byte - 127) as float32."""
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
