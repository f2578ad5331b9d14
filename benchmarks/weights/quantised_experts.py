"""How long does an MoE layer take on a CPU in each checkpoint format for experts, compared with bfloat16?

Tokens choose experts at random. Their rows go through the experts' two products and the gate between them, as in a step on
one rank. Expected: at batch 1 memory is the bound, so one byte per weight takes half of bfloat16's time and half a byte a
quarter, unless decoding is slower; at batch 32 products are the bound, and decoding adds to them. Every format is checked
against its dequantised weights, bit for bit, before it is timed. Formats run in turn.

Run: `python -m benchmarks.weights.quantised_experts [--experts 64] [--hidden 2048] [--inner 768] [--top-k 8] [--runs 30] [--save]`.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.card import environment_card, print_card, print_tail, save_result
from dispatch.compiled.team import Team, program_of, run
from moe.cpu.weights.slots import PackedSlots
from moe.load.quantised_weight import E2M1, QuantisedWeight

BATCHES = (1, 8, 32)
LIMITS = {1: 1.0, 32: 1.2}  # of bfloat16's time by batch, for the formats in HELD_TO
HELD_TO = ("fp8, channels", "fp8, blocks", "int4, groups of 32", "nvfp4")


def fp8(weight_NK: Tensor, *, rows: int, block: int) -> QuantisedWeight:
    """Quantise with a float32 scale per block of rows and inputs."""
    n, k = weight_NK.shape
    scales = weight_NK.view(n // rows, rows, k // block, block).abs().amax((1, 3)) / 448
    wide = scales.repeat_interleave(rows, 0)
    codes = (weight_NK / wide.repeat_interleave(block, 1)).to(torch.float8_e4m3fn)
    return QuantisedWeight(codes=codes, kind="e4m3", scales=wide, block=block)


def int8(weight_NK: Tensor) -> QuantisedWeight:
    """Quantise with a bfloat16 scale per row."""
    scales = (weight_NK.abs().amax(-1, keepdim=True) / 127).bfloat16()
    codes = (weight_NK / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return QuantisedWeight(codes=codes, kind="int8", scales=scales, block=weight_NK.shape[1])


def int4(weight_NK: Tensor, *, block: int, has_zeros: bool = False) -> QuantisedWeight:
    """Quantise with a bfloat16 scale per group, around 8 or around zeros (which are 8 here)."""
    blocks = weight_NK.reshape(len(weight_NK), -1, block)
    scales = (blocks.abs().amax(-1) / 7.5).bfloat16()
    codes = ((blocks / scales.float()[..., None]).round() + 8).clamp(0, 15).to(torch.uint8).flatten(1)
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8) if has_zeros else None
    return QuantisedWeight(codes=_pairs(codes), kind="int4", scales=scales, block=block, zeros=zeros)


def fp4(weight_NK: Tensor, *, block: int) -> QuantisedWeight:
    """Quantise to MXFP4 for blocks of 32, otherwise to NVFP4."""
    blocks = weight_NK.reshape(len(weight_NK), -1, block)
    highest = blocks.abs().amax(-1)
    row_scales = None
    if block == 32:
        exponents = highest.log2().floor() - 2
        scales, factors = (exponents + 127).to(torch.uint8), exponents.exp2()
    else:
        row_scales = (highest.max() / (6 * 448)).expand(len(weight_NK)).contiguous()
        scales = (highest / 6 / row_scales[:, None]).to(torch.float8_e4m3fn)
        factors = scales.float() * row_scales[:, None]
    values = blocks / factors[..., None]
    codes = (values.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1) + 8 * (values < 0)
    return QuantisedWeight(
        codes=_pairs(codes.to(torch.uint8).flatten(1)), kind="e2m1", scales=scales, block=block, row_scales=row_scales
    )  # fmt: skip


def _pairs(codes: Tensor) -> Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4


FORMATS: dict[str, Callable[[Tensor], Tensor | QuantisedWeight]] = {
    "bfloat16": lambda weight: weight.bfloat16(),
    "fp8, channels": lambda weight: fp8(weight, rows=1, block=weight.shape[1]),
    "fp8, blocks": lambda weight: fp8(weight, rows=128, block=128),
    "mxfp4": lambda weight: fp4(weight, block=32),
    "nvfp4": lambda weight: fp4(weight, block=16),
    "int8, channels": int8,
    "int4, groups of 32": lambda weight: int4(weight, block=32),
    "int4, groups of 128": lambda weight: int4(weight, block=128),
    "int4, zeros, groups of 128": lambda weight: int4(weight, block=128, has_zeros=True),
}


class FormatExperts:
    """Experts of one format, each in separate memory."""

    def __init__(
        self, up_NK: Tensor | QuantisedWeight, down_NK: Tensor | QuantisedWeight, experts: int
    ) -> None:
        self.up, self.down = (PackedSlots.like(weight, None, experts) for weight in (up_NK, down_NK))
        for slot in range(experts):
            self.up.put(slot, up_NK)
            self.down.put(slot, down_NK)

    def answer(self, x_PD: Tensor, offsets: np.ndarray, team: Team) -> Tensor:
        """Run rows sorted by slot through their experts: [P, D]."""
        raised_PI = torch.empty(len(x_PD), self.down.in_dim)
        out_PD = torch.empty(len(x_PD), self.down.width)
        rows = [
            self.up.product_row(x_PD.data_ptr(), offsets.ctypes.data, raised_PI.data_ptr(), is_gated=True),
            self.down.product_row(raised_PI.data_ptr(), offsets.ctypes.data, out_PD.data_ptr()),
        ]
        run(program_of(rows), team, 1 << 30)
        return out_PD


def chosen(batch: int, experts: int, top_k: int, generator: torch.Generator) -> np.ndarray:
    """Return the first row of each expert after every token has chosen its experts."""
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(batch)])
    counts = torch.bincount(ids.flatten(), minlength=experts)
    return np.concatenate(([0], counts.cumsum(0).numpy())).astype(np.int64)


def check(name: str, up_NK: Tensor, down_NK: Tensor, team: Team) -> None:
    """Compare one expert of a format with its dequantised weights."""
    up, down = (FORMATS[name](weight) for weight in (up_NK, down_NK))
    plain = [each.dequantised() if isinstance(each, QuantisedWeight) else each.float() for each in (up, down)]
    for rows in (1, 4, 32):
        x, offsets = torch.randn(rows, up_NK.shape[1]), np.array([0, rows])
        found = FormatExperts(up, down, 1).answer(x, offsets, team)
        wanted = FormatExperts(plain[0], plain[1], 1).answer(x, offsets, team)
        if not torch.equal(found, wanted):
            raise SystemExit(f"{name}: {rows} rows differ from those of the dequantised weights")


def main(arguments: list[str] | None = None) -> int:
    """Print a line per format and batch and one JSON line; return 1 if a limit does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weights.quantised_experts", description=__doc__.split("\n")[0]
    )
    for name, default in (
        ("experts", 64),
        ("hidden", 2048),
        ("inner", 768),
        ("top-k", 8),
        ("runs", 30),
        ("threads", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    card = environment_card()
    print_card(card)
    team, generator = Team(options.threads), torch.Generator().manual_seed(0)
    up_NK = torch.randn(2 * options.inner, options.hidden, generator=generator) / options.hidden**0.5
    down_NK = torch.randn(options.hidden, options.inner, generator=generator) / options.inner**0.5
    layers = {}
    for name, make in FORMATS.items():
        check(name, up_NK, down_NK, team)
        layers[name] = FormatExperts(make(up_NK), make(down_NK), options.experts)
    results: dict[str, Any] = {"environment": card, **vars(options)}
    is_held = True
    for batch in BATCHES:
        x_PD = torch.randn(batch * options.top_k, options.hidden, generator=generator)
        times: dict[str, list[float]] = {name: [] for name in layers}
        for number in range(options.runs + 2):
            offsets = chosen(batch, options.experts, options.top_k, generator)
            for name, layer in layers.items():
                begun = time.perf_counter()
                layer.answer(x_PD, offsets, team)
                if number >= 2:
                    times[name].append((time.perf_counter() - begun) * 1e3)
        base = float(np.median(times["bfloat16"]))
        for name, taken in times.items():
            median, p99 = float(np.median(taken)), float(np.quantile(taken, 0.99))
            mib = (layers[name].up.num_bytes + layers[name].down.num_bytes) / 2**20
            results[f"{name}, batch {batch}"] = {
                "ms": median,
                "p99_ms": p99,
                "of_bfloat16": median / base,
                "mib": mib,
            }
            is_over = name in HELD_TO and median / base > LIMITS.get(batch, np.inf)
            is_held &= not is_over
            print(
                f"batch {batch:3d}  {name:28s} {median:8.3f} ms (p99 {p99:8.3f})  {median / base:5.2f} of bfloat16"
                f"  {mib:7.1f} MiB{'  OVER ITS LIMIT' if is_over else ''}"
            )
    results["is_held"] = is_held
    if options.save:
        print(f"saved {save_result('quantised_experts', results).name}")
    print_tail(results)
    team.close()
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
