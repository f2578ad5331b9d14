# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""silu(gate) * up of dense and shared experts on GPUs, in one launch (vLLM's silu_and_mul).

Rounds like `transformers`: silu to the rows' type, then the product.

Legend: T rows, I inner features.
"""

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


@triton.jit
def gate_rows(gate, up, out, gate_stride, up_stride, I: tl.constexpr, TILE: tl.constexpr):  # noqa: E741
    """Run as program (row, tile of its features)."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_in = place < I
    dtype = gate.dtype.element_ty
    wide = tl.load(gate + row * gate_stride + place, mask=is_in, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + place, mask=is_in, other=0.0).to(tl.float32)
    lowered = (wide * tl.sigmoid(wide)).to(dtype).to(tl.float32)
    tl.store(out + row * I + place, (lowered * factor).to(dtype), mask=is_in)


def silu_gate(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """Return silu(gate) * up: [T, I], contiguous. The last dims are contiguous; rows may have gaps between them."""
    T, inner = gate_TI.shape
    out = gate_TI.new_empty(T, inner)
    tile = min(_TILE, triton.next_power_of_2(inner))
    gate_rows[(T, triton.cdiv(inner, tile))](
        gate_TI, up_TI, out, gate_TI.stride(0), up_TI.stride(0), I=inner, TILE=tile, num_warps=4
    )
    return out
