"""Products of torch's library (cuBLAS) with the bits of `linear_rows`, as a trial has found.

Most of cuBLAS' kernels add an output's products in the order of the inputs, 16 at a time, as ours do. Some split the inputs
among programs, mostly for few rows. cuBLAS chooses by the shape, so a trial at start multiplies with each number of
rows that steps are padded to, and compares bits. Other numbers of rows are cut into those. What has other bits is
multiplied by our kernel, so it does not matter which of the two runs: no bit depends on it, on any rank.

In a trial every product occurs twice, with opposite signs and in random places. So a sum is what rounding left of it, and another
order of additions changes almost every output, though it would change few that are rounded to bfloat16 as they are.

Legend: T rows, N out features, K in features.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from moe.gpu.products.linear_rows import multiply_rows_alike

_PIECE = 64  # least rows of a piece; steps with prompts are padded to multiples
_DENSE = 1024  # up to here all multiples are tried, beyond it doubled sizes
_MOST_BYTES = 256 << 20  # of a trial's results


class ProductShape(NamedTuple):
    """Shape of products, apart from the number of rows."""

    N: int
    K: int
    dtype: torch.dtype
    has_bias: bool


class LibraryProducts:
    """The numbers of rows for which the library's products have our bits, by shape."""

    def __init__(self, decode_sizes: Iterable[int], max_rows: int) -> None:
        """Try no shape yet. `decode_sizes`: to which steps without prompts are padded; `max_rows`: of a step."""
        sizes = {*decode_sizes, *range(_PIECE, min(_DENSE, max_rows) + 1, _PIECE)}
        size = 2 * _DENSE
        while size <= max_rows:
            sizes.add(size)
            size *= 2
        self._sizes = sorted(sizes)
        self._alike: dict[ProductShape, list[int]] = {}

    def try_out(self, shapes: Iterable[ProductShape], device: torch.device) -> None:
        """Find the numbers of rows for shapes. If memory is short, a shape is multiplied by our kernel."""
        for shape in shapes:
            if shape.dtype.itemsize == 2 and shape.K % 2 == 0 and device.type == "cuda":
                try:
                    self._alike[shape] = self._try(shape, device)
                except torch.OutOfMemoryError:
                    self._alike[shape] = []
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def multiply(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias, [T, N]; all contiguous. A row's bits do not depend on the other rows."""
        (T, K), N = x_TK.shape, len(weight_NK)
        alike = self._alike.get(ProductShape(N, K, weight_NK.dtype, bias_N is not None))
        if not alike:
            return multiply_rows_alike(x_TK, weight_NK, bias_N)
        out, at = x_TK.new_empty(T, N), 0
        for rows in _pieces(T, alike):
            _multiply(x_TK[at : at + rows], weight_NK, bias_N, out[at : at + rows])
            at += rows
        if at < T:
            multiply_rows_alike(x_TK[at:], weight_NK, bias_N, out=out[at:])
        return out

    def _try(self, shape: ProductShape, device: torch.device) -> list[int]:
        sizes = [size for size in self._sizes if size * shape.N * shape.dtype.itemsize <= _MOST_BYTES]
        x_TK, weight_NK = _cancelling(shape, sizes[-1], device)
        want = multiply_rows_alike(x_TK, weight_NK)
        spread = float(want.float().abs().mean())
        if spread == 0.0:
            return []
        bias_N = None
        if shape.has_bias:
            bias_N = torch.randn(shape.N, device=device).mul(spread).to(shape.dtype)
            want = multiply_rows_alike(x_TK, weight_NK, bias_N)
        out = torch.empty_like(want)

        def is_alike(size: int) -> bool:
            _multiply(x_TK[:size], weight_NK, bias_N, out[:size])
            return torch.equal(out[:size], want[:size])

        return [size for size in sizes if is_alike(size)]


def _pieces(rows: int, sizes: list[int]) -> list[int]:
    """Return sizes of pieces for up to `rows` rows: all at once if that is a size, otherwise the largest first."""
    if rows in sizes:
        return [rows]
    found, large = [], [size for size in sizes if size >= _PIECE]
    for size in reversed(large):
        while rows >= size:
            found.append(size)
            rows -= size
    return found


def _multiply(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out: Tensor) -> None:
    if bias_N is None:
        torch.mm(x_TK, weight_NK.t(), out=out)
    else:
        torch.addmm(bias_N, x_TK, weight_NK.t(), out=out)


def _cancelling(shape: ProductShape, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw rows and a weight. Their exact product is zero; its terms are not."""
    generator = torch.Generator(device).manual_seed(0)
    half = shape.K // 2
    order_K = torch.randperm(shape.K, generator=generator, device=device)

    def drawn(count: int, sign: int) -> Tensor:
        part = torch.randn(count, half, generator=generator, device=device, dtype=shape.dtype)
        return torch.cat((part, part * sign), dim=1)[:, order_K].contiguous()

    return drawn(rows, -1), drawn(shape.N, 1)
