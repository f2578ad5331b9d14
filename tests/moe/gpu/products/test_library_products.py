"""Which of the library's products have the bits of our kernel, and how rows are cut into those; on a GPU, cuBLAS' own."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from tests.support.ranks import RankPool

SIZES = (1, 2, 4, 8, 64, 128)
N, K = 40, 256


def find_those_of_our_order() -> tuple[list[int], list[int], float]:
    """Try a library that splits the inputs of up to 4 rows. Return its sizes with our bits, without a bias and with one, and the share of
    a trial's outputs that the split changes."""
    from moe.gpu.products import library_products as module  # noqa: PLC0415 - in the interpreter
    from moe.gpu.products.linear_rows import multiply_rows_alike  # noqa: PLC0415

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        multiply_rows_alike(x, weight, bias, out=out)
        if len(x) <= 4:
            third = K // 3
            out.copy_(x[:, :third] @ weight[:, :third].T + x[:, third:] @ weight[:, third:].T)
            out += 0.0 if bias is None else bias

    products = module.LibraryProducts(SIZES[:4], 128)
    shapes = [module.ProductShape(N, K, torch.float32, has_bias) for has_bias in (False, True)]
    with patch.object(module, "_multiply", multiply):
        without, with_bias = (products._try(shape, torch.device("cpu")) for shape in shapes)
    x, weight = module._cancelling(shapes[0], 64, torch.device("cpu"))
    exact = x.double() @ weight.double().T
    assert exact.abs().max() < 1e-9 * (x.double().abs() @ weight.double().abs().T).max()
    out = torch.empty(2, N)
    multiply(x[:2], weight, None, out)
    changed = (out != multiply_rows_alike(x[:2], weight)).float().mean()
    return without, with_bias, float(changed)


def test_a_trial_finds_products_that_add_in_another_order(interpreter: RankPool) -> None:
    without, with_bias, changed = interpreter.run(find_those_of_our_order)[0]
    assert without == with_bias == [8, 64, 128]
    assert changed > 0.5, "most outputs show the order"


def cut() -> list[tuple[list[int], bool]]:
    """Multiply numbers of rows; return what the library multiplied, and whether results are right."""
    from moe.gpu.products import library_products as module  # noqa: PLC0415 - in the interpreter

    asked: list[int] = []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        asked.append(len(x))
        out.copy_(torch.nn.functional.linear(x, weight, bias))

    products = module.LibraryProducts((), 0)
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(N, K, generator=generator), torch.randn(N, generator=generator)
    products._alike[module.ProductShape(N, K, torch.float32, True)] = [8, 64, 128]
    found = []
    for rows in (8, 7, 64, 200, 330):
        x = torch.randn(rows, K, generator=generator)
        asked.clear()
        with patch.object(module, "_multiply", multiply):
            ours = products.multiply(x, weight, bias)
        found.append((list(asked), torch.allclose(ours, x @ weight.T + bias, atol=1e-3)))
    return found


def test_rows_are_cut_into_the_sizes_that_have_our_bits(interpreter: RankPool) -> None:
    found = interpreter.run(cut)[0]
    assert found == [([8], True), ([], True), ([64], True), ([128, 64], True), ([128, 128, 64], True)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(5120, 2048), (2048, 4096), (128, 2048), (2880, 4096)])
def test_rows_have_the_same_bits_on_a_gpu_whatever_multiplies_them(shape: tuple[int, int]) -> None:
    from moe.gpu.products.library_products import LibraryProducts, ProductShape  # noqa: PLC0415
    from moe.gpu.products.linear_rows import multiply_rows_alike  # noqa: PLC0415

    device, dtype = torch.device("cuda", 0), torch.bfloat16
    products = LibraryProducts((1, 2, 4, 8, 32, 256), 2048)
    products.try_out([ProductShape(*shape, dtype, False)], device)
    x, weight = torch.randn(1500, shape[1]).to(device, dtype), torch.randn(shape).to(device, dtype)
    whole = multiply_rows_alike(x, weight)
    for rows in (1, 2, 3, 8, 32, 200, 256, 1024, 1500):
        assert torch.equal(products.multiply(x[:rows], weight, None), whole[:rows]), rows
