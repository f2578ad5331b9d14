"""A weight on a device multiplies as a plain one does; a row's bits are its own where that was asked for."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moe.load.quantised_weight import QuantisedWeight
from tests.support.models.quantise import quantise_fp8
from tests.support.ranks import RankPool

ROWS, IN_DIM, OUT_DIM = 70, 136, 144


class Found(NamedTuple):
    """How far products are from torch's, and whether rows alone have the bits that they have among others."""

    difference: float
    bias_difference: float
    embedding_difference: float
    is_invariant: bool
    is_itself: bool  # asked for anything else it is the plain weight


def multiply(is_fp8: bool) -> Found:
    from moe.gpu.device_weight import DeviceWeight, OneGroup  # noqa: PLC0415 - in the interpreter

    generator = torch.Generator().manual_seed(3)
    weight: Tensor | QuantisedWeight
    plain = weight = torch.randn(OUT_DIM, IN_DIM, generator=generator)
    if is_fp8:
        stored, plain = quantise_fp8(plain, (128, 128))
        scales = stored["_scale_inv"].repeat_interleave(128, 0)[:OUT_DIM].contiguous()
        weight = QuantisedWeight(codes=stored[""], kind="e4m3", scales=scales, block=128)
    device = torch.device("cpu")
    held = DeviceWeight(weight, OneGroup(device, is_invariant=True), torch.float32, device)
    x = torch.randn(1, ROWS, IN_DIM, generator=generator)
    bias = torch.randn(OUT_DIM, generator=generator)
    linear, embedding = torch.nn.functional.linear, torch.nn.functional.embedding
    found = linear(x, held)
    alone = torch.cat([linear(x[:, row : row + 1], held) for row in (0, 33, ROWS - 1)], dim=1)
    ids = torch.tensor([[3, 0, OUT_DIM - 1]])
    return Found(
        float((found - linear(x, plain)).abs().max()),
        float((linear(x, held, bias) - linear(x, plain, bias)).abs().max()),
        float((embedding(ids, held) - embedding(ids, plain)).abs().max()),
        torch.equal(alone, found[:, [0, 33, ROWS - 1]]),
        bool(torch.allclose(held + 1.0, plain + 1.0, atol=1e-6)) and held.shape == plain.shape,
    )


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_devices_weight_multiplies_as_the_weight_that_it_stands_for(
    is_fp8: bool, interpreter: RankPool
) -> None:
    found: Found = interpreter.run(multiply, is_fp8)[0]
    assert found.difference < 1e-4 and found.bias_difference < 1e-4 and found.embedding_difference < 1e-6
    assert found.is_invariant and found.is_itself
