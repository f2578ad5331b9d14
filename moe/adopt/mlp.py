"""Dense and shared experts on GPUs: gate and up as one product, the gate as one launch.

A module gets this if it has the three linear layers and a trial gives its own results. The trial's rows are small and large, so
that clamps show. Other activations keep the module's code.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe.adopt.adopt import Candidate, SampleRows, by_size, draw_spread
from moe.adopt.products import Products
from moe.adopt.rotary import forward_of

_NAMES = ("gate_proj", "up_proj", "down_proj")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}  # of a row's largest value


class GatedMlps:
    """Proposes a device's kernel for gated MLPs."""

    def __init__(self, launch: Callable[[Tensor, Tensor], Tensor]) -> None:
        """`launch` takes gate and up [T, I], with or without gaps between rows, and returns the gated rows."""
        self._launch = launch

    def __call__(self, module: Any, rows: SampleRows) -> Iterator[Candidate]:
        """Propose the kernel for a module with three linear layers and no other parameters."""
        own = forward_of(module)
        layers: list[Any] = [getattr(module, name, None) for name in _NAMES]
        if own is None or len(inspect.signature(own).parameters) != 2:
            return
        if not all(isinstance(layer, nn.Linear) for layer in layers) or dict(
            module.named_parameters(recurse=False)
        ):
            return
        gate, up, down = layers
        if gate.out_features != up.out_features or down.in_features != up.out_features:
            return
        products = Products([gate, up])
        forward = partial(_forward, self._launch, products, down)

        def install() -> None:
            products.pack()
            module.forward = forward

        yield Candidate(
            own=partial(_result, module.forward),
            ours=partial(_result, forward),
            arguments=lambda: (draw_spread(rows, products.in_features),),
            tolerance=_TOLERANCE[rows.dtype],
            install=install,
        )


def _forward(
    launch: Callable[[Tensor, Tensor], Tensor], products: Products, down: nn.Module, x: Tensor
) -> Tensor:
    gate, up = (part.reshape(-1, part.shape[-1]) for part in products(x))
    out: Tensor = down(launch(gate, up).view(*x.shape[:-1], -1))
    return out


def _result(forward: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    return by_size([forward(x)])
