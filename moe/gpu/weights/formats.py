"""Storage formats of weights in a GPU's memory; `formats_kernel` decodes them.

Plain weights have the rows' own type. Quantised ones are those of `moe.load.quantised_weight`: codes, scales, perhaps
zeros and a second scale of each row, all in the checkpoint's types. A format combines one kind of each, and
one loader handles all: FP8, int8, MXFP4, MXFP8, NVFP4, int4 differ in a line. The number of inputs per scale decides
when a scale is applied:

- fewer than a tile's (16, 32, 64): to the values, in float32, which are then rounded to the rows' type. In bfloat16 this is
  exact for MXFP4 (scales of 2^-110 to 2^17), MXFP8 and NVFP4.
- whole tiles (128, ...): to the tile's product, so the values are exact in the rows' type for any scale.
- a whole row: to the finished sum, like the second scale of a row.

FP8's blocks of 128 x 128 (DeepSeek-V3) have a scale for 128 rows. Scales that rows share are stored once.

Codes of 4 bits, and e4m3, are decoded in 32-bit words, if lines consist of whole ones: each operation on a word serves two
codes. In a decode step an H200 can spend about five instructions on a value of 4 bits and eight on one of 8 bits. No type
of 8 bits is used, which GPUs before sm_89 lack.

Loaded weights are ordered for the kernels (`ordered`), as in Marlin (IST-DASLab/marlin) and OpenAI's triton_kernels:
- codes of 4 bits: a thread's inputs of a tensor core's instruction come from its own words. So rows are multiplied where
  a copy put them, and the next tile is decoded during the product. A line stays in one piece: neighbouring lines next to
  each other were slower (docs/LOG.md). Codes of 8 bits keep the checkpoint's order, which the FP8 units read too; their
  rows are reordered in registers.
- scales for less than a tile of inputs, and zeros: a tile's scales are next to each other, so an asynchronous copy fetches
  them like the codes, and no step waits for a load.

Legend: W weights in memory, N out features, K in features, B blocks of K, R blocks of N, T tiles of 128 of K, P blocks of a tile.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe.gpu.limits import TILE_INPUTS, why_no_block
from moe.load.quantised_weight import Kind, QuantisedWeight, QuantisedWeightError, inputs_per_code

FOUR_BIT_WORD = 8  # codes of 4 bits in a word
_GROUP = 32  # inputs of the four words that are next to each other: two instructions of a tensor core
_SHARING = (128, 64, 32, 16)  # numbers of FP8 rows that may share a scale
_MOST_POWER = 127 + 17  # of an e8m0 scale of 4-bit values: 2^17, which the lift leaves finite


class DeviceFormat(NamedTuple):
    """Storage format of weights; kernels are compiled for each."""

    kind: Kind | Literal["plain"] = "plain"  # of the codes
    scale: str = "none"  # of the scales: float (float32, bfloat16 or float16), e8m0, e4m3
    block: int = 0  # inputs that share a scale
    rows: int = 1  # outputs that share a scale
    fp8_rows: bool = False  # multiplied with rows quantised to e4m3, with scales for `block` inputs (`moe.gpu.products.fp8`)


PLAIN = DeviceFormat()


class PlacedWeights(NamedTuple):
    """Weights of one format, by place."""

    # [W, N, K] of the rows' type, float8_e4m3fn or int8; or [W, N, K / 2] uint8, two codes each, in the order of `ordered`
    codes: Tensor
    format: DeviceFormat = PLAIN
    # [W, R, B] float32, bfloat16, float16, uint8 (e8m0) or float8_e4m3fn; [W, T, R, P] for less than a tile of inputs
    scales: Tensor | None = None
    row_scales: Tensor | None = None  # [W, N] float32
    # [W, N, B] or [W, T, N, P] uint8, for int4: subtracted from a code instead of 8
    zeros: Tensor | None = None

    @staticmethod
    def of(parts: Mapping[str, Tensor], form: DeviceFormat) -> "PlacedWeights":
        """Build from the tensors of `parts_of` or `ordered`, with a leading dimension W; a bias is ignored."""
        return PlacedWeights(
            parts[""], form, parts.get("scales"), parts.get("row_scales"), parts.get("zeros")
        )

    @property
    def in_dim(self) -> int:
        """Number of input features K."""
        return int(self.codes.shape[2]) * (2 if self.format.kind in ("e2m1", "int4") else 1)

    def wide(self, place: int) -> Tensor:
        """Return one weight dequantised: [N, K] float32, new."""
        form = self.format
        if form.kind == "plain" or self.scales is None:
            return self.codes[place].float()
        scales = _by_rows(self.scales[place], form, self.in_dim)
        if form.rows > 1:
            scales = scales.repeat_interleave(form.rows, 0)[: self.codes.shape[1]]
        zeros = None if self.zeros is None else _by_rows(self.zeros[place], form, self.in_dim)
        codes = self.codes[place]
        if codes_per_word(form, self.in_dim) == FOUR_BIT_WORD:
            codes = _from_groups(codes)
        with self.codes.device:  # device of the tables of values
            return QuantisedWeight(
                codes=codes, kind=form.kind, scales=scales, block=form.block, zeros=zeros,
                row_scales=None if self.row_scales is None else self.row_scales[place],
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
        R, P = -(-N // rows), TILE_INPUTS // block
        tiles = -(-self.in_dim // TILE_INPUTS)
        is_tiled = _is_tiled(self.format, self.in_dim)
        for name, part, shape in (
            ("scales", self.scales, (W, tiles, R, P) if is_tiled else (W, R, B)),
            ("row_scales", self.row_scales, (W, N)),
            ("zeros", self.zeros, (W, tiles, N, P) if is_tiled else (W, N, B)),
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
    return ordered({"": parts.pop("codes"), **parts}, form)


def ordered(parts: Mapping[str, Tensor], form: DeviceFormat) -> dict[str, Tensor]:
    """Return tensors of a checkpoint's weights, [..., N, K] and [..., N, B], in the order in which the kernels read them.

    The name of codes is "", as in `parts_of`.
    """
    parts = dict(parts)
    in_dim = parts[""].shape[-1] * inputs_per_code(parts[""].dtype)
    if codes_per_word(form, in_dim) == FOUR_BIT_WORD:
        parts[""] = _by_groups(parts[""])
    if _is_tiled(form, in_dim):
        for name in parts.keys() & {"scales", "zeros"}:
            parts[name] = _by_tiles(parts[name], form)
    return parts


def _by_groups(codes: Tensor) -> Tensor:
    """Order codes of 4 bits, [..., N, K / 2], within groups of 32 inputs. The shape stays.

    A group has four words. Input 8 * p + 2 * l + h of the group is at place p + 4 * h of word l.
    """
    # A byte (p, l) of a checkpoint has h = 0 in its lower half.
    bytes_NGLP = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 16, 4, 4).transpose(-1, -2).contiguous()
    both = torch.stack((bytes_NGLP & 0xF, bytes_NGLP >> 4), -2)  # [..., l, h, p]
    return (both[..., ::2] | both[..., 1::2] << 4).view(codes.shape)


def _from_groups(codes: Tensor) -> Tensor:
    """Undo `_by_groups`."""
    bytes_NGLHP = codes.view(*codes.shape[:-1], codes.shape[-1] // 16, 4, 2, 2)  # of two p each
    both = torch.stack((bytes_NGLHP & 0xF, bytes_NGLHP >> 4), -1).flatten(-2)  # [..., l, h, p]
    bytes_NGPL = (both[..., 0, :] | both[..., 1, :] << 4).transpose(-1, -2)
    return bytes_NGPL.reshape(codes.shape)


def _is_tiled(form: DeviceFormat, in_dim: int) -> bool:
    """Return whether scales are for less than a tile of inputs."""
    return form.kind != "plain" and form.block < min(TILE_INPUTS, in_dim)


def _by_tiles(part: Tensor, form: DeviceFormat) -> Tensor:
    """Convert [..., R, B] to [..., T, R, P], the last tile filled with zeros."""
    size = TILE_INPUTS // form.block
    part = part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
    filled = torch.nn.functional.pad(part, (0, -part.shape[-1] % size))
    tiled = filled.reshape(*filled.shape[:-1], filled.shape[-1] // size, size).transpose(-2, -3).contiguous()
    return tiled.view(torch.float8_e4m3fn) if form.scale == "e4m3" else tiled


def _by_rows(part: Tensor, form: DeviceFormat, in_dim: int) -> Tensor:
    """Undo `_by_tiles` if it was applied."""
    if not _is_tiled(form, in_dim):
        return part
    bits = part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
    rows = bits.transpose(-2, -3).flatten(-2)[..., : -(-in_dim // form.block)].contiguous()
    return rows.view(part.dtype)


def _check_powers(scales: Tensor) -> None:
    """Refuse scales of 4-bit values that are too large to lift a value, and NaN."""
    if bool((scales > _MOST_POWER).any()):
        raise QuantisedWeightError(
            "MXFP4 weights have a scale above 2^17, or NaN, which the GPU kernels do not support"
        )


def _share(scales_NB: Tensor, rows: int) -> bool:
    """Return whether each group of rows has the scales of its first row."""
    firsts = scales_NB[::rows].repeat_interleave(rows, 0)[: len(scales_NB)]
    return torch.equal(firsts, scales_NB)


def codes_per_word(form: DeviceFormat, in_dim: int) -> int:
    """Return how many codes a kernel decodes at once, as a 32-bit word; 1 if it reads them one byte at a time."""
    if form.kind in ("e2m1", "int4"):
        return FOUR_BIT_WORD if in_dim % _GROUP == 0 else 1
    return 4 if form.kind == "e4m3" and in_dim % 4 == 0 else 1
