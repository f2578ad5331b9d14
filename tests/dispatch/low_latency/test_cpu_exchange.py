"""Every backend and number of ranks yields the bits of the single-process oracle, with and without receive hooks."""

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch import fp8
from dispatch.compiled.native import compile_all
from dispatch.cpu_kernels import fp8 as cpu_fp8
from dispatch.faces.low_latency import LowLatencyFace
from dispatch.low_latency.calls import LowLatencyShape
from dispatch.low_latency.cpu import CpuExchange
from dispatch.wires.local import LocalWire
from tests.dispatch.low_latency.cases import (
    Layer,
    RankResult,
    assert_same,
    edge_layers,
    make_cases,
    simulate,
)
from tests.dispatch.low_latency.ranks import run_layer, run_layers
from tests.fixtures import PoolOf


@lru_cache
def wanted(world_size: int) -> list[list[RankResult]]:
    """Return the oracle's results of the edge layers, by layer and rank."""
    return [simulate(layer) for layer in edge_layers(world_size)]


def check(pool_of: PoolOf, name: str, world_size: int, *, hooks: bool) -> None:
    results = pool_of(world_size).run(run_layers, name, edge_layers(world_size), hooks)
    for index, wants in enumerate(wanted(world_size)):
        for rank, want in enumerate(wants):
            assert_same(results[rank][index], want, f"{name}: layer {index}, rank {rank}")


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("shm", 2), ("gloo", 2), ("gloo", 4), pytest.param("shm", 8, marks=pytest.mark.slow)],
)
def test_all_backends_give_the_oracles_bits(pool_of: PoolOf, name: str, world_size: int) -> None:
    check(pool_of, name, world_size, hooks=False)


@pytest.mark.parametrize(("name", "world_size"), [("gloo", 2), ("shm", 4)])
def test_receive_hooks_change_no_bit(pool_of: PoolOf, name: str, world_size: int) -> None:
    """Sent data may be overwritten before the hook runs."""
    check(pool_of, name, world_size, hooks=True)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    tokens=st.integers(0, 9),
    hidden=st.sampled_from([1, 3, 128, 200, 640]),
    choices=st.integers(1, 6),
    no_choice=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    form=st.sampled_from(
        [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    ),
)
def test_one_rank_equals_the_oracle(
    seed: int,
    tokens: int,
    hidden: int,
    choices: int,
    no_choice: float,
    dtype: torch.dtype,
    form: tuple[bool, bool, bool],
) -> None:
    cases = make_cases(
        seed, [tokens], hidden=hidden, choices=choices, experts_per_rank=4, no_choice=no_choice, dtype=dtype
    )
    layer = Layer(cases, 9, 4, *form)
    assert_same(run_layer(LowLatencyFace(CpuExchange(LocalWire())), layer), simulate(layer)[0], "local")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("round_scale", [False, True])
def test_the_compiled_cast_has_the_oracles_bits(dtype: torch.dtype, round_scale: bool) -> None:
    """Every finite bfloat16, among neighbours over 70 orders of magnitude."""
    compile_all(*cpu_fp8.KERNELS)
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    order = torch.randperm(every.numel(), generator=torch.Generator().manual_seed(1))
    rows = [every, every[order], torch.randn(every.numel(), generator=torch.Generator().manual_seed(2))]
    hidden = 500  # a short last block
    x_TH = torch.cat([row.to(dtype)[: every.numel() // hidden * hidden] for row in rows]).view(-1, hidden)
    shape = LowLatencyShape(
        world_size=1,
        experts_per_rank=1,
        max_tokens=len(x_TH),
        hidden=hidden,
        choices=1,
        dtype=dtype,
        is_fp8=True,
    )
    out, scratch = (
        torch.zeros(len(x_TH), shape.row_bytes, dtype=torch.uint8),
        torch.zeros(1024, dtype=torch.uint8),
    )
    quantise = cpu_fp8.quantise_bfloat16 if dtype == torch.bfloat16 else cpu_fp8.quantise_float32
    quantise(
        x_TH.data_ptr(), len(x_TH), hidden, out.data_ptr(), shape.row_bytes, shape.scales_at, int(round_scale),
        scratch.data_ptr(),
    )  # fmt: skip
    want = fp8.quantise_fp8(x_TH, round_scale=round_scale)
    scales = out[:, shape.scales_at : shape.scales_at + 4 * shape.num_scales].contiguous().view(torch.float32)
    assert torch.equal(out[:, :hidden], want.x_TH.view(torch.uint8))
    assert torch.equal(scales, want.scales)


def test_the_compiled_sum_keeps_the_order_of_choices() -> None:
    """Values over 60 orders of magnitude reveal a fused multiply-add or another order."""
    generator = torch.Generator().manual_seed(1)
    cases = make_cases(3, [64], hidden=130, choices=8, experts_per_rank=16)
    scale = 10.0 ** torch.randint(-30, 30, (64, 1), generator=generator).float()
    case = cases[0]._replace(x_TH=cases[0].x_TH * scale, weights_TK=cases[0].weights_TK * 1e3)
    layer = Layer([case], 64, 16)
    assert_same(run_layer(LowLatencyFace(CpuExchange(LocalWire())), layer), simulate(layer)[0], "local")


def test_what_is_not_finite_arrives_as_nan() -> None:
    x_TH = torch.zeros(1, 256, dtype=torch.bfloat16)
    x_TH[0, 3] = float("inf")
    face = LowLatencyFace(CpuExchange(LocalWire()))
    for round_scale, use_ue8m0 in [(False, False), (True, False), (True, True)]:
        (rows, scales), *_ = face.low_latency_dispatch(
            x_TH, torch.tensor([[0]]), 1, 1, round_scale=round_scale, use_ue8m0=use_ue8m0
        )
        back = fp8.dequantise_fp8(rows, scales, torch.float32)[0, 0]
        assert back[:128].isnan().all()
        assert torch.equal(back[128:], torch.zeros(128))
