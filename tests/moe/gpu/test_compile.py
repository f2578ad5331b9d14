"""Kernels of the MoE layer, compiled as models launch them, without a GPU. The grouped product has its own module."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from attention.gpu import decode, mla, prefill
from attention.gpu.tiles import read_table, tile_of
from expert_placement.choose import ReplicaChoice
from moe.gpu import choose, gate, norm, routing
from moe.gpu.products import linear_rows
from moe.gpu.products.tiles import DECODE_TILE, FLOW_TILE, PREFILL_TILE
from moe.routing import Routing
from moe.slot_choice import SlotChoice
from tests.support.gpu.triton_compile import Kernel, another, check_budget
from tests.support.operators import Operators
from tests.support.placement.placements import random_placement
from tests.support.service.recorded_launch import recording

META = torch.device("meta")
ROWS = 64


class Case(NamedTuple):
    """A caller of the kernel, its module, and the allowed registers."""

    launch: Callable[[], object]
    kernel: str
    max_registers: int = 128


def rows(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(ROWS, width, dtype=dtype, device=META)


def launch_routing(experts: int, *, has_bias: bool, **routing_options: object) -> None:
    bias = torch.empty(experts, dtype=torch.float32, device=META) if has_bias else None
    routing.route(rows(experts, torch.float32), Routing(**routing_options), bias_E=bias)  # type: ignore[arg-type]


def launch_norm(hidden: int) -> None:
    norm.rms_norm(rows(hidden), rows(hidden)[0], 1e-6)


def launch_sum(hidden: int) -> None:
    norm.add_rms_norm(rows(hidden), rows(hidden), rows(hidden)[0], 1e-6)


def launch_gate(inner: int) -> None:
    gate.silu_gate(*rows(2 * inner).split(inner, dim=-1))


def launch_linear(num_rows: int, out_dim: int, in_dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x, weight = (torch.empty(size, in_dim, dtype=dtype, device=META) for size in (num_rows, out_dim))
    linear_rows.multiply_rows_alike(x, weight)


def launch_choice(slots_per_rank: int) -> None:
    """Launch with 8 experts on 2 ranks, with or without copies."""
    placement = random_placement(1, 8, 2, slots_per_rank, 0)
    route = choose.DeviceSlotChoice(
        SlotChoice(ReplicaChoice(placement, 0), 0),
        slots_per_rank=slots_per_rank,
        num_ranks=2,
        device=torch.device("cpu"),
    )
    integers = partial(torch.zeros, dtype=torch.int64)
    route.slots(integers(ROWS, 8), integers(ROWS), integers(1), integers(2, 10))


DEEPSEEK = {
    "choices": 8,
    "is_sigmoid": True,
    "normalise": True,
    "scale": 2.5,
    "groups": 8,
    "groups_chosen": 4,
}
CASES = {
    "routing_qwen3": Case(
        partial(launch_routing, 128, has_bias=False, choices=8, normalise=True), "choose_experts"
    ),
    "norm": Case(partial(launch_norm, 2048), "norm_rows"),
    "choice": Case(partial(launch_choice, 4), "choose_and_count", 64),
    "linear_decode": Case(partial(launch_linear, 1, 5120, 2048), "linear_rows", 255),
    "linear_prompts": Case(partial(launch_linear, 8192, 2048, 4096), "linear_rows", 255),
}
MORE_CASES = {
    "routing_deepseek": Case(partial(launch_routing, 256, has_bias=True, **DEEPSEEK), "choose_experts"),
    "routing_gpt_oss": Case(
        partial(launch_routing, 32, has_bias=False, choices=4, softmax_after=True), "choose_experts"
    ),
    "routing_512": Case(partial(launch_routing, 512, has_bias=False, choices=10), "choose_experts"),
    "norm_of_heads": Case(partial(launch_norm, 128), "norm_rows"),
    "norm_gpt_oss": Case(partial(launch_norm, 2880), "norm_rows"),
    "sum_and_norm_qwen3": Case(partial(launch_sum, 2048), "norm_rows"),
    "sum_and_norm_deepseek": Case(partial(launch_sum, 7168), "norm_rows"),
    "gate_deepseek": Case(partial(launch_gate, 2048), "gate_rows"),
    "norm_deepseek": Case(partial(launch_norm, 7168), "norm_rows"),
    **{f"linear_{rows}": Case(partial(launch_linear, rows, 2880, 4096), "linear_rows", 255) for rows in (32, 64, 128, 256)},
    "linear_odd": Case(partial(launch_linear, 8, 1000, 1000), "linear_rows", 255),
    "linear_float32": Case(partial(launch_linear, 8, 256, 7168, torch.float32), "linear_rows", 255),
    "choice_among_copies": Case(partial(launch_choice, 6), "choose_and_count", 128),
}  # fmt: skip
ALL = CASES | MORE_CASES


def compiled(case: Case) -> Kernel:
    """Return the case's kernel as it is launched."""
    kernels = (
        (routing, "choose_experts"), (norm, "norm_rows"), (choose, "choose_and_count"), (gate, "gate_rows"),
        (linear_rows, "linear_rows"),
    )  # fmt: skip
    with recording(*kernels) as launched:
        case.launch()
    assert [launch.function.__name__ for launch in launched] == [case.kernel]
    return launched[0].kernel(case.max_registers)


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_for_sm_90_within_their_budget(name: str, tmp_path: Path) -> None:
    check_budget(compiled(ALL[name]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *((name, another(place)) for place, name in enumerate(CASES)),
        ("choice", 89),
        *((name, arch) for place, name in enumerate(MORE_CASES) for arch in (90, another(place))),
    ],
)
def test_every_launch_compiles_within_its_budget(name: str, arch: int, tmp_path: Path) -> None:
    check_budget(compiled(ALL[name]), tmp_path, arch)


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [(256, ["choose_and_count"]), (257, ["count_chunks", "choose_and_count"])],
)
def test_a_decode_step_chooses_among_copies_in_one_launch(rows: int, kernels: list[str]) -> None:
    placement = random_placement(1, 8, 2, 6, 0)
    choice = choose.DeviceSlotChoice(
        SlotChoice(ReplicaChoice(placement, 0), 0), slots_per_rank=6, num_ranks=2, device=torch.device("cpu")
    )
    integers = partial(torch.zeros, dtype=torch.int64)
    arguments = integers(rows, 8), integers(rows), integers(1), integers(2, 10)
    with recording((choose, "choose_and_count"), (choose, "count_chunks")) as launched, Operators() as ran:
        choice.slots(*arguments)
    assert [launch.function.__name__ for launch in launched] == kernels
    assert ran.names == ["aten::empty_like", "aten::zeros"][: len(kernels)]


TILES = {
    "paged_decode": decode.DecodeTile(),
    "latent_decode": mla.LatentTile(),
    "paged_prefill": prefill.PrefillTile(),
    "grouped_few": DECODE_TILE,
    "grouped_decode": DECODE_TILE,
    "grouped_32": DECODE_TILE,
    "grouped_64": DECODE_TILE,
    "grouped_prefill": PREFILL_TILE,
    "grouped_flow": FLOW_TILE,
    **{each.kernel: each.tiles[0] for each in linear_rows.RANGES},
}


def test_every_entry_of_the_table_is_of_a_kernel_and_fits_its_tile() -> None:
    for device, kernels in read_table().items():
        for kernel, shapes in kernels.items():
            assert kernel in TILES, f"{device} has tiles of an unknown kernel, {kernel}"
            for shape in shapes:
                assert tile_of(kernel, shape, TILES[kernel], (device,))  # type: ignore[type-var]
