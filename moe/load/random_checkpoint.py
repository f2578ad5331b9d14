"""A checkpoint without files: a model's own tensors, drawn by name from a seed whenever they are read.

For measuring models with weights that are not available or do not fit on the disk: speed does not depend on values,
if they resemble weights. Their spread keeps activations at the same size through the layers, makes routers decisive
and gives logits a clear maximum. With a usual initialisation (0.02) the softmax is nearly flat.
A row is drawn independently, so its values do not depend on which other rows a rank reads. Tensors are drawn on the
device that uses them, and are equal only on devices of one kind.
"""

import math
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.load.checkpoint import Checkpoint

LOGIT_SPREAD, ROUTER_SPREAD = 4.0, 2.0  # standard deviations of their outputs, for inputs of size 1
_BIAS_SPREAD = 0.1
ROUTER_NAME = re.compile(r"\.(gate|router)\.weight$")
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class RandomCheckpoint(Checkpoint):
    """A `Checkpoint` with the names and shapes of a model on the meta device."""

    def __init__(
        self,
        directory: Path,
        model: PreTrainedModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        """Record names and shapes.

        Args:
            directory: Directory of the configuration, for messages.
            model: Model to copy names from; not kept.
            device: Device on which tensors are drawn.
            dtype: Type of the tensors, bfloat16 or float32.
        """
        self.directory, self.bytes_read = directory, 0
        self._shards = {}
        self._device, self._dtype, self._seed = device, dtype, seed
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        self._fan_in = {name: _fan_in(model, name, shape) for name, shape in self._shapes.items()}
        self._of_experts = {name for name in state if hasattr(_owner(model, name), "is_transposed")}

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        return _SAFETENSORS_NAMES[self._dtype]

    def read(self, name: str) -> Tensor:
        """Draw a whole tensor. Experts' tensors, including biases, are drawn row by row."""
        shape = self._shapes[name]
        if name not in self._of_experts:
            return self._counted(self._draw(name, shape, row=0))
        return torch.cat([self.read_row(name, row) for row in range(shape[0])])

    def read_row(self, name: str, row: int) -> Tensor:
        return self._counted(self._draw(name, (1, *self._shapes[name][1:]), row=row))

    def _draw(self, name: str, shape: tuple[int, ...], *, row: int) -> Tensor:
        if name.endswith("norm.weight") or (name.endswith("weight") and len(shape) == 1):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = self._generator(name, row)
        drawn = torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
        return drawn.mul_(spread(name, self._fan_in[name]))

    def _generator(self, name: str, row: int) -> torch.Generator:
        seed = zlib.crc32(f"{self._seed} {name} {row}".encode())
        return torch.Generator(self._device).manual_seed(seed)


def spread(name: str, fan_in: int) -> float:
    """Return a tensor's standard deviation that gives outputs the intended size for inputs of size 1."""
    if "embed_tokens" in name:
        return 1.0
    if not name.endswith(("weight", "_proj")):
        return _BIAS_SPREAD
    wanted = LOGIT_SPREAD if "lm_head" in name else ROUTER_SPREAD if ROUTER_NAME.search(name) else 1.0
    return wanted / math.sqrt(fan_in)


def _fan_in(model: Any, name: str, shape: tuple[int, ...]) -> int:
    """Return how many inputs each output of this tensor sums."""
    is_transposed = getattr(_owner(model, name), "is_transposed", False)
    return shape[-2] if len(shape) == 3 and is_transposed else shape[-1]


def _owner(model: Any, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])
