"""Experts in a CPU's memory. Every slot's tensors are allocated separately; kernels find them by address.

A moved expert is put into service by writing its address, and the memory of a removed slot returns to the
system. Weights are in the kernels' panels (`moe.cpu.kernels.panels`), quantised ones as codes with scales.

Legend: S slots of a layer on this rank, N out features, P pairs (row, choice).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attention.cpu.tiles import LANES
from moe.cpu.kernels.panels import Format, PackedCoding, format_of, pack, pack_codes, pack_scales
from moe.cpu.kernels.products import grouped_row
from moe.load.quantised_weight import QuantisedWeight

Parts = dict[str, Tensor]  # tensors of one slot: "" the panels, "scales" of codes, "bias" [out_dim] float32


class PackedSlots:
    """One named weight of all slots of a layer; `moe.backend.Slots`.

    Attributes:
        out_dim: Output features of a row.
        quantised: Format of codes and scales; None if weights are not quantised.
        address_S, scale_address_S: int64 addresses of each slot's current panels and scales.
        format: Sizes and kernels to read each slot's panels.
    """

    def __init__(self, out_dim: int, parts_S: Sequence[Parts], quantised: PackedCoding | None = None) -> None:
        """Serve these slots."""
        self.out_dim, self.quantised = out_dim, quantised
        self._serve(parts_S)

    @classmethod
    def like(cls, weight_NK: Tensor | QuantisedWeight, bias_N: Tensor | None, slots: int) -> "PackedSlots":
        """Reserve zeroed slots for weights and biases of this kind."""
        like = packed(weight_NK, bias_N)
        parts_S = [{name: torch.zeros_like(part) for name, part in like.items()} for _ in range(slots)]
        quantised = PackedCoding.of(weight_NK) if isinstance(weight_NK, QuantisedWeight) else None
        return cls(weight_NK.shape[0], parts_S, quantised)

    def _serve(self, parts_S: Sequence[Parts]) -> None:
        self._parts_S = list(parts_S)
        self.format: Format = format_of(parts_S[0][""], parts_S[0].get("scales"), self.quantised)
        self.address_S = _addresses([parts[""] for parts in parts_S])
        self.scale_address_S = _addresses([parts["scales"] for parts in parts_S if "scales" in parts])
        self._bias_SN = _gathered([parts["bias"] for parts in parts_S if "bias" in parts])

    @property
    def in_dim(self) -> int:
        return self.format.k

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self._parts_S)

    def put(self, slot: int, weight_NK: Tensor | QuantisedWeight, bias_N: Tensor | None = None) -> None:
        """Store one expert's weight [out_dim, in_dim] and bias in a slot."""
        parts = self._parts_S[slot]
        for name, part in packed(weight_NK, bias_N).items():
            parts[name].copy_(part)
        if self._bias_SN is not None:
            self._bias_SN[slot] = parts["bias"]

    def at(self, slot: int) -> "PackedSlots":
        return PackedSlots(self.out_dim, [self._parts_S[slot]], self.quantised)

    def spare(self) -> "PackedSlots":
        parts = {name: torch.zeros_like(part) for name, part in self._parts_S[0].items()}
        return PackedSlots(self.out_dim, [parts], self.quantised)

    def exchange(self, slot: int, new: "PackedSlots") -> "PackedSlots":
        old, parts = self.at(slot), new._parts_S[0]
        self._parts_S[slot] = parts
        self.address_S[slot] = new.address_S[0]
        if self.quantised is not None:
            self.scale_address_S[slot] = new.scale_address_S[0]
        if "bias" in parts:
            self._bias_SN = _gathered([each["bias"] for each in self._parts_S])
        return old

    def rearrange(self, parts: Sequence["PackedSlots"]) -> None:
        self._serve([part._parts_S[0] for part in parts])

    def release(self) -> None:
        """Do nothing: memory is freed with its last reference."""

    def tensors(self) -> Parts:
        return dict(self._parts_S[0])

    @property
    def width(self) -> int:
        """Columns of a product: `out_dim` and the padding of the last panel."""
        return self.format.panels * LANES

    @property
    def has_bias(self) -> bool:
        """Whether `finished` adds a bias."""
        return self._bias_SN is not None

    def product_row(self, x: int, offsets: int, out: int, *, is_gated: bool = False) -> list[int]:
        """Return a program row that multiplies sorted rows with their slots' weights. See `kernels.products.grouped_row`."""
        return grouped_row(
            x, self.format, self.address_S.ctypes.data, self.scale_address_S.ctypes.data, offsets, self.num_slots, out,
            is_gated=is_gated,
        )  # fmt: skip

    def finished(self, out_PN: Tensor, slot_offsets: Tensor) -> Tensor:
        """Cut a product [P, width] to [P, out_dim], contiguous, and add the slots' biases."""
        if out_PN.shape[1] != self.out_dim:
            out_PN = out_PN[:, : self.out_dim].contiguous()
        if self._bias_SN is not None:
            rows_S = slot_offsets.diff()
            out_PN += torch.repeat_interleave(self._bias_SN, rows_S, dim=0, output_size=len(out_PN))
        return out_PN

    @property
    def slot_bytes(self) -> int:
        parts = self._parts_S[0]
        weight = self.out_dim * parts[""].shape[1] * parts[""].element_size()
        return weight + sum(_bytes(part) for name, part in parts.items() if name)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * sum(map(_bytes, self._parts_S[0].values()))


def packed(weight_NK: Tensor | QuantisedWeight, bias_N: Tensor | None) -> Parts:
    """Lay out one expert's weight and bias like a slot."""
    if isinstance(weight_NK, QuantisedWeight):
        parts = {"": pack_codes(weight_NK), "scales": pack_scales(weight_NK)}
    else:
        parts = {"": pack(weight_NK)}
    return parts if bias_N is None else {**parts, "bias": bias_N.float()}


def _gathered(biases: list[Tensor]) -> Tensor | None:
    """Join all slots' biases (a few KB) in advance. For one slot return a view, which may be written later."""
    if len(biases) == 1:
        return biases[0][None]
    return torch.stack(biases) if biases else None


def _addresses(tensors: list[Tensor]) -> np.ndarray:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
