"""Cases of grouped products and their expected results: one slot at a time in float64, with weights decoded from their formats.

Rows are float16 or float32: the interpreter multiplies and rounds bfloat16 incorrectly.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

BF16, F32, F16, E4M3, U8 = (
    torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.uint8,
)  # fmt: skip
TOLERANCE = {F32: 1e-4, F16: 4e-3}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


class Form(NamedTuple):
    """How weights are quantised."""

    kind: str
    scales: torch.dtype  # uint8: powers of two
    block: int  # inputs per scale; 0: all
    rows: int = 1  # outputs per scale
    has_zeros: bool = False
    has_row_scales: bool = False


FORMS = {
    "fp8": Form("e4m3", F32, 128, 128),
    "fp8, 64 x 32": Form("e4m3", F32, 32, 64),
    "fp8, rows": Form("e4m3", BF16, 0),
    "mxfp8": Form("e4m3", U8, 32),
    "mxfp4": Form("e2m1", U8, 32),
    "nvfp4": Form("e2m1", E4M3, 16, has_row_scales=True),
    "int4, 32": Form("int4", BF16, 32),
    "int4, 64, zeros": Form("int4", F16, 64, has_zeros=True),
    "int4, 128": Form("int4", F32, 128),
    "int4, 128, zeros": Form("int4", F16, 128, has_zeros=True),
    "int4, rows": Form("int4", BF16, 0),
    "int4, rows, zeros": Form("int4", F16, 0, has_zeros=True),
    "int8, rows": Form("int8", F32, 0),
    "int8, 32": Form("int8", BF16, 32),
}
_SPREAD = {"e4m3": 1.0, "e2m1": 2.7, "int4": 4.6, "int8": 73.0}  # of drawn values


class Case(NamedTuple):
    """One launch: rows per slot, and the kind of weights."""

    counts: list[int]
    N: int
    K: int
    gate: str = "none"
    dtype: torch.dtype = F32
    weights: str = "plain"  # or a name in FORMS
    has_bias: bool = False


class Weights(NamedTuple):
    """Weights as the kernel takes them, by its field names, and their decoded values in float64."""

    stored: dict[str, Tensor]
    form: tuple[str, str, int, int] | None
    wide: Tensor


def make_weights(places: int, height: int, case: Case) -> Weights:
    """Draw weights in a format, near 1 / sqrt(K)."""
    K = case.K
    if case.weights == "plain":
        codes = (torch.randn(places, height, K) / K**0.5).to(case.dtype)
        return Weights({"codes": codes}, None, codes.double())
    kind, scale_type, block, rows, has_zeros, has_row_scales = FORMS[case.weights]
    block = block or K
    size, per_block = K**-0.5 / _SPREAD[kind], (places, height, -(-K // block))
    stored = {"codes": draw_codes(kind, places, height, K)}
    stored["zeros"] = torch.randint(0, 16, per_block, dtype=U8)
    stored["row_scales"] = (0.5 + torch.rand(places, height)) * size
    per_scale = (places, -(-height // rows), per_block[2])
    if scale_type == U8:
        middle = 127 + round(torch.tensor(size).log2().item())
        stored["scales"] = torch.randint(middle - 1, middle + 2, per_scale, dtype=U8)
    else:
        stored["scales"] = ((0.5 + torch.rand(per_scale)) * (1.0 if has_row_scales else size)).to(scale_type)
    left_out = {"zeros": not has_zeros, "row_scales": not has_row_scales}
    stored = {name: part for name, part in stored.items() if not left_out.get(name, False)}
    scale = {U8: "e8m0", E4M3: "e4m3"}.get(scale_type, "float")
    return Weights(stored, (kind, scale, block, rows), widen(stored, kind, block, rows))


def draw_codes(kind: str, places: int, height: int, K: int) -> Tensor:
    """Draw codes of a kind."""
    if kind == "e4m3":
        codes = torch.randn(places, height, K).to(E4M3)
        codes.view(U8)[..., :16] = torch.arange(16, dtype=U8) // 2 + torch.tensor([0, 128], dtype=U8).repeat(
            8
        )
        return codes  # starts with zeros and all subnormals
    if kind == "int8":
        return torch.randint(-128, 128, (places, height, K), dtype=torch.int8)
    return torch.randint(0, 256, (places, height, K // 2), dtype=U8)


def widen(stored: dict[str, Tensor], kind: str, block: int, rows: int) -> Tensor:
    """Decode with tables, all in float64."""
    codes = stored["codes"]
    if kind in ("e2m1", "int4"):
        codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    values = E2M1[codes.long()] if kind == "e2m1" else codes.double()
    _, height, K = values.shape
    if kind == "int4":
        zeros = stored.get("zeros", torch.tensor([[[8]]]).expand(len(codes), height, -(-K // block)))
        values = values - zeros.double().repeat_interleave(block, 2)[..., :K]
    scales = stored["scales"]
    wide = torch.exp2(scales.double() - 127) if scales.dtype == U8 else scales.double()
    values = values * wide.repeat_interleave(rows, 1).repeat_interleave(block, 2)[:, :height, :K]
    return values * stored["row_scales"].double()[..., None] if "row_scales" in stored else values


def placed(form: Any, codes: Tensor, **parts: Tensor) -> Any:
    """Return weights in a checkpoint's order as a store has them."""
    from moe.gpu.weights.formats import PlacedWeights, ordered  # noqa: PLC0415 - in the interpreter

    return PlacedWeights.of(ordered({"": codes, **parts}, form), form)


def gated(x_PN: Tensor, gate: str) -> Tensor:
    """Apply a gate as its paper defines it."""
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
    """A case with its data: slots out of order in a larger store, and a row map with repeats."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        slots, height = len(case.counts), case.N if case.gate == "none" else 2 * case.N
        self.case = case
        self.offsets = torch.tensor([0, *torch.tensor(case.counts).cumsum(0).tolist()])
        self.num_pairs = int(self.offsets[-1])
        self.places = torch.randperm(slots + 2)[:slots].int()
        self.weights = make_weights(slots + 2, height, case)
        self.biases = torch.randn(slots + 2, height) if case.has_bias else None
        self.x: Tensor = torch.randn(max(1, self.num_pairs // 2 + 1), case.K).to(case.dtype)
        wide = self.x.double()
        self.rows = torch.randint(0, len(self.x), (self.num_pairs,))
        self._wide_PK = wide[self.rows]

    def want(self) -> Tensor:
        """Return the expected result in float64."""
        parts = []
        for slot, place in enumerate(self.places.tolist()):
            x = self._wide_PK[self.offsets[slot] : self.offsets[slot + 1]]
            part = x @ self.weights.wide[place].T
            bias = 0 if self.biases is None else self.biases[place].double()
            parts.append(gated(part + bias, self.case.gate))
        return torch.cat(parts)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `grouped_linear`."""
        from moe.gpu.weights.formats import PLAIN, DeviceFormat  # noqa: PLC0415 - in the interpreter

        form = PLAIN if self.weights.form is None else DeviceFormat(*self.weights.form)
        return {
            "weights": placed(form, **self.weights.stored),
            "slot_offsets": self.offsets,
            "places_S": self.places,
            "gate": self.case.gate,
            "biases_WN": self.biases,
        }

    def spoil(self) -> None:
        """Multiply a scale of the last slot with rows by eight."""
        slot = max(slot for slot, count in enumerate(self.case.counts) if count)
        scales = self.weights.stored["scales"]
        at = (int(self.places[slot]), 0, 0)
        scales[at] = (scales[at].float() * 8 if scales.dtype != U8 else scales[at] + 3).to(scales.dtype)
