"""A weight of a linear layer, an embedding or a router, stored in panels for the CPU kernels.

The CPU's `moe.kernel_weight`.

Legend: T tokens (rows), K input features, N output features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.cpu.tiles import LANES
from kvcache.step import Step
from moe.cpu.kernels.panels import (
    Format,
    PackedCoding,
    format_of,
    pack,
    pack_codes,
    pack_scales,
    unpack,
    unpack_quantised,
)
from moe.cpu.kernels.products import linear
from moe.kernel_weight import KernelWeight
from moe.load.quantised_weight import QuantisedWeight


class PackedWeight(KernelWeight):
    """[N, K], presented as float32, stored as panels of float32 or bfloat16, or of codes with scales."""

    panels: Tensor  # [ceil(N / 16), K, 16]
    scales: Tensor | None  # [ceil(N / 16), bytes] uint8, for codes
    quantised: PackedCoding | None  # format of codes and scales
    format: Format
    out_dim: int  # N
    in_dim: int  # K
    step: Step

    @staticmethod
    def __new__(cls, weight_NK: Tensor | QuantisedWeight, step: Step) -> "PackedWeight":
        """Pack a [N, K] weight. `step` is the model's step, with the number of real rows in a batch."""
        self = Tensor._make_wrapper_subclass(
            cls,
            torch.Size(weight_NK.shape),
            dtype=torch.float32,
            device=torch.device("cpu"),
            requires_grad=False,
        )
        self.scales = self.quantised = None
        if isinstance(weight_NK, QuantisedWeight):
            self.panels, self.scales = pack_codes(weight_NK), pack_scales(weight_NK)
            self.quantised = PackedCoding.of(weight_NK)
        else:
            self.panels = pack(weight_NK)
        self.format = format_of(self.panels, self.scales, self.quantised)
        self.out_dim, self.in_dim = weight_NK.shape
        self.step = step
        return self

    def plain(self) -> Tensor:
        """Return the weight unpacked: [N, K] float32, a copy."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.scales is not None and self.quantised is not None:
                return unpack_quantised(self.panels, self.scales, self.out_dim, self.quantised).dequantised()
            return unpack(self.panels, self.shape[0]).float()

    def stored(self) -> Sequence[Tensor]:
        return [self.panels] if self.scales is None else [self.panels, self.scales]

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Multiply x with the weight; padding rows return zeros. Returns None for unsupported rows.

        Called about ten times per layer. It reads plain attributes of this weight, because tensor properties
        would go through __torch_function__.
        """
        if x.dtype is not torch.float32 or x.shape[-1:] != (self.in_dim,):
            return None
        n, step, panels = self.out_dim, self.step, self.panels
        x_TK = x.reshape(-1, self.in_dim)
        rows = x_TK.shape[0]
        # Padding is not computed. The packed batch is [T, K] or [1, T, K]; an input with more dimensions is something
        # else that may happen to have the same number of rows.
        real = step.num_tokens if rows == step.num_padded and x.dim() <= 3 else rows
        width = panels.shape[0] * LANES
        out_TN = torch.empty(rows, width) if real == rows else torch.zeros(rows, width)
        if real < rows:
            x_TK = x_TK[:real]
        if x_TK.stride(1) != 1:
            x_TK = x_TK.clone(memory_format=torch.contiguous_format)
        linear(x_TK, panels, self.scales, self.format, out_TN, step.team)
        if width != n:
            out_TN = out_TN[:, :n].contiguous()
        if bias is not None:
            out_TN += bias
        return out_TN.view(*x.shape[:-1], n)

    def embedded(self, ids: Tensor) -> Tensor | None:
        """Return the rows of some ids, or None if the weight is quantised (no supported format quantises embeddings)."""
        if self.scales is not None:
            return None
        flat = ids.reshape(-1)
        rows_TK = self.panels[flat // LANES, :, flat % LANES]
        return rows_TK.float().view(*ids.shape, self.in_dim)
