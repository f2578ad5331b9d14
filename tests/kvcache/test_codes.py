"""Codes of eight bits and their scales are those of the definition, and depend on nothing but the row."""

import numpy as np
import pytest
import torch

from kvcache.codes import E4M3, INT8, quantise
from tests.support.cached_codes import FORMATS, quantised, rounded


def rows() -> torch.Tensor:
    """Return rows of many sizes: normal, with an outlier, tiny, huge, equal and zero."""
    x = torch.randn(60, 72, generator=torch.Generator().manual_seed(0))
    x[10:20, 5] *= 300.0
    x[20:30] *= torch.logspace(-38, 36, 10)[:, None]
    x[30] = 0.0
    x[31] = -2.5
    x[32] = 0.0
    x[32, 3] = 1e-31  # becomes 0: its factor would be infinite
    x[33:43] = x[33:43].exp().pow(2)
    # Halves of steps, which are rounded to even, and subnormals of e4m3.
    x[43] = torch.linspace(-127.5, 127.5, 72).round(decimals=1)
    x[43, 0] = 127.0
    x[44] = torch.arange(72) * 2.0**-11
    x[44, 0] = 448.0
    return x


def coded(x: torch.Tensor, codes: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows with the compiled function."""
    out, scales = np.zeros(x.shape, np.uint8), np.zeros(len(x), np.float32)
    for row in range(len(x)):
        scales[row] = quantise(x[row].numpy(), codes is E4M3, out[row])
    return torch.from_numpy(out).view(codes), torch.from_numpy(scales)[:, None]


@pytest.mark.parametrize("codes", FORMATS)
def test_codes_and_scales_are_those_of_the_definition(codes: torch.dtype) -> None:
    x = rows()
    found, scales = coded(x, codes)
    wanted, wanted_scales = quantised(x, codes)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(found.float(), wanted.float())
    assert len(set(found.view(torch.uint8).flatten().tolist())) > 150, "most codes are used"


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("codes", FORMATS)
def test_a_row_that_is_not_finite_has_the_scale_nan(codes: torch.dtype, bad: float) -> None:
    x = rows()[:2]
    x[1, 70] = bad
    found, scales = coded(x, codes)
    assert scales[0].isfinite() and scales[1].isnan() and not found[1].float().any()


def test_errors_are_those_of_the_formats() -> None:
    x = rows()[:10]
    top = x.abs().amax(-1, keepdim=True)
    assert ((rounded(x, INT8) - x).abs() <= top / 127 / 2 * 1.0001).all()
    assert ((rounded(x, E4M3) - x).abs() <= (x.abs() / 16).clamp(min=2.0**-10 * top / 448) * 1.0001).all()
