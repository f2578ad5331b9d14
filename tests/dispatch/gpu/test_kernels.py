"""The kernels of dispatch on GPUs compile without spilling, within a budget of registers."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from dispatch.gpu.combine import sum_pairs
from dispatch.gpu.packed_kernels import deliver_places, pack_pairs
from dispatch.gpu.permute import order_pairs
from tests.support.triton_compile import Kernel, check_budget

ORDER = {
    "slots": "*i64",
    "row_of_pair": "*i64",
    "pair_of_choice": "*i32",
    "offsets": "*i64",
    "num_choices": "i32",
}
SUM = {"y": "*i16", "pair_of_choice": "*i32", "weights": "*fp32", "added": "*i16", "out": "*i16"}
HALF = {"calls": "*i64", "half_bytes": "i64"}
DELIVER = {"entries": "i64", "rows": "i64", "arrived": "*i32", **HALF, "x_out": "*i16"}
PLACES = {
    "R": 8,
    "M": 128,
    "K": 8,
    "K_PAD": 8,
    "H": 7168,
    "SCALES_AT": 7168,
    "GROUPS": 8,
    "IS_BFLOAT16": True,
}
PACK = {
    "counts": "*i32", "row_places": "*i32", "layout_range": "*i64", "sent": "*i64", "offsets": "*i64",
    "row_of_pair": "*i64", "sent_bytes": "*i64", "answer_bytes": "*i64", "rank": "i32", "room": "i32",
}  # fmt: skip
PACK_SIZES = {"R": 8, "L": 33, "L_PAD": 64, "M": 128, "K": 8, "K_PAD": 8, "TILE": 64, "ROW_BYTES": 14336}
SIZES = {"K": 8, "H": 7168, "TILE": 1024, "IS_BFLOAT16": True}
KERNELS = {
    "order": Kernel(order_pairs, ORDER, {"S": 256, "K": 8, "TILE": 1024}, 4, max_registers=64),
    "sum": Kernel(sum_pairs, {**SUM, "added": "constexpr"}, {**SIZES, "added": None, "HAS_ADDED": False}, 4),
    "deliver": Kernel(deliver_places, DELIVER, {**PLACES, "ROW_BYTES": 14336, "IS_FP8": False}),
    "deliver_fp8": Kernel(deliver_places, DELIVER, {**PLACES, "ROW_BYTES": 7392, "IS_FP8": True}),
    "pack": Kernel(pack_pairs, PACK, {**PACK_SIZES, "ANSWER_BYTES": 14336}, 4),
    "sum_and_add": Kernel(sum_pairs, SUM, {**SIZES, "HAS_ADDED": True}, 4),
}


KERNELS = {name: kernel._replace(aligned=True) for name, kernel in KERNELS.items()}  # as they are launched


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_stay_within_their_budget(name: str, tmp_path: Path) -> None:
    check_budget(KERNELS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_stay_within_their_budget_on_other_gpus(name: str, arch: int, tmp_path: Path) -> None:
    kernel = KERNELS[name]  # their compilers take a few registers more
    check_budget(kernel._replace(max_registers=max(80, kernel.max_registers)), tmp_path, arch)
