# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What the two halves of an expert's first product become, in registers: each gate that a family of models has.

All of them are `up * gate * sigmoid(something of gate)`, GELU's exact form aside.
"""

import triton
import triton.language as tl

GATES = {"none": 0, "silu": 1, "swiglu_oai": 2, "gelu": 3, "gelu_tanh": 4}
_OAI_LIMIT, _OAI_ALPHA = tl.constexpr(7.0), tl.constexpr(1.702)  # gpt-oss
_TANH_OUTER, _TANH_INNER = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)  # 2 * sqrt(2 / pi)
_SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def gated(gate, up, GATE: tl.constexpr):
    """Apply a gate of `GATES` to float32 tiles."""
    if GATE == 2:
        gate = tl.minimum(gate, _OAI_LIMIT)
        up = tl.minimum(tl.maximum(up, -_OAI_LIMIT), _OAI_LIMIT)
        return (up + 1) * gate / (1 + tl.exp(-_OAI_ALPHA * gate))
    elif GATE == 3:
        return up * gate * 0.5 * (1 + tl.erf(gate * _SQRT_HALF))
    elif GATE == 4:
        return up * gate / (1 + tl.exp(-_TANH_OUTER * (gate + _TANH_INNER * gate * gate * gate)))
    else:
        return up * gate / (1 + tl.exp(-gate))
