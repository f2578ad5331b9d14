"""Several linear layers as one product: the parameters stay, as views; layers of other kinds run one by one."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from moe.adopt.products import Products

SIZES = (6, 2, 4)


def layers_of(has_bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(8, size, bias=has_bias) for size in SIZES]


@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_layers_give_their_rows_in_one_product(has_bias: bool) -> None:
    layers, x = layers_of(has_bias), torch.randn(1, 3, 8)
    wanted = [layer(x) for layer in layers]
    products = Products(layers)
    before = products(x)
    products.pack()
    found = products(x)
    for ours, unpacked, theirs in zip(found, before, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert torch.equal(unpacked, theirs)
    assert len({part.untyped_storage().data_ptr() for part in found}) == 1
    assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1
    for layer, theirs in zip(layers, wanted, strict=True):  # the parameters are as before
        torch.testing.assert_close(layer(x), theirs)
    assert all(isinstance(layer.weight, nn.Parameter) and layer.weight.is_contiguous() for layer in layers)


def one_bias(layers: list[nn.Linear]) -> None:
    layers[1].bias = None  # type: ignore[assignment]


def another_type(layers: list[nn.Linear]) -> None:
    layers[2].double()


class Own(nn.Linear):
    pass


def another_class(layers: list[nn.Linear]) -> None:
    layers[0].__class__ = Own


@pytest.mark.parametrize("change", [one_bias, another_type, another_class])
def test_layers_that_differ_stay_apart(change: Callable[[list[nn.Linear]], None]) -> None:
    layers = layers_of(True)
    change(layers)
    Products(layers).pack()
    assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == len(SIZES)
