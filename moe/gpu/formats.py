# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Storage formats of weights in a GPU's memory, and decoding a tile of them into registers.

Plain weights have the rows' own type. Quantised ones are those of `moe.load.quantised_weight`: codes, scales, perhaps
zeros and a second scale of each row, all in the checkpoint's types. A format combines one kind of each, and
one loader handles all: FP8, int8, MXFP4, MXFP8, NVFP4, int4 differ in a line. The number of inputs per scale decides
when a scale is applied:

- fewer than a tile's (16, 32, 64): to the values, in float32, which are then rounded to the rows' type. In bfloat16 this is
  exact for MXFP4 (scales of 2^-110 to 2^17), MXFP8 and NVFP4.
- whole tiles (128, ...): to the tile's product, so the values are exact in the rows' type for any scale.
- a whole row: to the finished sum, like the second scale of a row.

FP8's blocks of 128 x 128 (DeepSeek-V3) have a scale for 128 rows. Scales that rows share are stored once.

Codes of 4 bits, and e4m3, are decoded in 32-bit words, if rows consist of whole ones: each operation on a word serves two
codes, and memory is read in 16 bytes. The issue rate, not the memory, is the limit of a decode step: an H200 can spend about
five instructions on a value of 4 bits and eight on one of 8 bits. No type of 8 bits is used, which GPUs before sm_89 lack.
The placement of two codes in a word follows Marlin (IST-DASLab/marlin) and OpenAI's triton_kernels, which reorder weights in
memory for it; here the rows are reordered in registers, so weights keep the checkpoint's bytes.

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
_SUM_LIFT = tl.constexpr(
    2.0**16
)  # of the sum, if a scale lifts its values: 2^126 would be too much for a scale above 2
_SCALE_LIFT = tl.constexpr(2.0**110)
_LIFT_POWER, _HALF_NAN = (
    tl.constexpr(110 << 7),
    tl.constexpr(0x7FC0),
)  # bfloat16 bits of 2^110's power, and a NaN
_MOST_POWER = 127 + 17  # of an e8m0 scale of 4-bit values: 2^17, which the lift leaves finite
_LEAST_POWER, _NAN = tl.constexpr(0x00400000), tl.constexpr(0x7FC00000)  # float32 bits of e8m0's 0 and 255
_COUNTED = tl.constexpr(0x4B000000)  # 2^23 in float32; its last bit counts ones
_COUNTED_EIGHT = tl.constexpr(2.0**23 + 8)
_COUNTED_HALF = tl.constexpr(0x4300)  # 128 in bfloat16; its last bit counts ones
_COUNTED_REST = tl.constexpr(2.0**23 - 128)


class DeviceFormat(NamedTuple):
    """Storage format of weights; kernels are compiled for each."""

    kind: Kind | Literal["plain"] = "plain"  # of the codes
    scale: str = "none"  # of the scales: float (float32, bfloat16 or float16), e8m0, e4m3
    block: int = 0  # inputs that share a scale
    rows: int = 1  # outputs that share a scale
    fp8_rows: bool = (
        False  # multiplied with rows quantised to e4m3, with scales for `block` inputs (`moe.gpu.fp8`)
    )


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
        kind, block, rows = self.format.kind, self.format.block, self.format.rows
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


def format_of(weight: Tensor | QuantisedWeight, *, fp8_rows: bool = False) -> DeviceFormat:
    """Return a weight's format. Scales are stored per group of rows if all groups share theirs.

    Args:
        fp8_rows: Whether the device quantises rows if the checkpoint does.
    """
    if isinstance(weight, Tensor):
        return PLAIN
    scale = {torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}.get(weight.scales.dtype, "float")
    rows = 1
    if weight.kind == "e4m3" and scale == "float" and weight.block < weight.in_dim:
        rows = next((size for size in _SHARING if _share(weight.scales, size)), 1)
    is_served = weight.kind == "e4m3" and scale == "float"
    return DeviceFormat(weight.kind, scale, weight.block, rows, fp8_rows and weight.fp8_rows and is_served)


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
    if form.kind == "e2m1" and form.scale == "e8m0":
        _check_powers(weight.scales)
    if form.rows > 1:
        parts["scales"] = weight.block_scales(form.rows)
    return {"": parts.pop("codes"), **parts}


def _check_powers(scales: Tensor) -> None:
    """Refuse scales of 4-bit values that are too large to lift a value; 255 is NaN."""
    if bool(((scales > _MOST_POWER) & (scales < 255)).any()):
        raise QuantisedWeightError(
            "MXFP4 weights have a scale above 2^17, which the GPU kernels do not support"
        )


def _share(scales_NB: Tensor, rows: int) -> bool:
    """Return whether each group of rows has the scales of its first row."""
    firsts = scales_NB[::rows].repeat_interleave(rows, 0)[: len(scales_NB)]
    return torch.equal(firsts, scales_NB)


def codes_per_word(form: DeviceFormat, in_dim: int) -> int:
    """Return how many codes a kernel decodes at once, as a 32-bit word; 1 if it reads them one byte at a time."""
    codes = {"e2m1": 8, "int4": 8, "e4m3": 4}.get(form.kind, 1)
    return codes if in_dim % codes == 0 else 1


@triton.jit
def in_order_of_words(x_KR, INNER: tl.constexpr, ROWS: tl.constexpr, WORD: tl.constexpr):
    """Return a tile of rows with its inputs in the order in which `load_tile` returns those of weights with words.

    The tensor cores take two inputs, then two more, from each of the four threads that share a row. A thread decodes whole
    words, and each operation serves the codes at two places, half a word apart. So this order saves exchanges between threads.
    It depends on the format only, not on the tile.
    """
    x_GLHPR = tl.reshape(x_KR, [INNER // (4 * WORD), 4, 2, WORD // 2, ROWS])
    return tl.reshape(tl.permute(x_GLHPR, [0, 3, 1, 2, 4]), [INNER, ROWS])


@triton.jit
def load_tile(
    codes, stored, zeros, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, dtype,
):  # fmt: skip
    """Load [columns, INNER] of one weight from `begin`, as `dtype`, times the scales that change within it.

    Inputs are in the order of `in_order_of_words`. Values beyond K are arbitrary; they are multiplied with 0.
    """
    IS_SCALED: tl.constexpr = KIND != "plain" and BLOCK < INNER and BLOCK < K
    IS_LIFTED: tl.constexpr = scale_lifts(KIND, SCALE, BLOCK, INNER, K, WORD, dtype)
    if WORD == 1:
        value_NK = _load_values(codes, column, begin, HEIGHT, K, INNER, KIND, zeros is not None)
    else:
        value_NK = _load_words(
            codes, column, begin, HEIGHT, K, INNER, KIND, WORD, zeros is not None, IS_LIFTED, dtype
        )
    if IS_SCALED or zeros is not None:
        GROUPS: tl.constexpr = INNER // BLOCK if IS_SCALED else 1
        value_NBI = tl.reshape(value_NK, [column.shape[0], GROUPS, INNER // GROUPS])
        if zeros is not None:
            value_NBI -= _load_zeros(zeros, column, begin, HEIGHT, K, BLOCK, GROUPS, value_NBI.dtype)[
                :, :, None
            ]
        if IS_SCALED:
            value_NBI = _scaled(value_NBI, stored, SCALE, IS_LIFTED)
        value_NK = tl.reshape(value_NBI, [column.shape[0], INNER])
    value_NK = value_NK.to(dtype)
    if WORD > 1:
        value_NGLPH = tl.reshape(value_NK, [column.shape[0], INNER // (4 * WORD), 4, WORD // 2, 2])
        value_NK = tl.reshape(tl.permute(value_NGLPH, [0, 1, 3, 2, 4]), [column.shape[0], INNER])
    return value_NK


@triton.constexpr_function
def scale_lifts(KIND, SCALE, BLOCK, INNER, K, WORD, dtype):
    """Return whether scales also correct the exponents of 4-bit values: one multiplication instead of two.

    Sums are then 2^16 too small; `lifted_sum` corrects them. float16 has too few exponents.
    """
    return (
        KIND == "e2m1"
        and SCALE != "float"
        and BLOCK < INNER
        and BLOCK < K
        and WORD > 1
        and dtype != tl.float16
    )


@triton.jit
def lifted_sum(
    total, KIND: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr,
    WORD: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return the sum of products with values of `load_tile`."""
    LIFTS: tl.constexpr = scale_lifts(KIND, SCALE, BLOCK, INNER, K, WORD, dtype)
    return total * _SUM_LIFT if LIFTS else total


@triton.jit
def load_scales(
    scales, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, LIFTS: tl.constexpr, SCALE: tl.constexpr, dtype,
):  # fmt: skip
    """Load the columns' scales for INNER inputs from `begin`: [columns, blocks], or [columns] for one.

    They are as stored, except that scales which lift values are ready for it: few threads load each, and many use it.
    """
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    if BLOCK < INNER and BLOCK < K:
        block = begin // BLOCK + tl.arange(0, INNER // BLOCK)
        is_in = (column[:, None] < HEIGHT) & (block[None, :] < BLOCKS)
        stored = tl.load(scales + (column // ROWS)[:, None] * BLOCKS + block[None, :], mask=is_in, other=0)
        return _lifting_scales(stored, SCALE, dtype) if LIFTS else stored
    else:
        block = begin // BLOCK
        return tl.load(
            scales + column // ROWS * BLOCKS + block, mask=(column < HEIGHT) & (block < BLOCKS), other=0.0
        )


@triton.jit
def read_scales(stored, SCALE: tl.constexpr):
    """Return stored scales of any kind as float32."""
    if SCALE == "e8m0":
        power = stored.to(tl.int32)
        bits = tl.where(power == 0, _LEAST_POWER, tl.where(power == 255, _NAN, power << 23))
        return bits.to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        return _e4m3(stored)
    else:
        return stored.to(tl.float32)


@triton.jit
def _scaled(value_NBI, stored, SCALE: tl.constexpr, IS_LIFTED: tl.constexpr):
    """Multiply values with scales: in bfloat16 if the values and the scales are exact in it, so that it rounds once."""
    if IS_LIFTED:
        return value_NBI * stored[:, :, None]
    elif value_NBI.dtype == tl.bfloat16 and (SCALE != "float" or stored.dtype == tl.bfloat16):
        if SCALE == "e8m0":
            power = stored.to(tl.int32)  # 0 is 2^-127, which has no exponent's bits; 255 becomes NaN
            bits = tl.maximum(power << 7, 0x0040) + ((power + 1) >> 8 << 6)
            scale_NB = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            scale_NB = read_scales(stored, SCALE).to(tl.bfloat16)
        return value_NBI * scale_NB[:, :, None]
    else:
        return value_NBI.to(tl.float32) * read_scales(stored, SCALE)[:, :, None]


@triton.jit
def _lifting_scales(stored, SCALE: tl.constexpr, dtype):
    """Return scales times 2^110 as bfloat16 or float32."""
    if SCALE == "e8m0":
        bits = tl.minimum(stored.to(tl.int32) * 128 + _LIFT_POWER, _HALF_NAN)
        if dtype == tl.bfloat16:
            return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return (read_scales(stored, SCALE) * _SCALE_LIFT).to(dtype)


@triton.jit
def _load_zeros(
    zeros,
    column,
    begin,
    HEIGHT: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    dtype,
):
    """Load zeros as large as `_load_values` and `_load_words` return codes, as `dtype`."""
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    block = begin // BLOCK + tl.arange(0, GROUPS)
    is_in = (column[:, None] < HEIGHT) & (block[None, :] < BLOCKS)
    zero_NB = tl.load(zeros + column[:, None] * BLOCKS + block[None, :], mask=is_in, other=0)
    if dtype == tl.bfloat16:
        return (zero_NB.to(tl.int16) | _COUNTED_HALF).to(tl.bfloat16, bitcast=True)
    else:
        return _counted(zero_NB.to(tl.int32))


@triton.jit
def _load_values(
    codes, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Decode [columns, INNER] byte by byte. int4 with zeros is returned 2^23 too large."""
    PER_CODE: tl.constexpr = 2 if (KIND == "e2m1" or KIND == "int4") else 1
    at = begin // PER_CODE + tl.arange(0, INNER // PER_CODE)
    is_in = column[:, None] < HEIGHT
    if K % INNER != 0:
        is_in = is_in & (at[None, :] < K // PER_CODE)
    stored = tl.load(codes + column[:, None] * (K // PER_CODE) + at[None, :], mask=is_in, other=0.0)
    if KIND == "e4m3":
        return _e4m3(stored)
    elif KIND == "plain":
        return stored
    elif PER_CODE == 1:
        return stored.to(tl.float32)
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
def _load_words(
    codes, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    WORD: tl.constexpr, HAS_ZEROS: tl.constexpr, IS_LIFTED: tl.constexpr, dtype,
):  # fmt: skip
    """Decode [columns, INNER] word by word, as bfloat16 if the rows are, otherwise as float32.

    A word's codes come in pairs that are half a word apart. int4 with zeros is returned 128 too large in bfloat16, and 2^23
    in float32. With IS_LIFTED, e2m1 is returned 2^126 times too small.
    """
    at = begin // WORD + tl.arange(0, INNER // WORD)
    is_in = column[:, None] < HEIGHT
    if K % INNER != 0:
        is_in = is_in & (at[None, :] < K // WORD)
    word = tl.load(codes + column[:, None] * (K // WORD) + at[None, :], mask=is_in, other=0).to(
        tl.uint32, bitcast=True
    )
    pairs = tl.join(_pair(word, 0, KIND), _pair(word, 1, KIND))
    if WORD == 8:
        pairs = tl.join(
            tl.join(_pair(word, 0, KIND), _pair(word, 2, KIND)),
            tl.join(_pair(word, 1, KIND), _pair(word, 3, KIND)),
        )
    IS_HALF: tl.constexpr = dtype == tl.bfloat16
    if IS_HALF:
        low = (pairs & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        low, high = (
            (pairs << 16).to(tl.float32, bitcast=True),
            (pairs & 0xFFFF0000).to(tl.float32, bitcast=True),
        )
    value_NK = tl.reshape(tl.join(low, high), [column.shape[0], INNER])
    if IS_LIFTED:
        return value_NK
    elif KIND == "e2m1":
        return value_NK * _LIFT_E2M1
    elif KIND == "e4m3":
        return value_NK * _LIFT_E4M3
    elif not HAS_ZEROS:
        return value_NK - 136.0
    elif IS_HALF:
        return value_NK
    else:
        return value_NK + _COUNTED_REST


@triton.jit
def _pair(word, AT: tl.constexpr, KIND: tl.constexpr):
    """Return the code AT of each half of a word, as two bfloat16 in a word.

    e2m1 and e4m3 have their exponent's bits as they are, to be lifted by a multiplication; int4 becomes 128 + the code.
    """
    if KIND == "e2m1":  # a multiplication places a code's bits twice, for its sign and its size
        half = word if AT < 2 else word >> 8
        if AT % 2 == 0:
            return ((half & 0x000F000F) * 0x1040) & 0x81C081C0
        else:
            return ((half & 0x00F000F0) * 0x0104) & 0x81C081C0
    elif KIND == "e4m3":
        return (_shifted(word, 4 - 8 * AT) & 0x07F007F0) | (_shifted(word, 8 - 8 * AT) & 0x80008000)
    else:
        return (_shifted(word, -4 * AT) & 0x000F000F) | 0x43004300


@triton.jit
def _shifted(word, LEFT: tl.constexpr):
    """Shift a word to the left, or to the right by -LEFT."""
    if LEFT > 0:
        return word << LEFT
    elif LEFT < 0:
        return word >> -LEFT
    else:
        return word


@triton.jit
def _counted(whole):
    """Return 2^23 + a small whole number as float32, without a conversion."""
    return (whole | _COUNTED).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(byte):
    """Decode bytes without NaN to float32."""
    code = byte.to(tl.int32)
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * _LIFT_E4M3
