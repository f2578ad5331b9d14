"""Quantised checkpoints for tests of loading."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Blocks of DeepSeek's size: partial blocks in both directions, and blocks split when gate and up are merged.
UNEVEN = {"hidden_size": 192, "moe_intermediate_size": 160, "num_hidden_layers": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mxfp4": ("gpt_oss", {}),
    "fp8, latent attention and shared experts": (
        "deepseek_v3",
        {"block": (32, 32), "moe_intermediate_size": 48},
    ),
    "fp8, blocks of 128": ("qwen3_moe", {"block": (128, 128), **UNEVEN}),
}

MXFP4, FP8 = "mxfp4", "fp8, blocks of 128"


class Case(NamedTuple):
    """A quantised checkpoint on disk, and the oracle's logits of SEQUENCES."""

    directory: Path
    logits: list[np.ndarray]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor with movable elements: FP8 as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
