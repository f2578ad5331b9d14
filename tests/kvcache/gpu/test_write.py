"""Writing GPU pages, in the interpreter, and compiled."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton: pip install -r requirements-dev.txt"
)


def write(heads: int, dim: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from kvcache.gpu.write import write_pages  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    rows = torch.randn(5, heads, 2 * dim)[..., :dim]
    slots = torch.tensor([33, 0, -1, 47, 16])
    pages = torch.zeros(3, heads, 16, dim)
    want = pages.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot // 16, :, slot % 16] = rows[row]
    write_pages(rows, slots, pages)
    assert torch.equal(pages, want)


@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (1, 88), (3, 20)])
def test_rows_go_to_their_slots_and_padding_nowhere(interpreter: RankPool, heads: int, dim: int) -> None:
    interpreter.run(write, heads, dim)


def test_the_kernel_compiles_within_its_budget(tmp_path: Path) -> None:
    from kvcache.gpu import write as gpu_write  # noqa: PLC0415 - not in the interpreter
    from tests.support.triton_compile import Kernel, check_budget  # noqa: PLC0415

    types = {"rows": "*bf16", "slots": "*i64", "pages": "*bf16", "row_stride": "i32", "head_stride": "i32"}
    sizes = {"HEADS": 4, "BLOCK": 16, "D": 128, "D_PAD": 128}
    check_budget(Kernel(gpu_write.write_rows, types, sizes, 1, 64), tmp_path)
