"""The kernels that sample compile for sm_90 without spills. Other tests here check their results in the interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler.sampling.plan import make_plan
from tests.scheduler.sampling.test_device_sampler import sequence

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from scheduler.sampling.gpu import draws
from tests.support.gpu.triton_compile import Kernel, check_budget
from tests.support.service.recorded_launch import recording

VOCABULARY = 151_936
MOST_REGISTERS = {
    "forbid_tokens": 40,
    "scan_rows": 80,
    "weigh_rows": 64,
    "draw_plain": 64,
    "draw_few": 255,
    "draw_many": 128,  # 16 warps
}
SEQUENCES: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20, "allowed_token_ids": (3, 4)}]


def launched(dtype: torch.dtype) -> dict[str, Kernel]:
    """Return the kernels of a step that needs all of them."""
    sequences = [sequence(temperature=1.0, **fields) for fields in SEQUENCES]
    plan = make_plan(sequences, VOCABULARY, torch.device("cpu"))
    rows = torch.empty(len(sequences), VOCABULARY, dtype=dtype, device="meta")
    with recording(*((draws, name) for name in MOST_REGISTERS)) as found:
        draws.KernelChoice(torch.device("meta"))(rows, plan)
    return {each.function.__name__: each.kernel(MOST_REGISTERS[each.function.__name__]) for each in found}


@pytest.mark.parametrize(
    "name", ["scan_rows", *(pytest.param(name, marks=pytest.mark.slow) for name in MOST_REGISTERS if name != "scan_rows")]
)  # fmt: skip
def test_a_kernel_compiles_without_spills(name: str, tmp_path: Path) -> None:
    kernels = launched(torch.float32)
    assert set(kernels) == set(MOST_REGISTERS)
    check_budget(kernels[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan_rows", "draw_few"])
def test_kernels_read_logits_in_bfloat16(name: str, tmp_path: Path) -> None:
    check_budget(launched(torch.bfloat16)[name], tmp_path)


def test_all_rows_of_a_step_take_five_launches_whatever_their_number() -> None:
    sequences = [sequence(temperature=1.0, **fields) for fields in SEQUENCES[:2] * 40]
    plan = make_plan(sequences, VOCABULARY, torch.device("cpu"))
    rows = torch.empty(len(sequences), VOCABULARY, device="meta")
    with recording(*((draws, name) for name in MOST_REGISTERS)) as found:
        draws.KernelChoice(torch.device("meta"))(rows, plan)
    assert [each.function.__name__ for each in found] == [
        "scan_rows",
        "weigh_rows",
        "draw_plain",
        "draw_few",
        "draw_many",
    ]
