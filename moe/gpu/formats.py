# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Storage formats of weights in a GPU's memory, and decoding a tile of them into registers.

Plain weights have the rows' own type. Quantised ones are those of `moe.load.quantised_weight`: codes, scales, perhaps
zeros and a second scale of each row, all in the checkpoint's types. A format combines one kind of each, and
one loader handles all: FP8, int8, MXFP4, MXFP8, NVFP4, int4 differ in a line. The number of inputs per scale decides
when a scale is applied:

- fewer than a tile's (16, 32, 64): to the values, in float32, which are then rounded to the rows' type. In bfloat16 this is
  exact for MXFP4, MXFP8 and NVFP4.
- whole tiles (128, ...): to the tile's product, so the values are exact in the rows' type for any scale.
- a whole row: to the finished sum, like the second scale of a row.

FP8's blocks of 128 x 128 (DeepSeek-V3) have a scale for 128 rows. Scales that rows share are stored once.

GPUs before sm_89 have no e4m3 type; there, and for scales everywhere, it is decoded from bytes.

Rejected: `tl.dot_scaled`, which compiles to better code, but the interpreter lacks it, so errors could go unnoticed.

Legend: W weights in memory, N out features, K in features, B blocks of K, R blocks of N.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.gpu.limits import why_no_block
from moe.load.quantised_weight import Kind, QuantisedWeight, QuantisedWeightError

_SHARING = (128, 64, 32, 16)  # numbers of FP8 rows that may share a scale
_LIFT_E2M1 = tl.constexpr(2.0**126)  # corrects the exponent after the bits were placed in a float32
_LIFT_E4M3 = tl.constexpr(2.0**120)
_LEAST_POWER, _NAN = tl.constexpr(0x00400000), tl.constexpr(0x7FC00000)  # float32 bits of e8m0's 0 and 255
_COUNTED = tl.constexpr(0x4B000000)  # 2^23 in float32; its last bit counts ones
_COUNTED_EIGHT = tl.constexpr(2.0**23 + 8)


class DeviceFormat(NamedTuple):
    """Storage format of weights; kernels are compiled for each."""

    kind: Kind | Literal["plain"] = "plain"  # of the codes
    scale: str = "none"  # of the scales: float (float32, bfloat16 or float16), e8m0, e4m3
    block: int = 0  # inputs that share a scale
    rows: int = 1  # outputs that share a scale


PLAIN = DeviceFormat()


class PlacedWeights(NamedTuple):
    """Weights of one format, by place."""

    codes: Tensor  # [W, N, K] of the rows' type, float8_e4m3fn or int8; or [W, N, K / 2] uint8, even input in the lower half
    format: DeviceFormat = PLAIN
    scales: Tensor | None = None  # [W, R, B] float32, bfloat16, float16, uint8 (e8m0) or float8_e4m3fn
    row_scales: Tensor | None = None  # [W, N] float32
    zeros: Tensor | None = None  # [W, N, B] uint8, for int4: subtracted from a code instead of 8

    @staticmethod
    def of(parts: Mapping[str, Tensor], form: DeviceFormat) -> "PlacedWeights":
        """Build from the tensors of `parts_of`, with a leading dimension W; a bias is ignored."""
        return PlacedWeights(
            parts[""], form, parts.get("scales"), parts.get("row_scales"), parts.get("zeros")
        )

    @property
    def in_dim(self) -> int:
        """Number of input features K."""
        return int(self.codes.shape[2]) * (2 if self.format.kind in ("e2m1", "int4") else 1)

    def wide(self, place: int) -> Tensor:
        """Return one weight dequantised: [N, K] float32, new."""
        kind = self.format.kind
        if kind == "plain" or self.scales is None:
            return self.codes[place].float()
        scales = self.scales[place]
        if self.format.rows > 1:
            scales = scales.repeat_interleave(self.format.rows, 0)[: self.codes.shape[1]]
        row_scales, zeros = (None if part is None else part[place] for part in (self.row_scales, self.zeros))
        with self.codes.device:  # device of the tables of values
            return QuantisedWeight(
                codes=self.codes[place], kind=kind, scales=scales, block=self.format.block,
                row_scales=row_scales, zeros=zeros,
            ).dequantised()  # fmt: skip

    def check(self) -> None:
        """Refuse weights that the kernel does not support.

        Raises:
            ValueError: Scales, second scales or zeros are missing, unexpected or of another shape; or a block size is wrong.
        """
        kind, _, block, rows = self.format
        if (self.scales is None) != (kind == "plain"):
            raise ValueError(f"{kind} weights have {'scales' if kind == 'plain' else 'no scales'}")
        if self.scales is None:
            return
        if self.zeros is not None and kind != "int4":
            raise ValueError(f"{kind} weights have zeros, which only int4 may have")
        if problem := why_no_block(block, self.in_dim):
            raise ValueError(problem)
        W, N, B = *self.codes.shape[:2], -(-self.in_dim // block)
        for name, part, shape in (
            ("scales", self.scales, (W, -(-N // rows), B)),
            ("row_scales", self.row_scales, (W, N)),
            ("zeros", self.zeros, (W, N, B)),
        ):
            if part is not None and part.shape != shape:
                raise ValueError(
                    f"{name} are {list(part.shape)}; {kind} weights of {N} x {self.in_dim} need {list(shape)}"
                )


def format_of(weight: Tensor | QuantisedWeight) -> DeviceFormat:
    """Return a weight's format. Scales are stored per group of rows if all groups share theirs."""
    if isinstance(weight, Tensor):
        return PLAIN
    scale = {torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}.get(weight.scales.dtype, "float")
    rows = 1
    if weight.kind == "e4m3" and scale == "float" and weight.block < weight.in_dim:
        rows = next((size for size in _SHARING if _share(weight.scales, size)), 1)
    return DeviceFormat(weight.kind, scale, weight.block, rows)


def parts_of(weight: Tensor | QuantisedWeight, form: DeviceFormat) -> dict[str, Tensor]:
    """Return a weight's tensors by name, as a store of a format keeps them: "" is the weight, or its codes.

    Raises:
        QuantisedWeightError: The weight has another format.
    """
    own = format_of(weight)
    if own[:3] != form[:3]:
        raise QuantisedWeightError(
            f"weights of one layer have two formats, {own.kind} with {own.scale} scales per {own.block} inputs and "
            f"{form.kind} with {form.scale} scales per {form.block}; the GPU kernels support only one"
        )
    if isinstance(weight, Tensor):
        return {"": weight}
    parts = weight.tensors()
    if form.rows > 1:
        parts["scales"] = weight.block_scales(form.rows)
    return {"": parts.pop("codes"), **parts}


def _share(scales_NB: Tensor, rows: int) -> bool:
    """Return whether each group of rows has the scales of its first row."""
    firsts = scales_NB[::rows].repeat_interleave(rows, 0)[: len(scales_NB)]
    return torch.equal(firsts, scales_NB)


@triton.jit
def load_tile(
    codes, scales, zeros, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, dtype,
):  # fmt: skip
    """Load [columns, INNER] of one weight from `begin`, as `dtype`, times the scales that change within it.

    Values beyond K are arbitrary; they are multiplied with 0.
    """
    value_NK = _load_values(codes, column, begin, HEIGHT, K, INNER, KIND, zeros is not None)
    if KIND == "plain" or (zeros is None and (BLOCK >= INNER or BLOCK >= K)):
        return value_NK.to(dtype)
    else:
        GROUPS: tl.constexpr = 1 if (BLOCK >= INNER or BLOCK >= K) else INNER // BLOCK
        BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
        block = begin // BLOCK + tl.arange(0, GROUPS)
        is_in = (column[:, None] < HEIGHT) & (block[None, :] < BLOCKS)
        value_NBI = tl.reshape(value_NK.to(tl.float32), [column.shape[0], GROUPS, INNER // GROUPS])
        if zeros is not None:
            zero_NB = tl.load(zeros + column[:, None] * BLOCKS + block[None, :], mask=is_in, other=0)
            value_NBI -= _counted(zero_NB.to(tl.int32))[:, :, None]
        if GROUPS > 1:
            place_NB = (column // ROWS)[:, None] * BLOCKS + block[None, :]
            value_NBI *= _read_scales(scales + place_NB, is_in, SCALE)[:, :, None]
        return tl.reshape(value_NBI, [column.shape[0], INNER]).to(dtype)


@triton.jit
def load_scales(
    scales, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Load the columns' scales for the block of K that contains `begin`, as float32."""
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    return _read_scales(scales + column // ROWS * BLOCKS + begin // BLOCK, column < HEIGHT, SCALE)


@triton.jit
def _load_values(
    codes, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Decode [columns, INNER]. int4 with zeros is returned 2^23 too large."""
    PER_CODE: tl.constexpr = 2 if (KIND == "e2m1" or KIND == "int4") else 1
    at = begin // PER_CODE + tl.arange(0, INNER // PER_CODE)
    is_in = column[:, None] < HEIGHT
    if K % INNER != 0:
        is_in = is_in & (at[None, :] < K // PER_CODE)
    stored = tl.load(codes + column[:, None] * (K // PER_CODE) + at[None, :], mask=is_in, other=0.0)
    if KIND == "e4m3" and codes.dtype.element_ty == tl.uint8:
        return _e4m3(stored)
    elif PER_CODE == 1:
        return stored
    else:
        pair = stored.to(tl.int32)
        code_NK = tl.reshape(tl.join(pair & 0xF, pair >> 4), [column.shape[0], INNER])
        if KIND == "e2m1":
            bits = ((code_NK & 7) << 22) | ((code_NK & 8) << 28)
            return bits.to(tl.float32, bitcast=True) * _LIFT_E2M1
        elif HAS_ZEROS:
            return _counted(code_NK)
        else:
            return _counted(code_NK) - _COUNTED_EIGHT


@triton.jit
def _counted(whole):
    """Return 2^23 + a small whole number as float32, without a conversion."""
    return (whole | _COUNTED).to(tl.float32, bitcast=True)


@triton.jit
def _read_scales(pointers, is_in, SCALE: tl.constexpr):
    """Read scales of any kind as float32."""
    stored = tl.load(pointers, mask=is_in, other=0.0)
    if SCALE == "e8m0":
        power = stored.to(tl.int32)
        bits = tl.where(power == 0, _LEAST_POWER, tl.where(power == 255, _NAN, power << 23))
        return bits.to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        return _e4m3(stored)
    else:
        return stored.to(tl.float32)


@triton.jit
def _e4m3(byte):
    """Decode bytes without NaN to float32."""
    code = byte.to(tl.int32)
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * _LIFT_E4M3
