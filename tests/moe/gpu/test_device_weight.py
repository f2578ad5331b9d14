"""A weight on a device multiplies like a plain one. With batch invariance, a row's bits do not depend on other rows."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moe.load.quantised_weight import QuantisedWeight
from tests.moe.gpu.grouped_cases import FORMS, Case, make_weights
from tests.support.ranks import RankPool

ROWS, IN_DIM, OUT_DIM = 70, 136, 144


class Found(NamedTuple):
    """Deviation from torch's products, and whether a row alone has the same bits as among others (close ones if quantised)."""

    difference: float
    bias_difference: float
    embedding_difference: float
    is_invariant: bool
    is_itself: bool  # in any other use it is the plain weight
    control: float  # deviation of products with another scale


def quantised_weight(form: str, in_dim: int = IN_DIM) -> QuantisedWeight:
    """Draw a weight in a format of the grouped product's cases, with scales for each row, as loaded."""
    case = Case([1], OUT_DIM, in_dim, weights=form)
    stored = {name: part[0] for name, part in make_weights(1, OUT_DIM, case).stored.items()}
    stored["scales"] = stored["scales"].repeat_interleave(FORMS[form].rows, 0)[:OUT_DIM].contiguous()
    return QuantisedWeight(kind=FORMS[form].kind, block=FORMS[form].block or in_dim, **stored)


def multiply(form: str) -> Found:
    from moe.gpu.device_weight import DeviceWeight, OneGroup  # noqa: PLC0415 - in the interpreter

    generator = torch.Generator().manual_seed(3)
    weight: Tensor | QuantisedWeight
    plain = weight = torch.randn(OUT_DIM, IN_DIM, generator=generator)
    if form != "plain":
        weight = quantised_weight(form)
        plain = weight.dequantised()
    device = torch.device("cpu")
    held = DeviceWeight(weight, OneGroup(device, is_invariant=True), torch.float32, device)
    x = torch.randn(1, ROWS, IN_DIM, generator=generator)
    bias = torch.randn(OUT_DIM, generator=generator)
    linear, embedding = torch.nn.functional.linear, torch.nn.functional.embedding
    found = linear(x, held)
    alone = torch.cat([linear(x[:, row : row + 1], held) for row in (0, 33, ROWS - 1)], dim=1)
    several = found[:, [0, 33, ROWS - 1]]
    ids = torch.tensor([[3, 0, OUT_DIM - 1]])
    measured = Found(
        float((found - linear(x, plain)).abs().max()),
        float((linear(x, held, bias) - linear(x, plain, bias)).abs().max()),
        float((embedding(ids, held) - embedding(ids, plain)).abs().max()),
        # The interpreter's products of quantised weights depend on the number of rows of a tile.
        torch.equal(alone, several) if form == "plain" else torch.allclose(alone, several, atol=1e-5),
        bool(torch.allclose(held + 1.0, plain + 1.0, atol=1e-6)) and held.shape == plain.shape,
        control=0.0,
    )
    spoilt = held.held.codes if held.held.scales is None else held.held.scales
    spoilt[0, 0, 0] = 120 if spoilt.dtype == torch.uint8 else 4.0
    return measured._replace(control=float((linear(x, held) - found).abs().max()))


FEW = ("plain", "fp8", "mxfp4", "int4, 64, zeros")


@pytest.mark.parametrize(
    "form", [*FEW, *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS if form not in FEW)]
)
def test_a_devices_weight_multiplies_as_the_weight_that_it_stands_for(
    form: str, interpreter: RankPool
) -> None:
    found: Found = interpreter.run(multiply, form)[0]
    assert found.difference < 1e-4 and found.bias_difference < 1e-4 and found.embedding_difference < 1e-6
    assert found.is_invariant and found.is_itself
    assert found.control > 1e-2


def bytes_held(form: str) -> tuple[int, int]:
    """Return the bytes of a weight on the device, and of its tensors as read."""
    from moe.gpu.device_weight import DeviceWeight, OneGroup  # noqa: PLC0415 - in the interpreter

    weight, device = quantised_weight(form, 256), torch.device("cpu")  # whole tiles: scales are not filled up
    held = DeviceWeight(weight, OneGroup(device, is_invariant=False), torch.float32, device)
    return sum(part.nbytes for part in held.stored()), sum(part.nbytes for part in weight.tensors().values())


def test_a_quantised_weight_takes_no_more_memory_than_its_parts(interpreter: RankPool) -> None:
    for form in FORMS:
        held, read = interpreter.run(bytes_held, form)[0]
        assert held == read if FORMS[form].rows == 1 else held < read, form


def join() -> tuple[bool, bool, bool, bool]:
    """Return whether joined layers give each layer's result in one product, share its memory, and refuse quantised weights."""
    from moe.adopt.products import Products  # noqa: PLC0415 - in the interpreter
    from moe.gpu.device_weight import DeviceWeight, OneGroup  # noqa: PLC0415

    generator, device = torch.Generator().manual_seed(4), torch.device("cpu")
    group = OneGroup(device, is_invariant=True)
    layers = [torch.nn.Linear(IN_DIM, size, bias=True) for size in (40, 8, 24)]
    for layer in layers:
        weight = torch.randn(layer.out_features, IN_DIM, generator=generator)
        del layer._parameters["weight"]
        layer.weight = DeviceWeight(weight, group, torch.float32, device)  # type: ignore[assignment]
    x, products = torch.randn(1, 5, IN_DIM, generator=generator), Products(layers)
    apart = products(x)
    products.pack()
    together, after = products(x), [layer(x) for layer in layers]
    weights: list[Any] = [layer.weight for layer in layers]
    held = [weight.held.codes for weight in weights]
    quantised = DeviceWeight(quantised_weight("fp8"), group, torch.float32, device)
    return (
        all(  # the interpreter's product of a column may depend on its place
            torch.allclose(a, b, atol=1e-5) and torch.equal(a, c)
            for a, b, c in zip(apart, together, after, strict=True)
        ),
        len({part.untyped_storage().data_ptr() for part in together}) == 1,
        len({codes.untyped_storage().data_ptr() for codes in held}) == 1,
        quantised.joined([quantised]) is None and weights[0].joined([quantised]) is None,
    )


def test_plain_weights_of_one_input_become_one_product(interpreter: RankPool) -> None:
    assert interpreter.run(join)[0] == (True, True, True, True)
