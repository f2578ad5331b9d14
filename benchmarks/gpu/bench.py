"""Where kernels run in a day, and what a kernel with its inputs is: `Call`, made anew from a seed for every use.

Inputs are random, drawn on the device. In the interpreter float32 stands for bfloat16, which it multiplies wrongly.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.rows import Setting


class Bench(NamedTuple):
    """A device and the type that activations have there."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, setting: Setting) -> "Bench":
        """The day's device, opened."""
        if setting.is_interpreted:
            return cls(torch.device("cpu"), torch.float32)
        return cls(torch.device("cuda", 0), torch.bfloat16)

    def generator(self, seed: int) -> torch.Generator:
        """A generator of random numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, generator: torch.Generator, *shape: int, spread: float = 1.0) -> Tensor:
        """Draw activations or weights."""
        drawn = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return drawn if spread == 1.0 else drawn.mul_(spread)

    def integers(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Put numbers on the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A kernel and its inputs.

    Attributes:
        run: the kernel. prepare: puts back what a run changes in place, and spoils what it writes, before a run that is
            checked.
        result: what of a run's outcome is checked.
        oracle: the same in float32 and plain torch. control: the answer to another question, which the kernel's must
            not be near.
        num_bytes: that must move through memory at least. operations: of the matrix units.
        peers: others' kernels for the same inputs, by name.
    """

    run: Callable[[], Any]
    oracle: Callable[[], Tensor]
    control: Callable[[], Tensor]
    num_bytes: int
    operations: int = 0
    rate: str = "bf16_tflops"  # the ceiling that operations are held against
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    prepare: Callable[[], object] = bool  # nothing
    result: Callable[[Any], Tensor] = torch.Tensor.detach  # the outcome itself


MakeCall = Callable[[Bench, int], Call]  # from a seed


def bytes_of(*tensors: Tensor | None) -> int:
    """Bytes of whole tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def spoiling(out: Tensor) -> Callable[[], object]:
    """Return what fills a kernel's own memory with NaN, before a run that is checked."""
    return functools.partial(out.fill_, float("nan"))
