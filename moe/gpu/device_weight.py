"""Weights whose product this class defines on a GPU: quantised ones, and all weights in invariant mode.

See `moe.kernel_weight`. Quantised weights stay quantised (`moe.gpu.weights.formats`). Their product is the experts'
grouped one, with one group. Plain weights use this class if the engine must be invariant: cuBLAS changes its kernel, and
sometimes the order of additions, with the number of rows. They use our kernel then (`moe.gpu.products.linear_rows`), and cuBLAS
if it gives the same bits (`moe.gpu.products.library_products`). A model that takes adapters has only such weights; they add what
the adapters of a step's rows give to the products of torch or of these kernels.

Legend: T rows, K in features, N out features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moe.gpu.lora.adapted import AdaptedRows
from moe.gpu.lora.low_rank import DeviceFactorTable
from moe.gpu.products.fp8 import multiply_rows
from moe.gpu.products.library_products import LibraryProducts, ProductShape
from moe.gpu.products.linear_rows import multiply_rows_alike
from moe.gpu.weights.formats import PLAIN, PlacedWeights, format_of, parts_of
from moe.kernel_weight import KernelWeight
from moe.load.quantised_weight import QuantisedWeight


class OneGroup:
    """Arguments of the grouped product if all rows have the same weight; shared by all weights of a model."""

    def __init__(
        self,
        device: torch.device,
        *,
        is_invariant: bool,
        fp8_rows: bool = False,
        products: LibraryProducts | None = None,
        adapted: AdaptedRows | None = None,
    ) -> None:
        """With `is_invariant`, casts of a weight are such weights too; see `format_of` for `fp8_rows`.

        Args:
            products: The library's products that plain weights may use.
            adapted: The rows with adapters. None if the model takes none.
        """
        self.adapted = adapted
        self.is_invariant, self.fp8_rows = is_invariant, fp8_rows
        self.products = products or LibraryProducts((), 0)
        self.weights: list[DeviceWeight] = []  # loaded or joined since the last trial
        self._device = device
        self._offsets: dict[int, Tensor] = {}
        self.place_1 = torch.zeros(1, dtype=torch.int32, device=device)

    def try_products(self) -> None:
        """Find which of the library's products plain weights may use, with biases and without."""
        invariant = self.weights if self.is_invariant else []  # others use torch's products anyway
        whole = [each for each in invariant if each.held.format == PLAIN and not each.is_part]
        shapes = {
            ProductShape(each.shape[0], each.shape[1], each.dtype, bias)
            for each in whole
            for bias in (False, True)
        }
        self.products.try_out(shapes, self._device)
        self.weights.clear()

    def offsets(self, rows: int) -> Tensor:
        """Return [0, rows], int64. Cached for each number of rows, so that a captured step keeps its memory."""
        if rows not in self._offsets:
            self._offsets[rows] = torch.tensor([0, rows], device=self._device)
        return self._offsets[rows]


class DeviceWeight(KernelWeight):
    """A weight [N, K], presented in the model's type, stored in it or quantised."""

    held: PlacedWeights  # with one place
    group: OneGroup
    is_part: bool = False  # of a joined weight, which is multiplied instead
    out_dim: int  # N
    in_dim: int  # K
    adapters: DeviceFactorTable | None  # of its products; None if the model takes no adapters
    embedded_adapters: DeviceFactorTable | None  # of its rows as an embedding
    is_head: bool  # the output projection, which gets the step's `projected_R`

    @staticmethod
    def __new__(
        cls, weight: Tensor | QuantisedWeight, group: OneGroup, dtype: torch.dtype, device: torch.device
    ) -> "DeviceWeight":
        """Copy a weight to the device; `group` is shared by all weights."""
        self = Tensor._make_wrapper_subclass(
            cls, torch.Size(weight.shape), dtype=dtype, device=device, requires_grad=False
        )
        if isinstance(weight, Tensor):
            weight = weight.to(dtype)
        form = format_of(weight, fp8_rows=group.fp8_rows)
        parts = {name: part[None].to(device).contiguous() for name, part in parts_of(weight, form).items()}
        self.held, self.group = PlacedWeights.of(parts, form), group
        self.out_dim, self.in_dim = weight.shape
        self.adapters = self.embedded_adapters = None
        self.is_head = False
        if group.adapted is not None:
            self.adapters, self.embedded_adapters = group.adapted.table(), group.adapted.table()
        return self

    @property
    def takes_rows(self) -> bool:
        """Whether its products were seen with rows of a step."""
        return self.adapters is not None and self.adapters.has_rows

    @property
    def is_quantised(self) -> bool:
        """Whether it is stored as codes."""
        return self.held.format != PLAIN

    def plain(self) -> Tensor:
        """Return the plain weight: [N, K] of the model's type; a copy if it is quantised."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.held.format == PLAIN:
                return self.held.codes[0]
            return self.held.wide(0).to(self.device, self.dtype)

    def stored(self) -> list[Tensor]:
        return [part for part in self.held if isinstance(part, Tensor)]

    def cast(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a type. In invariant mode the result is invariant too, for routers that use float32."""
        cast = super().cast(dtype)
        if cast is self or not (self.group.is_invariant or self.adapters is not None):
            return cast
        made = DeviceWeight(cast, self.group, dtype, cast.device)
        made.adapters = self.adapters
        return made

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        if x.dtype != self.dtype:
            return None
        return self._adapted(x, self._multiplied(x, bias))

    def _adapted(self, x: Tensor, out: Tensor) -> Tensor:
        """Add what the adapters of the rows x give, in place. Return `out`."""
        if self.adapters is not None and self.group.adapted is not None:
            self.group.adapted.add(x, out.view(-1, self.out_dim), self.adapters, is_head=self.is_head)
        return out

    def _multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        n, k = self.out_dim, self.in_dim
        if self.held.format == PLAIN and not self.group.is_invariant:
            return linear(x, self.held.codes[0], bias)
        x_TK = x.reshape(-1, k).contiguous()
        if self.held.format == PLAIN:
            return self.group.products.multiply(x_TK, self.held.codes[0], bias).view(*x.shape[:-1], n)
        rows = len(x_TK)
        out_TN = multiply_rows(x_TK, self.held, self.group.offsets(rows), self.group.place_1, num_pairs=rows)
        assert isinstance(out_TN, Tensor), "a linear layer's output is not quantised"
        if bias is not None:
            out_TN += bias
        return out_TN.view(*x.shape[:-1], n)

    def multiplied_wide(self, x: Tensor) -> Tensor | None:
        if self.held.format != PLAIN or x.dtype != self.dtype or x.dim() != 2:
            return None
        return self._adapted(x, multiply_rows_alike(x.contiguous(), self.held.codes[0], dtype=torch.float32))

    def joined(self, others: Sequence[Tensor]) -> "DeviceWeight | None":
        weights = [self, *(each for each in others if isinstance(each, DeviceWeight))]
        if any(each.held.format != PLAIN for each in weights) or len(weights) <= len(others):
            return None
        if self.adapters is not None:  # each part has its own
            return None
        matrix = torch.cat([each.held.codes[0] for each in weights])
        for each, rows in zip(weights, torch.split(matrix, [each.shape[0] for each in weights]), strict=True):
            each.held = each.held._replace(codes=rows[None])
            each.is_part = True
        joined = DeviceWeight(matrix, self.group, self.dtype, matrix.device)
        self.group.weights.append(joined)
        return joined

    def embedded(self, ids: Tensor) -> Tensor | None:
        if self.held.format != PLAIN:
            return None
        rows = self.held.codes[0][ids]
        if self.embedded_adapters is not None and self.group.adapted is not None:
            self.group.adapted.add_embedded(
                ids.reshape(-1), rows.view(-1, self.in_dim), self.embedded_adapters
            )
        return rows


def try_products(net: nn.Module) -> None:
    """Find which of the library's products a model's plain weights may use."""
    held = (value for module in net.modules() for value in vars(module).values())
    for group in {value.group for value in held if isinstance(value, DeviceWeight)}:
        group.try_products()
