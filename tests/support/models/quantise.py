"""Quantised checkpoints in tests: the weights of a float checkpoint as FP8 or MXFP4 files store them, and their decoded values.

Written from the formats' descriptions; shares no code with the product. The oracle is `transformers` on the decoded
weights in float32.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.models.families import make_model

Tensors = dict[str, Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8_KEPT = ("lm_head", "gate", "embed_tokens")  # modules that stay float in DeepSeek's and Qwen's files


class Quantised(NamedTuple):
    """One weight: the tensors of the file, by suffix of the name, and the values they encode."""

    stored: Tensors
    meaning: Tensor


def quantise_fp8(weight_NK: Tensor, block: tuple[int, int]) -> Quantised:
    """Scale each block so that its largest weight becomes 448, the maximum of e4m3."""
    n, k = weight_NK.shape
    rows, columns = -(-n // block[0]), -(-k // block[1])
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[:n, :k] = weight_NK
    blocks = padded.view(rows, block[0], columns, block[1])
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-8) / 448.0
    wide = scales[:, None, :, None]
    codes = (blocks / wide).to(torch.float8_e4m3fn)
    meaning = (codes.float() * wide).view_as(padded)[:n, :k].contiguous()
    flat = codes.view(padded.shape)[:n, :k].contiguous()
    return Quantised({"": flat, "_scale_inv": scales}, meaning)


def quantise_mxfp4(weight_EKN: Tensor) -> Quantised:
    """Encode as gpt-oss does: blocks of 32 inputs, scales that are powers of two, even inputs in the lower half byte."""
    experts, k, n = weight_EKN.shape
    blocks = weight_EKN.transpose(1, 2).reshape(experts, n, k // 32, 32)
    exponent = blocks.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    wide = exponent.exp2()[..., None]
    code = ((blocks / wide).abs()[..., None] - E2M1).abs().argmin(-1)
    code = (code + 8 * (blocks < 0)).to(torch.uint8)
    values = torch.cat((E2M1, -E2M1))[code.long()] * wide
    packed = code[..., ::2] | (code[..., 1::2] << 4)
    meaning = values.reshape(experts, n, k).transpose(1, 2).contiguous()
    return Quantised({"_blocks": packed.contiguous(), "_scales": (exponent + 127).to(torch.uint8)}, meaning)


def is_fp8(name: str, tensor: Tensor) -> bool:
    """Return whether an FP8 checkpoint stores a tensor as codes."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    return name.endswith(".weight") and tensor.dim() == 2 and module not in FP8_KEPT


def _is_mxfp4(name: str, tensor: Tensor) -> bool:
    return name.endswith(("gate_up_proj", "down_proj")) and tensor.dim() == 3


def write_quantised(
    family: str, directory: Path, *, block: tuple[int, int] | None = None, **settings: Any
) -> PreTrainedModel:
    """Write a family's checkpoint in FP8 with blocks of this size, or in MXFP4 if `block` is None.

    Returns:
        The oracle: eager, in float32, with the decoded weights.
    """
    make_model(family, **settings).save_pretrained(directory)
    file, meanings = directory / "model.safetensors", {}
    tensors: Tensors = {}
    for name, tensor in load_file(file).items():
        if (_is_mxfp4 if block is None else is_fp8)(name, tensor):
            made = quantise_mxfp4(tensor) if block is None else quantise_fp8(tensor, block)
            tensors |= {f"{name}{suffix}": part for suffix, part in made.stored.items()}
            meanings[name] = made.meaning
        else:
            tensors[name] = meanings[name] = tensor
    config = json.loads((directory / "config.json").read_text())
    save_file(meanings, file, {"format": "pt"})
    oracle: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()
    oracle.set_experts_implementation("eager")
    save_file(tensors, file, {"format": "pt"})
    config["quantization_config"] = fp8_config(block) if block else MXFP4_CONFIG
    (directory / "config.json").write_text(json.dumps(config))
    return oracle


def fp8_config(block: tuple[int, int] = (128, 128)) -> dict[str, Any]:
    """Return `quantization_config` as in Qwen's FP8 checkpoints. DeepSeek's lack the list of modules."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.*.mlp.gate"],
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }


MXFP4_CONFIG = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip


def change_file(directory: Path, change: Callable[[Tensors], None]) -> None:
    """Change the tensors of a single-file checkpoint in place."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
