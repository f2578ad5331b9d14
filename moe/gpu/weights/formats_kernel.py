# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Decoding a tile of a weight in registers, inside the grouped product's kernel, for all formats of `formats`.

Rejected: `tl.dot_scaled`, which compiles to better code, but the interpreter lacks it, so errors could go unnoticed.

Legend: L lines (out features) of a weight, K in features, B blocks of K.
"""

import triton
import triton.language as tl

from moe.gpu.limits import TILE_INPUTS

_TILE = tl.constexpr(TILE_INPUTS)
_LIFT_E2M1 = tl.constexpr(2.0**126)  # corrects the exponent after the bits were placed in a float32
_LIFT_E4M3 = tl.constexpr(2.0**120)
# Of the sum, if a scale lifts its values: 2^126 would be too much for a scale above 2.
_SUM_LIFT = tl.constexpr(2.0**16)
_LIFT_POWERS = tl.constexpr(0x37003700)  # 2^110's power in two bfloat16
_LIFT_E4M3_PART = tl.constexpr(2.0**115)  # twice: 2^120 corrects a scale's exponent, and 2^110 lifts
_LEAST_POWER, _NAN = tl.constexpr(0x00400000), tl.constexpr(0x7FC00000)  # float32 bits of e8m0's 0 and 255
_COUNTED = tl.constexpr(0x4B000000)  # 2^23 in float32; its last bit counts ones
_COUNTED_EIGHT = tl.constexpr(2.0**23 + 8)
_COUNTED_HALF = tl.constexpr(0x4300)  # 128 in bfloat16; its last bit counts ones
_COUNTED_REST = tl.constexpr(2.0**23 - 128)


@triton.constexpr_function
def blocks_per_line(K, BLOCK):
    """Return how many scales a line of a weight has in memory."""
    size = TILE_INPUTS // BLOCK if BLOCK < K else 0
    return -(-K // TILE_INPUTS) * size if size > 1 else -(-K // BLOCK)


@triton.jit
def in_order_of_words(x_KR, INNER: tl.constexpr, ROWS: tl.constexpr, WORD: tl.constexpr):
    """Return a tile of rows with its inputs in the order in which `load_tile` returns those of weights with words of 8-bit codes.

    The tensor cores take two inputs, then two more, from each of the four threads that share a row. A thread decodes whole
    words, and each operation serves the codes at two places, half a word apart. So this order saves exchanges between threads.
    It depends on the format only, not on the tile. Codes of 4 bits are ordered in memory instead, by `ordered`.
    """
    x_GLHPR = tl.reshape(x_KR, [INNER // (4 * WORD), 4, 2, WORD // 2, ROWS])
    return tl.reshape(tl.permute(x_GLHPR, [0, 3, 1, 2, 4]), [INNER, ROWS])


@triton.jit
def load_tile(
    codes, stored, zeros, line, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, dtype,
):  # fmt: skip
    """Load [lines, INNER] of one weight from `begin`, as `dtype`, times the scales that change within it.

    Inputs of words of 8-bit codes are in the order of `in_order_of_words`. Values beyond K are arbitrary; they are multiplied
    with 0.
    """
    IS_SCALED: tl.constexpr = KIND != "plain" and BLOCK < INNER and BLOCK < K
    IS_LIFTED: tl.constexpr = scale_lifts(KIND, SCALE, BLOCK, INNER, K, WORD, dtype)
    if WORD == 1:
        value_NK = _load_values(codes, line, begin, HEIGHT, K, INNER, KIND, zeros is not None)
    else:
        value_NK = _load_words(
            codes, line, begin, HEIGHT, K, INNER, KIND, WORD, zeros is not None, IS_LIFTED, dtype
        )
    if WORD > 1:
        value_NGLPH = tl.reshape(value_NK, [line.shape[0], INNER // (4 * WORD), 4, WORD // 2, 2])
        value_NK = tl.reshape(tl.permute(value_NGLPH, [0, 1, 3, 2, 4]), [line.shape[0], INNER])
    if IS_SCALED or zeros is not None:
        GROUPS: tl.constexpr = INNER // BLOCK if IS_SCALED else 1
        value_NBI = tl.reshape(value_NK, [line.shape[0], GROUPS, INNER // GROUPS])
        if zeros is not None:
            zero_NB = load_blocks(zeros, line, begin, HEIGHT, K, INNER, BLOCK, 1)
            zero_NB = _counted_zeros(tl.reshape(zero_NB, [line.shape[0], GROUPS]), value_NBI.dtype)
            value_NBI -= zero_NB[:, :, None]
        if IS_SCALED:
            value_NBI = _scaled(value_NBI, stored, SCALE, IS_LIFTED)
        value_NK = tl.reshape(value_NBI, [line.shape[0], INNER])
    return value_NK.to(dtype)


@triton.constexpr_function
def scale_lifts(KIND, SCALE, BLOCK, INNER, K, WORD, dtype):
    """Return whether scales also correct the exponents of 4-bit values: one multiplication instead of two.

    Sums are then 2^16 too small; `lifted_sum` corrects them. float16 has too few exponents.
    """
    return (
        KIND == "e2m1"
        and SCALE != "float"
        and BLOCK < K
        and INNER % TILE_INPUTS == 0
        and TILE_INPUTS // BLOCK % 4 == 0
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
    scales, line, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, LIFTS: tl.constexpr, SCALE: tl.constexpr, dtype,
):  # fmt: skip
    """Load the lines' scales for INNER inputs from `begin` as `load_blocks` does, ready for lifting if they lift values."""
    if LIFTS:
        return _lifting_scales(scales, line, begin, HEIGHT, K, INNER, BLOCK, SCALE, dtype)
    else:
        return load_blocks(scales, line, begin, HEIGHT, K, INNER, BLOCK, ROWS)


@triton.jit
def load_blocks(
    parts, line, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Load scales or zeros of INNER inputs from `begin`: [lines, blocks], or [lines] for one block. Beyond K they are 0."""
    LINES: tl.constexpr = (HEIGHT + ROWS - 1) // ROWS
    PER_TILE: tl.constexpr = _TILE // BLOCK if BLOCK < K else 0
    IS_ONE: tl.constexpr = BLOCK >= K or BLOCK >= INNER
    is_line = line < HEIGHT
    if PER_TILE > 1:
        block = begin // BLOCK if IS_ONE else begin // BLOCK + tl.arange(0, INNER // BLOCK)
        tile = block // PER_TILE
        at = tile * (LINES * PER_TILE) + block % PER_TILE
        is_in = begin < K if IS_ONE else tile < (K + _TILE - 1) // _TILE
        line_at = line // ROWS * PER_TILE
    else:
        block = begin // BLOCK
        at = block
        is_in = begin < K
        line_at = line // ROWS * ((K + BLOCK - 1) // BLOCK)
    if IS_ONE:
        return tl.load(parts + (line_at + at), mask=is_line & is_in, other=0)
    elif INNER <= _TILE:
        return tl.load(parts + (line_at[:, None] + at[None, :]), mask=is_line[:, None], other=0)
    else:
        is_read = is_line[:, None] & is_in[None, :]
        return tl.load(parts + (line_at[:, None] + at[None, :]), mask=is_read, other=0)


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
def _lifting_scales(
    scales, line, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
    SCALE: tl.constexpr, dtype,
):  # fmt: skip
    """Load words of scales and multiply them by 2^110. Return bfloat16 or float32 [lines, blocks]."""
    WORDS: tl.constexpr = _TILE // BLOCK // 4  # of a tile
    each = tl.arange(0, INNER // BLOCK // 4)
    tile = begin // _TILE + each // WORDS
    is_in = (line < HEIGHT)[:, None]
    if INNER > _TILE:
        is_in = is_in & (tile < (K + _TILE - 1) // _TILE)[None, :]
    at = (line * WORDS)[:, None] + (tile * (HEIGHT * WORDS) + each % WORDS)[None, :]
    word = tl.load(scales.to(tl.pointer_type(tl.int32)) + at, mask=is_in, other=0).to(tl.uint32, bitcast=True)
    both = tl.join(word, word >> 8)
    if SCALE == "e8m0":
        low, high = _halves((both & 0x00FF00FF) * 128 + _LIFT_POWERS, dtype)
    else:
        low, high = _halves(((both << 4) & 0x07F007F0) | ((both << 8) & 0x80008000), dtype)
        low = low * _LIFT_E4M3_PART * _LIFT_E4M3_PART
        high = high * _LIFT_E4M3_PART * _LIFT_E4M3_PART
    return tl.reshape(tl.permute(tl.join(low, high), [0, 1, 3, 2]), [line.shape[0], INNER // BLOCK])


@triton.jit
def _counted_zeros(zero_NB, dtype):
    """Return zeros as much too large as `_load_values` and `_load_words` return codes, as `dtype`."""
    if dtype == tl.bfloat16:
        return (zero_NB.to(tl.int16) | _COUNTED_HALF).to(tl.bfloat16, bitcast=True)
    else:
        return _counted(zero_NB.to(tl.int32))


@triton.jit
def _load_values(
    codes, line, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Decode [lines, INNER] byte by byte. int4 with zeros is returned 2^23 too large."""
    PER_CODE: tl.constexpr = 2 if (KIND == "e2m1" or KIND == "int4") else 1
    at = begin // PER_CODE + tl.arange(0, INNER // PER_CODE)
    is_in = line[:, None] < HEIGHT
    if K % INNER != 0:
        is_in = is_in & (at[None, :] < K // PER_CODE)
    stored = tl.load(codes + line[:, None] * (K // PER_CODE) + at[None, :], mask=is_in, other=0.0)
    if KIND == "e4m3":
        return _e4m3(stored)
    elif KIND == "plain":
        return stored
    elif PER_CODE == 1:
        return stored.to(tl.float32)
    else:
        pair = stored.to(tl.int32)
        code_NK = tl.reshape(tl.join(pair & 0xF, pair >> 4), [line.shape[0], INNER])
        if KIND == "e2m1":
            bits = ((code_NK & 7) << 22) | ((code_NK & 8) << 28)
            return bits.to(tl.float32, bitcast=True) * _LIFT_E2M1
        elif HAS_ZEROS:
            return _counted(code_NK)
        else:
            return _counted(code_NK) - _COUNTED_EIGHT


@triton.jit
def _load_words(
    codes, line, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    WORD: tl.constexpr, HAS_ZEROS: tl.constexpr, IS_LIFTED: tl.constexpr, dtype,
):  # fmt: skip
    """Decode [lines, INNER] word by word, as bfloat16 if the rows are, otherwise as float32.

    A word's codes come in pairs that are half a word apart. int4 with zeros is returned 128 too large in bfloat16, and 2^23
    in float32. With IS_LIFTED, e2m1 is returned 2^126 times too small.
    """
    at = begin // WORD + tl.arange(0, INNER // WORD)
    is_in = line[:, None] < HEIGHT
    if K % INNER != 0:
        is_in = is_in & (at[None, :] < K // WORD)
    place = line[:, None] * (K // WORD) + at[None, :]
    word = tl.load(codes + place, mask=is_in, other=0).to(tl.uint32, bitcast=True)
    pairs = tl.join(_pair(word, 0, KIND), _pair(word, 1, KIND))
    if WORD == 8:
        pairs = tl.join(
            tl.join(_pair(word, 0, KIND), _pair(word, 2, KIND)),
            tl.join(_pair(word, 1, KIND), _pair(word, 3, KIND)),
        )
    low, high = _halves(pairs, dtype)
    value_NK = tl.reshape(tl.join(low, high), [line.shape[0], INNER])
    if IS_LIFTED:
        return value_NK
    elif KIND == "e2m1":
        return value_NK * _LIFT_E2M1
    elif KIND == "e4m3":
        return value_NK * _LIFT_E4M3
    elif not HAS_ZEROS:
        return value_NK - 136.0
    elif dtype == tl.bfloat16:
        return value_NK
    else:
        return value_NK + _COUNTED_REST


@triton.jit
def _halves(pairs, dtype):
    """Return the lower and the upper bfloat16 of words, as float32 if the rows are not bfloat16."""
    if dtype == tl.bfloat16:
        low = (pairs & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return low, (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)


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
