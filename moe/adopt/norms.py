"""The one-pass kernel for RMSNorm modules.

A module counts as an RMSNorm if it has one weight vector, an epsilon and "RMSNorm" in its class name. A trial on some rows
then decides, also whether 1 is added to the weight. Families with other norms (in groups) keep their own.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe.adopt.adopt import Candidate, SampleRows

_ROWS = 4
# Largest effect of one rounding to the type, if equal sums are added in another order.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class Norms:
    """Proposes a device's kernel for RMSNorm modules."""

    def __init__(self, launch: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        """`launch` runs the kernel: takes rows [T, D], weight [D] and epsilon, returns normed rows."""
        self._launch = launch

    def __call__(self, module: Any, rows: SampleRows) -> Iterator[Candidate]:
        """Propose the kernel with the module's weight, and with 1 added to it."""
        eps = epsilon(module)
        if eps is None:
            return

        for weight in (module.weight, 1.0 + module.weight):  # not the module, which will own the function
            forward = _forward(self._launch, weight, eps)
            yield Candidate(
                own=module.forward,
                ours=forward,
                arguments=lambda: (rows.draw(_ROWS, len(module.weight), spread=3.0),),
                tolerance=_TOLERANCE[rows.dtype],
                install=partial(_install, module, forward, weight),
            )


def weight_of(module: Any) -> Tensor:
    """Return the weight that an adopted norm multiplies with."""
    weight: Tensor = module.multiplied
    return weight


def _forward(
    launch: Callable[[Tensor, Tensor, float], Tensor], weight: Tensor, eps: float
) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        rows_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        return launch(rows_TD.contiguous(), weight, eps).view(hidden_states.shape)

    return forward


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
