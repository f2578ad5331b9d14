"""Linear layers in which rows have the same bits in any batch: in Triton's interpreter, and on a GPU if there is one."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from tests.fixtures import OnDevice
from tests.support.gpu.attention import dtypes_on

N, K = 147, 136  # no multiple of a tile; K is the interpreter's: its alignment is any
ROWS = (1, 17, 70)
MANY = 300


def multiply_like_torch(device: str) -> None:
    from moe.gpu.products.linear_rows import WIDE_TILE, multiply_rows_alike  # noqa: PLC0415 - in the interpreter

    for dtype in dtypes_on(device, torch.float32):
        generator = torch.Generator().manual_seed(1)
        x, weight, bias = (
            torch.randn(*size, generator=generator).to(device, dtype)
            for size in ((max(ROWS), K), (N, K), (N,))
        )
        tile = WIDE_TILE._replace(rows=32) if dtype == torch.float32 else None
        whole = multiply_rows_alike(x, weight, bias, tile=tile)
        want = x.double() @ weight.double().T
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        assert (whole.double() - want - bias.double()).abs().max() < bound * want.abs().max()
        for rows in ROWS:
            assert torch.equal(multiply_rows_alike(x[:rows], weight, bias, tile=tile), whole[:rows])
        wide = multiply_rows_alike(x, weight, dtype=torch.float32)
        assert wide.dtype == torch.float32 and (wide - want).abs().max() < 1e-4
        assert multiply_rows_alike(x[:0], weight).shape == (0, N)


def test_products_equal_torchs_and_rows_have_the_same_bits_among_any_others(on_device: OnDevice) -> None:
    on_device(multiply_like_torch)


def refuse(_device: str) -> None:
    from moe.gpu.products.linear_rows import multiply_rows_alike  # noqa: PLC0415 - in the interpreter

    x, weight = torch.zeros(4, 8), torch.zeros(6, 8)
    refused = (
        ((x, weight.double()), "both must be the same"),
        ((x, weight[:, :4]), "with 4"),
        ((x, torch.zeros(8, 6).T), "contiguous"),
    )
    for odd, text in refused:
        with pytest.raises(ValueError, match=text):
            multiply_rows_alike(*odd)


def test_other_types_and_layouts_are_refused(on_device: OnDevice) -> None:
    on_device(refuse)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(5120, 2048), (2048, 4096), (128, 2048), (5120, 2880)])
def test_all_tiles_give_a_gpus_rows_the_same_bits(shape: tuple[int, int]) -> None:
    from moe.gpu.products.linear_rows import TILES, multiply_rows_alike  # noqa: PLC0415

    for dtype in (torch.bfloat16, torch.float16):
        x, weight = torch.randn(MANY, shape[1]).to("cuda", dtype), torch.randn(shape).to("cuda", dtype)
        whole = multiply_rows_alike(x, weight)
        for tile in TILES:
            for rows in (1, 16, 33, MANY):
                found = multiply_rows_alike(x[:rows], weight, tile=tile)
                assert torch.equal(found, whole[:rows]), (tile, rows, dtype)
