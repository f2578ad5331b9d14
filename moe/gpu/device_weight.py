"""Weights that a kernel of ours multiplies with on a GPU: quantised ones, and all where rows' bits must be their own.

See `moe.kernel_weight`; the product is the experts' grouped one, with one group. Quantised weights stay as the checkpoint
has them (`moe.gpu.formats`). Plain weights come here where the engine is told to be invariant: cuBLAS takes
another kernel for another number of rows, and adds in another order.

Legend: T rows, K in features, N out features.
"""

import torch
from torch import Tensor

from moe.gpu.formats import PLAIN, PlacedWeights, format_of, parts_of
from moe.gpu.grouped import grouped_linear
from moe.gpu.tiles import DECODE_TILE, QUANTISED_DECODE_TILE, GroupedTile
from moe.kernel_weight import KernelWeight
from moe.load.quantised_weight import QuantisedWeight


class OneGroup:
    """What the grouped product is told where all rows have one weight; shared by all weights of a model."""

    def __init__(self, device: torch.device, *, is_invariant: bool) -> None:
        """With `is_invariant` the tile has the same bits for any number of rows."""
        self.is_invariant = is_invariant
        self._device = device
        self._offsets: dict[int, Tensor] = {}
        self.place_1 = torch.zeros(1, dtype=torch.int32, device=device)

    def offsets(self, rows: int) -> Tensor:
        """Return [0, rows], int64; made once for each number of rows, so that a captured step finds them there."""
        if rows not in self._offsets:
            self._offsets[rows] = torch.tensor([0, rows], device=self._device)
        return self._offsets[rows]

    def tile(self, weights: PlacedWeights) -> GroupedTile | None:
        """Return the tile of a launch; None: what the kernel takes for so many rows."""
        return steady_tile(weights) if self.is_invariant else None


def steady_tile(weights: PlacedWeights) -> GroupedTile:
    """The tile for weights that gives a row the same bits among any number of rows: the one for few."""
    return DECODE_TILE if weights.format == PLAIN else QUANTISED_DECODE_TILE


class DeviceWeight(KernelWeight):
    """[N, K], presented as of the model's type, held so or quantised."""

    held: PlacedWeights  # of one place
    group: OneGroup

    @staticmethod
    def __new__(
        cls, weight: Tensor | QuantisedWeight, group: OneGroup, dtype: torch.dtype, device: torch.device
    ) -> "DeviceWeight":
        """Copy a weight to the device; `group` is shared by all."""
        self = Tensor._make_wrapper_subclass(
            cls, torch.Size(weight.shape), dtype=dtype, device=device, requires_grad=False
        )
        if isinstance(weight, Tensor):
            weight = weight.to(dtype)
        form = format_of(weight)
        parts = {name: part[None].to(device).contiguous() for name, part in parts_of(weight, form).items()}
        self.held, self.group = PlacedWeights.of(parts, form), group
        return self

    def plain(self) -> Tensor:
        """The plain weight: [N, K] of the model's type; a copy of a quantised one."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.held.format == PLAIN:
                return self.held.codes[0]
            return self.held.wide(0).to(self.device, self.dtype)

    def cast(self, dtype: torch.dtype) -> Tensor:
        """See `KernelWeight`. A router that multiplies in float32 is to be as invariant as all others."""
        cast = super().cast(dtype)
        if cast is self or not self.group.is_invariant:
            return cast
        return DeviceWeight(cast, self.group, dtype, cast.device)

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """See `KernelWeight`."""
        if x.dtype != self.dtype:
            return None
        n, k = self.shape
        x_TK = x.reshape(-1, k).contiguous()
        rows = len(x_TK)
        out_TN = grouped_linear(
            x_TK, self.held, self.group.offsets(rows), self.group.place_1, num_pairs=rows, tile=self.group.tile(self.held)
        )  # fmt: skip
        if bias is not None:
            out_TN += bias
        return out_TN.view(*x.shape[:-1], n)

    def embedded(self, ids: Tensor) -> Tensor | None:
        """See `KernelWeight`."""
        return self.held.codes[0][ids] if self.held.format == PLAIN else None
