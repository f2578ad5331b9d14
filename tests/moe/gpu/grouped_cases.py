"""Grouped products to try, and what they should give: one slot at a time in float64, weights decoded from their formats.

Rows are float16 or float32: the interpreter multiplies and rounds bfloat16 wrongly.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

F32, F16, FP8, MXFP4 = torch.float32, torch.float16, torch.float8_e4m3fn, torch.uint8
TOLERANCE = {F32: 1e-4, F16: 4e-3}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


class Case(NamedTuple):
    """One launch: rows per slot, and what the weights are."""

    counts: list[int]
    N: int
    K: int
    gate: str = "none"
    dtype: torch.dtype = F32
    weights: torch.dtype = F32
    has_bias: bool = False


class Weights(NamedTuple):
    """As the kernel takes them, and as they are meant, in float64."""

    stored: Tensor
    scales: Tensor | None
    wide: Tensor


def make_weights(places: int, height: int, K: int, dtype: torch.dtype) -> Weights:
    """Draw weights of a format, near 1 / sqrt(K)."""
    if dtype == MXFP4:
        stored = torch.randint(0, 256, (places, height, K // 2), dtype=torch.uint8)
        scales = torch.randint(120, 126, (places, height, K // 32), dtype=torch.uint8)
        return Weights(stored, scales, widen_mxfp4(stored, scales))
    stored = (torch.randn(places, height, K) / K**0.5).to(dtype)
    if dtype != FP8:
        return Weights(stored, None, stored.double())
    scales = 0.5 + torch.rand(places, -(-height // 128), -(-K // 128))
    whole = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return Weights(stored, scales, stored.double() * whole[:, :height, :K])


def widen_mxfp4(stored: Tensor, scales: Tensor) -> Tensor:
    """Decode by table: two values of a byte, the low half first, times the power of two of their 32."""
    codes = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(-2).long()
    powers = torch.exp2(scales.double() - 127)
    return E2M1[codes] * powers.repeat_interleave(32, -1)


def gated(x_PN: Tensor, gate: str) -> Tensor:
    """Apply a gate as its paper writes it."""
    if gate == "none":
        return x_PN
    left, right = x_PN.chunk(2, dim=1)
    if gate == "swiglu_oai":
        left, right = left.clamp(max=7.0), right.clamp(-7.0, 7.0)
        return (right + 1) * left * torch.sigmoid(1.702 * left)
    if gate == "silu":
        return torch.nn.functional.silu(left) * right
    return gelu(left, approximate="tanh" if gate == "gelu_tanh" else "none") * right


class Problem:
    """A case with its data: slots out of order among more weights than slots, rows by a map that repeats some."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        slots, height = len(case.counts), case.N if case.gate == "none" else 2 * case.N
        self.case = case
        self.offsets = torch.tensor([0, *torch.tensor(case.counts).cumsum(0).tolist()])
        self.num_pairs = int(self.offsets[-1])
        self.places = torch.randperm(slots + 2)[:slots].int()
        self.weights = make_weights(slots + 2, height, case.K, case.weights)
        self.biases = torch.randn(slots + 2, height) if case.has_bias else None
        self.x: Tensor = torch.randn(max(1, self.num_pairs // 2 + 1), case.K).to(case.dtype)
        wide = self.x.double()
        self.rows = torch.randint(0, len(self.x), (self.num_pairs,))
        self._wide_PK = wide[self.rows]

    def want(self) -> Tensor:
        """The answer, in float64."""
        parts = []
        for slot, place in enumerate(self.places.tolist()):
            x = self._wide_PK[self.offsets[slot] : self.offsets[slot + 1]]
            part = x @ self.weights.wide[place].T
            bias = 0 if self.biases is None else self.biases[place].double()
            parts.append(gated(part + bias, self.case.gate))
        return torch.cat(parts)

    def arguments(self) -> dict[str, Any]:
        """What `grouped_linear` is called with."""
        return {
            "weights_WNK": self.weights.stored,
            "slot_offsets": self.offsets,
            "places_S": self.places,
            "gate": self.case.gate,
            "scales_WBB": self.weights.scales,
            "biases_WN": self.biases,
        }
