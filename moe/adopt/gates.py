"""Find by a trial which gate a family's experts use. The kernels fuse the gates that they have.

An experts module's own `_apply_gate` runs on a few rows and is compared with every gate of the kernels, with gate and
up in sequence or interleaved (gpt-oss). If no gate matches, the module's own code runs: correct, with one
more launch.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.adopt.adopt import Candidate, SampleRows, first_agreeing

_ROWS, _COLUMNS = 16, 32
_TOLERANCE = 1e-6
_OAI_LIMIT, _OAI_ALPHA = 7.0, 1.702  # gpt-oss; also constants of the kernel


class Gate(NamedTuple):
    """Gate after the first of an expert's two products."""

    name: str  # of KNOWN; "none": the module applies its own gate to the kernel's result
    is_interleaved: bool = False  # gate and up alternate in the checkpoint; kernels take them in sequence


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
    """Return gelu(gate) * up with the tanh approximation."""
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


KNOWN = {"silu": silu, "swiglu_oai": swiglu_oai, "gelu": gelu, "gelu_tanh": gelu_tanh}


def gate_of(module: Any) -> Gate:
    """Return the gate of an experts module. Its weights are not used."""
    found: list[Gate] = []
    first = first_agreeing(_gates(module, found)) if module.has_gate else None
    if first is None:
        return Gate("none")
    first.install()
    return found[0]


def _gates(module: Any, found: list[Gate]) -> Iterator[Candidate]:
    """Propose all gates; an adopted one is appended to `found`."""
    rows = SampleRows(torch.float32, torch.device("cpu"))
    for gate in (Gate(name, is_interleaved) for is_interleaved in (False, True) for name in KNOWN):
        yield Candidate(
            own=module._apply_gate,
            ours=partial(_apply_known, gate),
            arguments=lambda: (rows.draw(_ROWS, 2 * _COLUMNS, spread=6.0),),  # some beyond the limit
            tolerance=_TOLERANCE,
            install=partial(found.append, gate),
        )


def _apply_known(gate: Gate, both: Tensor) -> Tensor:
    known: Callable[[Tensor, Tensor], Tensor] = KNOWN[gate.name]
    parts = (both[:, ::2], both[:, 1::2]) if gate.is_interleaved else both.chunk(2, dim=-1)
    return known(*parts)


def arranged(rows_NX: Tensor, gate: Gate) -> Tensor:
    """Put the rows of a weight or bias in the kernel's order: gate, then up."""
    if gate.name == "none" or not gate.is_interleaved:
        return rows_NX
    return torch.cat((rows_NX[::2], rows_NX[1::2]))


def apply(module: Any, raised_PN: Tensor) -> Tensor:
    """Apply a gate that the kernel lacks: [P, I]."""
    lowered: Tensor = (module._apply_gate if module.has_gate else module.act_fn)(raised_PN)
    return lowered.contiguous()
