"""A weight as quantised checkpoints hold it: codes of eight or four bits, and a scale per block of a row.

From files two formats: FP8 (e4m3 with float32 scales; DeepSeek-V3's files and transformers' fine-grained FP8, whose blocks are of
128 x 128) and MXFP4 (pairs of e2m1 with e8m0 scales per 32; gpt-oss' files; OCP Microscaling Formats 1.0). Scales are
kept per row here, though FP8's are the same for many rows, because then they can be cut, merged and put together as
the weights are. On load two more may be made of plain weights: int8 and int4, a bfloat16 scale per 32 inputs of an output
(`--quantization`; the second as llama.cpp's q4_0 chooses codes). What it means is plain torch, the oracle of the kernels: value times scale, rounded once to float32.

Legend: N output features (rows), K input features, B blocks of K, R blocks of N.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.load.checkpoint import CheckpointError

MXFP4_BLOCK = 32
INTEGER_BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_LIMIT = 256.0  # 2^8, above which the CPU kernels' scale overflows; weights of 448 * 256 have no use
_E8M0_LIMIT = 127 + 8


class QuantisedWeightError(CheckpointError):
    """A quantised weight with values that cannot be computed with; the message says which."""


@dataclass(frozen=True, kw_only=True)
class QuantisedWeight:
    """One weight, or several of one shape."""

    codes: Tensor  # [..., N, K] float8_e4m3fn or int8, or [..., N, K / 2] uint8: the even input in the lower half
    scales: Tensor  # [..., N, B] float32 of FP8, uint8 (e8m0) of MXFP4, bfloat16 of int8 and int4
    block: int  # inputs under one scale; the last block of a row may be short

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
        return QuantisedWeight(codes=self.codes[index], scales=self.scales[index], block=self.block)

    def check(self, name: str) -> None:
        """Refuse what no kernel computes.

        Raises:
            QuantisedWeightError: codes or scales that are not a number, scales of 2^8 and more, or of another shape.
        """
        wanted = (*self.codes.shape[:-1], -(-self.in_dim // self.block))
        if tuple(self.scales.shape) != wanted:
            raise QuantisedWeightError(
                f"{name} has scales {list(self.scales.shape)}; it takes {list(wanted)}"
            )
        codes = self.codes.view(torch.uint8)
        if self.codes.dtype != torch.uint8 and bool(((codes & 0x7F) == 0x7F).any()):
            raise QuantisedWeightError(f"{name} holds FP8 weights that are not a number")
        if self.scales.dtype == torch.uint8:
            beyond = self.scales >= _E8M0_LIMIT
        else:
            beyond = ~(self.scales.abs() < SCALE_LIMIT)  # NaN is not below either
        if bool(beyond.any()):
            seen = self.scales[beyond][0].item()
            raise QuantisedWeightError(
                f"{name} has a scale of {seen}{' (e8m0)' if self.scales.dtype == torch.uint8 else ''}; scales are "
                f"numbers below {SCALE_LIMIT:.0f}"
            )

    def dequantised(self) -> Tensor:
        """The weight that it stands for: [..., N, K] float32, new."""
        if self.codes.dtype != torch.uint8:
            values = self.codes.float()
        else:
            values = (e2m1_values if self.scales.dtype == torch.uint8 else int4_values)(self.codes)
        scales = e8m0_values(self.scales) if self.scales.dtype == torch.uint8 else self.scales.float()
        return values * scales.repeat_interleave(self.block, dim=-1)[..., : self.in_dim]

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


def inputs_per_code(dtype: torch.dtype) -> int:
    """How many inputs an element of a weight kept as `dtype` stands for."""
    return 2 if dtype == torch.uint8 else 1


def int8_weight(weight: Tensor) -> QuantisedWeight:
    """Quantise [..., N, K] to eight bits, K a multiple of 32."""
    blocks = weight.float().reshape(*weight.shape[:-1], -1, INTEGER_BLOCK)
    scales = _bfloat16_above(blocks.abs().amax(-1) / 127)
    codes = (blocks / _divisor(scales)).round().clamp(-127, 127).to(torch.int8)
    return QuantisedWeight(codes=codes.flatten(-2), scales=scales, block=INTEGER_BLOCK)


def int4_weight(weight: Tensor) -> QuantisedWeight:
    """Quantise [..., N, K] to four bits, K a multiple of 32: the value furthest from 0 becomes -8 scales."""
    blocks = weight.float().reshape(*weight.shape[:-1], -1, INTEGER_BLOCK)
    furthest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = (furthest / -8).bfloat16()
    codes = ((blocks / _divisor(scales)).round() + 8).clamp(0, 15).to(torch.uint8).flatten(-2)
    return QuantisedWeight(codes=codes[..., ::2] | codes[..., 1::2] << 4, scales=scales, block=INTEGER_BLOCK)


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


def int4_values(codes: Tensor) -> Tensor:
    """[..., n] bytes to [..., 2 * n] float32."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).float() - 8


def e2m1_values(codes: Tensor) -> Tensor:
    """[..., n] bytes to [..., 2 * n] float32."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).long()
    return table[pairs].flatten(-2)


def e8m0_values(scales: Tensor) -> Tensor:
    """2^(byte - 127) as float32."""
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
