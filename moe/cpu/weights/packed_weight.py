"""A weight of a linear layer, an embedding or a router, stored in panels for the CPU kernels.

The CPU's `moe.kernel_weight`.

Legend: T tokens (rows), K input features, N output features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.cpu.tiles import LANES
from kvcache.step import Step
from moe.cpu.kernels.low_rank import adapt
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
from moe.lora.tables import NO_ADAPTER, FactorTable


class PackedWeight(KernelWeight):
    """[N, K], presented as float32, stored as panels of float32 or bfloat16, or of codes with scales."""

    panels: Tensor  # [ceil(N / 16), K, 16]
    scales: Tensor | None  # [ceil(N / 16), bytes] uint8, for codes
    quantised: PackedCoding | None  # format of codes and scales
    format: Format
    out_dim: int  # N
    in_dim: int  # K
    step: Step
    adapters: FactorTable | None  # of its products; None if the model takes no adapters
    embedded_adapters: FactorTable | None  # of its rows as an embedding
    is_head: bool  # the output projection, which gets the step's `projected_R`
    takes_rows: bool  # its products were seen with rows that are known; see `_places`

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
        self.adapters = self.embedded_adapters = None
        self.is_head = self.takes_rows = False
        if step.num_adapters:
            self.adapters, self.embedded_adapters = (FactorTable(step.num_adapters) for _ in range(2))
        return self

    @property
    def is_quantised(self) -> bool:
        """Whether it is stored as codes."""
        return self.quantised is not None

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
        if self.adapters is not None:
            self._adapt(self.adapters, x_TK, out_TN, rows, x.dim())
        return out_TN.view(*x.shape[:-1], n)

    def _adapt(self, table: FactorTable, x_TK: Tensor, out_TN: Tensor, rows: int, dim: int) -> None:
        """Add what the rows' adapters give, in place."""
        place_T = self._places(rows, dim)
        self.takes_rows = self.takes_rows or place_T is not None
        if not self.step.has_adapters or table.is_empty:
            return
        assert place_T is not None, f"a weight [{self.out_dim}, {self.in_dim}] takes no adapters and has one"
        adapt(x_TK, place_T, table, out_TN, self.step.team)

    def _places(self, rows: int, dim: int) -> Tensor | None:
        """Return the places of the rows' adapters, or None if it is unknown which rows of the step they are."""
        step = self.step
        if self.is_head and step.projected_R is not None and len(step.projected_R) == rows:
            return step.adapter_T[step.projected_R]
        return step.adapter_T if rows == step.num_padded and dim <= 3 else None

    def embedded(self, ids: Tensor) -> Tensor | None:
        """Return the rows of some ids, or None if the weight is quantised (no supported format quantises embeddings)."""
        if self.scales is not None:
            return None
        flat = ids.reshape(-1)
        rows_TK = self.panels[flat // LANES, :, flat % LANES].float()
        table, step = self.embedded_adapters, self.step
        if table is not None and step.has_adapters and not table.is_empty and len(flat) == step.num_padded:
            rows_TK = self._with_adapters(table, flat, rows_TK)
        return rows_TK.view(*ids.shape, self.in_dim)

    def _with_adapters(self, table: FactorTable, ids_T: Tensor, rows_TK: Tensor) -> Tensor:
        """Add what the rows' adapters give to an embedding's rows: a row of A for each id, times B."""
        real = self.step.num_tokens
        for place in {*self.step.adapter_T[:real].tolist()} - {NO_ADAPTER}:
            factors = table.factors(place)
            if factors is None:
                continue
            # The identity as A: the looked-up row is multiplied with B in the order of any other product.
            once = FactorTable(1)
            a_KW = factors.a_KW
            once.put(0, factors._replace(a_KW=torch.eye(a_KW.shape[1], dtype=a_KW.dtype)))
            chosen_T = torch.where(self.step.adapter_T[:real] == place, 0, -1)
            adapt(a_KW[ids_T[:real]].float(), chosen_T, once, rows_TK, None)
        return rows_TK
