"""The one-pass kernel for RMSNorm modules.

A module counts as an RMSNorm if it has one weight vector, an epsilon and "RMSNorm" in its class name. A trial on some rows
then decides, also whether 1 is added to the weight. Families with other norms (in groups) keep their own.
A norm of the residual stream computes the stream's pending sum in the same launch, if the device has a kernel for that.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe.adopt.adopt import Candidate, SampleRows
from moe.adopt.stream import Stream

Launch = Callable[[Tensor, Tensor, float], Tensor]
SumLaunch = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

_ROWS = 4
# Largest effect of one rounding to the type, if equal sums are added in another order.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class Norms:
    """Proposes a device's kernel for RMSNorm modules."""

    def __init__(self, launch: Launch, launch_sum: SumLaunch | None = None) -> None:
        """Set the kernels.

        Args:
            launch: Takes rows [T, D], weight [D] and epsilon; returns normed rows. With `launch_sum`, rows may have gaps
                between them. Otherwise they are contiguous.
            launch_sum: Takes rows, rows to add to them, weight and epsilon; returns the sums and the normed sums.
        """
        self._launch, self._launch_sum = launch, launch_sum

    def __call__(self, module: Any, rows: SampleRows) -> Iterator[Candidate]:
        """Propose the kernel with the module's weight, and with 1 added to it."""
        eps = epsilon(module)
        if eps is None:
            return

        def draw() -> tuple[Tensor, Tensor]:
            dim = len(module.weight)
            return rows.draw(1, _ROWS, dim, spread=3.0), rows.draw(1, _ROWS, dim, seed=1, spread=3.0)

        own = module.forward
        for weight in (module.weight, 1.0 + module.weight):  # not the module, which will own the function
            forward = self._forward(weight, eps)
            yield Candidate(
                own=partial(_of_both, own),
                ours=partial(_of_both, forward),
                arguments=draw,
                tolerance=_TOLERANCE[rows.dtype],
                install=partial(_install, module, forward, weight),
            )

    def _forward(self, weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
        launch, launch_sum = self._launch, self._launch_sum

        def forward(hidden_states: Tensor) -> Tensor:
            shape = hidden_states.shape
            if launch_sum is None:
                return launch(_rows(hidden_states).contiguous(), weight, eps).view(shape)
            if not isinstance(hidden_states, Stream):
                return launch(_rows(hidden_states), weight, eps).view(shape)
            if hidden_states.added is None:
                return launch(_rows(hidden_states.base), weight, eps).view(shape)
            total, normed = launch_sum(_rows(hidden_states.base), _rows(hidden_states.added), weight, eps)
            hidden_states.settle(total.view(shape))
            return normed.view(shape)

        return forward


def _of_both(forward: Callable[[Tensor], Tensor], one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """Norm rows, and their sum with others: [1, T, D]. Return both, and the sum."""
    stream = Stream(one, other)
    normed = forward(stream)
    return forward(one), normed, stream.plain()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def weight_of(module: Any) -> Tensor:
    """Return the weight that an adopted norm multiplies with."""
    weight: Tensor = module.multiplied
    return weight


def _install(module: Any, forward: Callable[[Tensor], Tensor], weight: Tensor) -> None:
    module.forward = forward
    object.__setattr__(module, "multiplied", weight.detach())  # not as a parameter of the module


def epsilon(module: Any) -> float | None:
    """Return the epsilon of a module that looks like an RMSNorm, otherwise None."""
    parameters = dict(module.named_parameters(recurse=False))
    if "RMSNorm" not in type(module).__name__ or set(parameters) != {"weight"}:
        return None
    if parameters["weight"].dim() != 1:
        return None
    found = [getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)]
    return float(found[0]) if found else None
