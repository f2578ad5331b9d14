"""Weights that a kernel of ours multiplies with on a GPU: FP8 ones, and all where rows' bits must be their own.

See `moe.kernel_weight`; the product is the experts' grouped one, with one group. FP8 stays as the checkpoint has it, one
byte a value and a scale per 128 x 128. Plain weights come here where the engine is told to be invariant: cuBLAS takes
another kernel for another number of rows, and adds in another order.

Legend: T rows, K in features, N out features, B blocks.
"""

import torch
from torch import Tensor

from moe.gpu.formats import PLAIN, SCALE_BLOCK, format_of
from moe.gpu.grouped import grouped_linear
from moe.gpu.tiles import DECODE_TILE, FP8_DECODE_TILE, GroupedTile
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

    def tile(self, weight: Tensor) -> GroupedTile | None:
        """Return the tile of a launch; None: what the kernel takes for so many rows."""
        return steady_tile(weight) if self.is_invariant else None


def steady_tile(weight: Tensor) -> GroupedTile:
    """The tile for a weight that gives a row the same bits among any number of rows: the one for few."""
    return DECODE_TILE if format_of(weight) == PLAIN else FP8_DECODE_TILE


class DeviceWeight(KernelWeight):
    """[N, K], presented as of the model's type, held so or as FP8 codes beside their scales."""

    weight_1NK: Tensor
    scales_1BB: Tensor | None
    group: OneGroup

    @staticmethod
    def __new__(
        cls, weight: Tensor | QuantisedWeight, group: OneGroup, dtype: torch.dtype, device: torch.device
    ) -> "DeviceWeight":
        """Copy a weight to the device; `group` is shared by all."""
        self = Tensor._make_wrapper_subclass(
            cls, torch.Size(weight.shape), dtype=dtype, device=device, requires_grad=False
        )
        if isinstance(weight, QuantisedWeight):
            self.weight_1NK = weight.codes[None].to(device)
            self.scales_1BB = weight.block_scales(SCALE_BLOCK)[None].to(device)
        else:
            self.weight_1NK, self.scales_1BB = weight[None].to(device, dtype).contiguous(), None
        self.group = group
        return self

    def plain(self) -> Tensor:
        """The plain weight: [N, K] of the model's type; a copy of FP8 ones."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.scales_1BB is None:
                return self.weight_1NK[0]
            codes, scales = self.weight_1NK[0].float(), self.scales_1BB[0]
            n, k = codes.shape
            wide = scales.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
            return (codes * wide).to(self.dtype)

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
        weight_1NK, group = self.weight_1NK, self.group
        _, n, k = self.weight_1NK.shape
        x_TK = x.reshape(-1, k).contiguous()
        rows = len(x_TK)
        out_TN = grouped_linear(
            x_TK, weight_1NK, group.offsets(rows), group.place_1, num_pairs=rows, scales_WBB=self.scales_1BB,
            tile=group.tile(weight_1NK),
        )  # fmt: skip
        if bias is not None:
            out_TN += bias
        return out_TN.view(*x.shape[:-1], n)

    def embedded(self, ids: Tensor) -> Tensor | None:
        """See `KernelWeight`."""
        return self.weight_1NK[0][ids] if self.scales_1BB is None else None
