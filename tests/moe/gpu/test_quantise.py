"""Rows cast to FP8 on GPUs, in Triton's interpreter, bit for bit as those that travel; and compiled."""

from importlib.util import find_spec

import pytest
import torch

from dispatch.fp8 import quantise_fp8
from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton: pip install -r requirements-dev.txt"
)


def cast(dtype: torch.dtype, features: int) -> None:
    from moe.gpu.quantise import quantise_rows  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    x = (torch.randn(4, features) * torch.tensor([1.0, 1e-6, 300.0, 0.0])[:, None]).to(dtype)
    x[2, 5] = float("nan")
    ours, wanted = quantise_rows(x), quantise_fp8(x)
    assert torch.equal(ours.x_TH.view(torch.uint8), wanted.x_TH.view(torch.uint8))
    assert torch.equal(ours.scales.view(torch.int32), wanted.scales.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [128, 300])
def test_rows_are_cast_as_rows_that_travel(interpreter: RankPool, dtype: torch.dtype, features: int) -> None:
    interpreter.run(cast, dtype, features)
