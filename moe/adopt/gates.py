"""Which of the grouped kernel's gates a family's experts use, found by trying: the kernel fuses it if it knows it.

An experts module's own `_apply_gate` is asked about a few rows and compared with every gate that the kernel has, with
gate and up one after the other, or in turn (gpt-oss). A gate that none of them equals stays the module's: correct, one
launch more. Rejected: a list of families, and of activation classes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROWS, _COLUMNS = 16, 32
_TOLERANCE = 1e-6
_OAI_LIMIT, _OAI_ALPHA = 7.0, 1.702  # gpt-oss; the kernel has them as constants


class Gate(NamedTuple):
    """How the first of an expert's two products ends."""

    name: str  # of `grouped.GATES`; "none": the module applies its own to the kernel's result
    is_interleaved: bool = (
        False  # gate and up alternate in the checkpoint; the kernel wants them one after the other
    )


def silu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return torch.nn.functional.silu(gate) * up


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """Return gpt-oss' clamped gate."""
    gate, up = gate.clamp(max=_OAI_LIMIT), up.clamp(-_OAI_LIMIT, _OAI_LIMIT)
    return (up + 1) * gate * torch.sigmoid(gate * _OAI_ALPHA)


def gelu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up."""
    return torch.nn.functional.gelu(gate) * up


def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """Return the same with tanh's approximation."""
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


KNOWN = {"silu": silu, "swiglu_oai": swiglu_oai, "gelu": gelu, "gelu_tanh": gelu_tanh}


@torch.no_grad()
def gate_of(module: Any) -> Gate:
    """Find the gate of an experts module; its weights are not looked at."""
    if not module.has_gate:
        return Gate("none")
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(_ROWS, 2 * _COLUMNS, generator=generator) * 6  # beyond the limit too
    wanted = module._apply_gate(both)
    for is_interleaved in (False, True):
        gate, up = (both[:, ::2], both[:, 1::2]) if is_interleaved else both.chunk(2, dim=-1)
        for name, known in KNOWN.items():
            if torch.allclose(known(gate, up), wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
                return Gate(name, is_interleaved)
    return Gate("none")


def arranged(rows_NX: Tensor, gate: Gate) -> Tensor:
    """Put the rows of a weight or bias in the kernel's order: the gate's first, then up's."""
    if gate.name == "none" or not gate.is_interleaved:
        return rows_NX
    return torch.cat((rows_NX[::2], rows_NX[1::2]))


def apply(module: Any, raised_PN: Tensor) -> Tensor:
    """Apply a gate that the kernel lacks: [P, I]."""
    lowered: Tensor = (module._apply_gate if module.has_gate else module.act_fn)(raised_PN)
    return lowered.contiguous()
