"""Weights that one of our kernels multiplies on a GPU: quantised ones, and all weights in invariant mode.

See `moe.kernel_weight`. The product is the experts' grouped one, with one group. Quantised weights stay
quantised (`moe.gpu.formats`). Plain weights use this class if the engine must be invariant: cuBLAS changes
its kernel, and the order of additions, with the number of rows.

Legend: T rows, K in features, N out features.
"""

import torch
from torch import Tensor

from moe.gpu.formats import PLAIN, PlacedWeights, format_of, parts_of
from moe.gpu.fp8 import multiply_rows
from moe.gpu.tiles import DECODE_TILE, QUANTISED_DECODE_TILE, GroupedTile
from moe.kernel_weight import KernelWeight
from moe.load.quantised_weight import QuantisedWeight


class OneGroup:
    """Arguments of the grouped product if all rows have the same weight; shared by all weights of a model."""

    def __init__(self, device: torch.device, *, is_invariant: bool, fp8_rows: bool = False) -> None:
        """With `is_invariant` the tile gives the same bits for any number of rows; see `format_of` for `fp8_rows`."""
        self.is_invariant, self.fp8_rows = is_invariant, fp8_rows
        self._device = device
        self._offsets: dict[int, Tensor] = {}
        self.place_1 = torch.zeros(1, dtype=torch.int32, device=device)

    def offsets(self, rows: int) -> Tensor:
        """Return [0, rows], int64. Cached for each number of rows, so that a captured step keeps its memory."""
        if rows not in self._offsets:
            self._offsets[rows] = torch.tensor([0, rows], device=self._device)
        return self._offsets[rows]

    def tile(self, weights: PlacedWeights) -> GroupedTile | None:
        """Return the tile of a launch, or None to choose it by the number of rows."""
        return steady_tile(weights) if self.is_invariant else None


def steady_tile(weights: PlacedWeights) -> GroupedTile:
    """Return the tile that gives a row the same bits for any number of rows: the one for few."""
    return DECODE_TILE if weights.format == PLAIN else QUANTISED_DECODE_TILE


class DeviceWeight(KernelWeight):
    """A weight [N, K], presented in the model's type, stored in it or quantised."""

    held: PlacedWeights  # with one place
    group: OneGroup

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
        return self

    def plain(self) -> Tensor:
        """Return the plain weight: [N, K] of the model's type; a copy if it is quantised."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.held.format == PLAIN:
                return self.held.codes[0]
            return self.held.wide(0).to(self.device, self.dtype)

    def cast(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a type. In invariant mode the result is invariant too, for routers that use float32."""
        cast = super().cast(dtype)
        if cast is self or not self.group.is_invariant:
            return cast
        return DeviceWeight(cast, self.group, dtype, cast.device)

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        if x.dtype != self.dtype:
            return None
        n, k = self.shape
        x_TK = x.reshape(-1, k).contiguous()
        rows = len(x_TK)
        out_TN = multiply_rows(
            x_TK, self.held, self.group.offsets(rows), self.group.place_1, num_pairs=rows, tile=self.group.tile(self.held)
        )  # fmt: skip
        assert isinstance(out_TN, Tensor), "a linear layer's output is not quantised"
        if bias is not None:
            out_TN += bias
        return out_TN.view(*x.shape[:-1], n)

    def embedded(self, ids: Tensor) -> Tensor | None:
        return self.held.codes[0][ids] if self.held.format == PLAIN else None
