"""Tensors of a quantised weight in a checkpoint: their names, the layout of codes, and conversion to rows of bytes.

A tensor's name gives its part of a weight: codes, scales or zeros; factor or divisor (second scales); order (the
block of every input); shape. Codes that have the weight's own name (`W` of FP8, next to `W_scale_inv`) have no such name.

Every layout yields [..., N, K] bytes, or [..., N, K / 2] of two codes, the even input in the lower half, and zeros [N, B].
compressed-tensors, AWQ and GPTQ pack eight codes of four bits into an int32, the first in the lowest bits. AWQ packs
outputs into a word, in an order specific to AWQ. Files are little-endian, as safetensors are.

Legend: N output features, K input features, B blocks of K.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe.load.quantised_weight import Kind, int4_codes

Shape = tuple[int, ...]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each half byte of a word, from the lowest


class CodeLayout(NamedTuple):
    """A way to store codes in a tensor."""

    dtype: str  # as safetensors names it
    kind: Kind
    shape: Callable[[Shape], Shape]  # from the tensor's shape to the weight's
    codes: Callable[[Tensor], Tensor]  # bytes of rows
    zeros: Callable[[Tensor], Tensor] | None = None  # [N, B], as stored
    is_turned: bool = False  # scales are [B, N]


def _bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def _signed(codes: Tensor) -> Tensor:
    """Convert bytes that are stored with an offset of 128."""
    return _bytes(codes) ^ 0x80


def _over_outputs(words: Tensor) -> Tensor:
    """Unpack words [N / 8, B] of eight outputs each: [N, B]."""
    return int4_codes(_bytes(words[..., None].contiguous())).transpose(-1, -2).flatten(0, 1)


def _words_of_columns(words: Tensor) -> Tensor:
    """Unpack words [n, N / 8] of eight ordered outputs each: [n, N] bytes."""
    return int4_codes(_bytes(words.contiguous()))


def _in_order(words: Tensor) -> Tensor:
    """Put the half bytes of AWQ's words in order."""
    ordered = torch.zeros_like(words)
    for place, output in enumerate(AWQ_ORDER):
        ordered |= (words >> (4 * place) & 15) << (4 * output)
    return ordered


def _rows_of_columns(columns: Tensor) -> Tensor:
    """Convert bytes [K, N / 2] of two outputs to [N, K / 2] of two inputs."""
    even, odd = columns[::2], columns[1::2]
    halves = (even & 15 | odd << 4, even >> 4 | odd & 0xF0)
    return torch.stack(halves, dim=-1).flatten(1).T.contiguous()


def _gptq(words: Tensor) -> Tensor:
    """Convert words [K / 8, N] of eight inputs, or [K / 4, N] of four, to [N, bytes]."""
    return _bytes(words[..., None].contiguous()).transpose(0, 1).flatten(1)


def _same(shape: Shape) -> Shape:
    return shape


def _times(factor: int) -> Callable[[Shape], Shape]:
    return lambda shape: (*shape[:-1], shape[-1] * factor)


BYTES = CodeLayout("F8_E4M3", "e4m3", _same, _bytes)
INTEGERS = CodeLayout("I8", "int8", _same, _bytes)
PAIRS = CodeLayout("U8", "e2m1", _times(2), _bytes)
SIGNED_PAIRS = PAIRS._replace(dtype="I8")  # DeepSeek-V4
WORDS = CodeLayout("I32", "int4", _times(8), _bytes, _over_outputs)
WORDS_OF_BYTES = CodeLayout("I32", "int8", _times(4), _signed)
AWQ = CodeLayout(
    "I32", "int4", lambda shape: (shape[1] * 8, shape[0]), lambda words: _rows_of_columns(_bytes(_in_order(words))),
    lambda words: _words_of_columns(_in_order(words)).T.contiguous(), is_turned=True,
)  # fmt: skip
GPTQ = CodeLayout(
    "I32", "int4", lambda shape: (shape[1], shape[0] * 8), _gptq, lambda words: _words_of_columns(words).T.contiguous(),
    is_turned=True,
)  # fmt: skip
GPTQ_BYTES = CodeLayout(
    "I32", "int8", lambda shape: (shape[1], shape[0] * 4), lambda words: _gptq(words) ^ 0x80,
    lambda words: _bytes(words.contiguous()).T.contiguous(), is_turned=True,
)  # fmt: skip


def _turned(layout: CodeLayout) -> CodeLayout:
    """Return the layout for weights stored as [..., K, N], with codes of four bits in pairs over K."""
    return CodeLayout(
        layout.dtype,
        layout.kind,
        lambda shape: layout.shape((*shape[:-2], shape[-1], shape[-2])),
        lambda codes: layout.codes(codes.view(torch.uint8).transpose(-1, -2).contiguous()),
        is_turned=True,
    )


TURNED = {layout: _turned(layout) for layout in (BYTES, INTEGERS, PAIRS)}
# gpt-oss: [E, N, blocks, 16].
BLOCKS = CodeLayout(
    "U8", "e2m1", lambda shape: (*shape[:-2], shape[-2] * shape[-1] * 2), lambda codes: codes.flatten(-2)
)

# Part by the end of a name; of fused experts also after "gate_up_proj_" and the like.
_PARTS = {
    "weight_packed": "codes",
    "weight_scale_inv": "scales",
    "weight_scale": "scales",
    "weight_scale_2": "factor",
    "weight_global_scale": "divisor",
    "weight_zero_point": "zeros",
    "weight_g_idx": "order",
    "weight_shape": "shape",
}
_AUTO_PARTS = {"qweight": "codes", "qzeros": "zeros", "scales": "scales", "g_idx": "order"}  # AWQ and GPTQ
_FP8_PARTS = {"scale": "scales", "qscale_weight": "scales"}  # DeepSeek-V4 and Mistral Large 4
# Scales of activations, keys and values, which are not quantised here.
UNREAD = (
    ".input_scale", ".input_scale_ub", ".input_global_scale", ".input_zero_point", ".activation_scale", ".output_scale", ".qscale_act",
    ".k_scale", ".v_scale", ".kv_scale", ".q_scale", "_input_scale", "_activation_scale",
)  # fmt: skip


def part_of(name: str, method: str, is_small: Callable[[str], bool]) -> tuple[str, str]:
    """Return the weight and the part that a tensor belongs to; the part is "" if the tensor is itself a weight.

    Args:
        method: quant_method of the configuration.
        is_small: Whether a tensor of this name exists with a type of eight bits or less.
    """
    base, _, end = name.rpartition(".")
    if method == "mxfp4":
        for suffix, part in (("_blocks", "codes"), ("_scales", "scales")):
            if name.endswith(suffix):
                return name.removesuffix(suffix), part
        return name, ""
    if method in ("awq", "gptq"):
        return (f"{base}.weight", _AUTO_PARTS[end]) if end in _AUTO_PARTS else (name, "")
    if end in _PARTS:
        return f"{base}.weight", _PARTS[end]
    if method in ("fp8", "mxfp8") and end in _FP8_PARTS and is_small(f"{base}.weight"):
        return f"{base}.weight", _FP8_PARTS[end]
    if end.endswith("_scale_inv"):
        return name.removesuffix("_scale_inv"), "scales"
    for suffix, part in _PARTS.items():
        if end.endswith(f"_{suffix}"):
            return name.removesuffix(f"_{suffix}"), part
    return name, ""
