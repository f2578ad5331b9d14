"""RMSNorm for GPUs in the interpreter against the definition as transformers rounds it, and compiled.

The interpreter rounds bfloat16 wrongly, so float16 stands for the short types.
"""

import pytest
import torch
from torch import Tensor

from tests.support.ranks import RankPool


def oracle(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """LlamaRMSNorm's forward."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from moe.gpu.norm import rms_norm  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    ours = rms_norm(x, weight, 1e-6)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3  # one step of the type
    torch.testing.assert_close(ours, oracle(x, weight, 1e-6), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 64), torch.float32),
        ((1, 72), torch.float16),
        ((2, 2880), torch.float32),
        ((2, 2880), torch.float16),
    ],
)
def test_rows_are_normed_as_transformers_norms_them(
    interpreter: RankPool, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    interpreter.run(norm_rows, shape, dtype)
