"""The kernels of adapters, compiled as models launch them, without a GPU."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from moe.gpu.lora import low_rank
from moe.gpu.lora.low_rank import (
    WHOLE,
    DeviceFactorTable,
    FactorView,
    RowGroups,
    add_low_rank,
    launch_without_rows,
)
from moe.lora.tables import Factors
from tests.support.gpu.triton_compile import check_budget
from tests.support.service.recorded_launch import recording

META = torch.device("meta")


@pytest.mark.crossed("dtype", "in_dim", every=4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("in_dim", "out_dim", "rank", "layout"),
    [
        (7168, 4096, 16, WHOLE),
        pytest.param(2048, 2880, 64, WHOLE, marks=pytest.mark.slow),
        # Halves of DeepSeek-V3's `kv_b_proj`.
        (128, 512, 16, FactorView(128 * 256, is_swapped=True)),
        (512, 128, 16, FactorView(128 * 256)),
    ],
)
def test_both_kernels_compile_for_sm_90_within_their_budget(
    in_dim: int, out_dim: int, rank: int, layout: FactorView, dtype: torch.dtype, tmp_path: Path
) -> None:
    table = DeviceFactorTable(8, META)
    table.most_rank = rank
    tiles = torch.empty(9, dtype=torch.int64, device=META)
    groups = RowGroups(torch.empty(64, dtype=torch.int64, device=META), tiles, tiles, tiles)
    x, out = (torch.empty(64, width, dtype=dtype, device=META) for width in (in_dim, out_dim))
    with recording((low_rank, "shrink_rows"), (low_rank, "expand_rows")) as launched:
        add_low_rank(x, out, groups, table, layout=layout)
    assert [launch.function.__name__ for launch in launched] == ["shrink_rows", "expand_rows"]
    assert launched[0].grid == (9, rank // 16, -(-in_dim // 1024)) and launched[1].grid == (9, out_dim // 64)
    for launch in launched:
        folder = tmp_path / launch.function.__name__
        folder.mkdir()
        check_budget(launch.kernel(255), folder)


def test_factors_are_on_the_table_s_device() -> None:
    table = DeviceFactorTable(1, META)
    table.put(0, Factors(torch.zeros(8, 16), torch.zeros(1, 8)))
    held = table.factors(0)
    assert held is not None and held.a_KW.is_meta and table.most_rank == 1


def test_kernels_are_launched_for_all_types_before_a_step_needs_them() -> None:
    with recording((low_rank, "shrink_rows"), (low_rank, "expand_rows")) as launched:
        launch_without_rows([(7168, 4096, WHOLE), (16, 2048, WHOLE)], torch.bfloat16, META)
    kinds = [
        (launch.arguments["x"].dtype, launch.arguments["K"]) if "x" in launch.arguments
        else (launch.arguments["out"].dtype, launch.arguments["CHUNKS"])
        for launch in launched
    ]  # fmt: skip
    bf16, fp32 = torch.bfloat16, torch.float32
    shrinks, expands = kinds[::2], kinds[1::2]
    assert shrinks == [(each, size) for size in (7168, 16) for each in (bf16, bf16, fp32)]
    assert expands == [(each, chunks) for chunks in (7, 1) for each in (bf16, fp32, fp32)]
