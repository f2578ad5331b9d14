"""A checkpoint without files, with quantised weights: codes are drawn by name, and scales fit them.

For measuring gpt-oss in MXFP4 and DeepSeek-V3 in FP8 without their files. Weights have the spread of `random_checkpoint`, under
the names that those models publish: `W_blocks` and `W_scales` of experts for MXFP4, `W` and `W_scale_inv` for FP8 in blocks.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.load.quantisation import Quantisation, UnservedQuantisationError
from moe.load.random_checkpoint import ROUTER_NAME, RandomCheckpoint, spread

_E2M1_SPREAD = math.sqrt(
    sum(value * value for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8
)  # of codes drawn evenly
_E4M3_SPREAD = 64.0
_E8M0_ONE = 127  # the code of a scale of 1
_SAFETENSORS_NAMES = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}


class _Part(NamedTuple):
    """A stored tensor of a quantised weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float | None  # value of all its elements; None for codes


class RandomQuantised(RandomCheckpoint):
    """A `RandomCheckpoint` with quantised weights."""

    def __init__(
        self,
        directory: Path,
        model: PreTrainedModel,
        quantisation: Quantisation,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        """Record names and shapes. See `RandomCheckpoint` for the arguments.

        Raises:
            UnservedQuantisationError: The format is neither MXFP4 nor FP8 in blocks.
        """
        super().__init__(directory, model, device=device, dtype=dtype, seed=seed)
        form = quantisation.formats[0]
        is_mxfp4 = form.name == "mxfp4"
        if not (is_mxfp4 or (form.name == "fp8" and form.block > 0)):
            raise UnservedQuantisationError(
                f"random weights can be mxfp4 or fp8 in blocks; this configuration is {quantisation.names}"
            )
        self._parts: dict[str, _Part] = {}
        for name, shape in [*self._shapes.items()]:
            if quantisation.leaves_plain(name.removesuffix(".weight")):
                continue
            size = spread(name, self._fan_in[name])
            if is_mxfp4 and self._is_fused(name):
                del self._shapes[name]
                self._add_mxfp4(name, shape, form.block, size)
            elif not is_mxfp4 and (self._is_fused(name) or _is_linear(name, shape)):
                self._add_fp8(name, shape, (form.block_rows, form.block), size)

    def dtype(self, name: str) -> str:
        return _SAFETENSORS_NAMES[self._parts[name].dtype] if name in self._parts else super().dtype(name)

    def _is_fused(self, name: str) -> bool:
        return name in self._of_experts and len(self._shapes[name]) == 3

    def _add_mxfp4(self, name: str, shape: tuple[int, ...], block: int, size: float) -> None:
        """Replace experts [E, K, N] by codes [E, N, K / block, block / 2] and scales [E, N, K / block]."""
        E, K, N = shape
        scale = _E8M0_ONE + round(math.log2(size / _E2M1_SPREAD))
        self._store(f"{name}_blocks", _Part((E, N, K // block, block // 2), torch.uint8, None))
        self._store(f"{name}_scales", _Part((E, N, K // block), torch.uint8, scale))

    def _add_fp8(self, name: str, shape: tuple[int, ...], block: tuple[int, int], size: float) -> None:
        """Store a weight [..., N, K] as e4m3, with a float32 scale for each block."""
        *lead, N, K = shape
        scales = (*lead, -(-N // block[0]), -(-K // block[1]))
        self._store(name, _Part(shape, torch.float8_e4m3fn, None))
        self._store(f"{name}_scale_inv", _Part(scales, torch.float32, size / _E4M3_SPREAD))

    def _store(self, name: str, part: _Part) -> None:
        self._parts[name], self._shapes[name] = part, part.shape
        if len(part.shape) > 2:
            self._of_experts.add(name)

    def _draw(self, name: str, shape: tuple[int, ...], *, row: int) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            return super()._draw(name, shape, row=row)
        if part.scale is not None:
            return torch.full(shape, part.scale, dtype=part.dtype, device=self._device)
        generator = self._generator(name, row)
        if part.dtype == torch.uint8:
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device=self._device)
        drawn = torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
        return drawn.mul_(_E4M3_SPREAD).clamp_(-448.0, 448.0).to(part.dtype)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    is_other = "embed_tokens" in name or "lm_head" in name or ROUTER_NAME.search(name)
    return len(shape) == 2 and name.endswith(".weight") and not is_other
