"""Experts in a GPU's memory: one store for all layers whose experts look alike, and slots that point into it.

A store has a tensor [W, ...] for each thing that belongs to an expert's weight: the weight itself [W, N, K] (or its
codes), scales, a bias. Which of the W places a slot has is an int32 on the device, which the grouped kernel reads. So
an expert that has moved is switched to by writing one number, a captured graph sees it at its next replay, and spare
places serve any layer. The number of places is fixed at the start: growing would move every weight.

Legend: W places, S slots of a layer on this rank, N out features, K in features.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class NoSpareSlotError(RuntimeError):
    """More experts move at once than there was memory reserved for."""


class SlotStore:
    """Weights of one kind, by place."""

    def __init__(self, places: int, like: Mapping[str, Tensor], *, in_dim: int, device: torch.device) -> None:
        """Reserve zeroed places, all free.

        Args:
            places: W.
            like: one expert's tensors by name: "" is the weight, "scales" and "bias" what comes with it; only types
                and shapes are used.
            in_dim: K.
        """
        self.in_dim, self.device = in_dim, device
        self.parts = {
            name: torch.zeros(places, *tensor.shape, dtype=tensor.dtype, device=device)
            for name, tensor in like.items()
        }
        self._free = list(range(places))

    @property
    def weight(self) -> Tensor:
        """[W, N, K], or codes."""
        return self.parts[""]

    @property
    def scales(self) -> Tensor | None:
        """[W, ...] of quantised weights."""
        return self.parts.get("scales")

    @property
    def bias(self) -> Tensor | None:
        """[W, N]; None where the family has none."""
        return self.parts.get("bias")

    def at(self, place: int) -> dict[str, Tensor]:
        """One place's tensors by name; views."""
        return {name: tensor[place] for name, tensor in self.parts.items()}

    def take(self) -> int:
        """Take a free place.

        Raises:
            NoSpareSlotError: there is none.
        """
        if not self._free:
            raise NoSpareSlotError(
                f"all {len(self.weight)} places for experts of this kind are taken; move fewer experts at once"
            )
        return self._free.pop(0)

    @property
    def place_bytes(self) -> int:
        """Bytes of one place."""
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self.parts.values())


class DeviceSlots:
    """One named weight of some slots of a layer; `moe.backend.Slots`.

    Attributes:
        store: where the weights are.
        places_S: int32 on the device.
    """

    def __init__(self, store: SlotStore, places: Sequence[int]) -> None:
        """Point at places of a store."""
        self.store, self._places = store, list(places)
        self.places_S = torch.tensor(self._places, dtype=torch.int32, device=store.device)

    @property
    def in_dim(self) -> int:
        """Features that a row comes with."""
        return self.store.in_dim

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert's weight, scales and bias."""
        return self.store.place_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.store.place_bytes * len(self._places)

    def put(self, slot: int, parts: Mapping[str, Tensor]) -> None:
        """Store one expert's tensors in a slot."""
        for name, tensor in self.store.at(self._places[slot]).items():
            tensor.copy_(parts[name])

    def tensors(self) -> dict[str, Tensor]:
        """All that belongs to the first slot, by name: "" is the weight; views."""
        return self.store.at(self._places[0])

    def at(self, slot: int) -> "DeviceSlots":
        """One slot by itself; its memory is the slot's."""
        return DeviceSlots(self.store, [self._places[slot]])

    def spare(self) -> "DeviceSlots":
        """Take a place that no slot has.

        Raises:
            NoSpareSlotError: there is none.
        """
        return DeviceSlots(self.store, [self.store.take()])

    def rearrange(self, parts: Sequence["DeviceSlots"]) -> None:
        """Serve the places of single slots, in this order, from the next launch on.

        Raises:
            NoSpareSlotError: that would be another number of slots.
        """
        if len(parts) != len(self._places):
            raise NoSpareSlotError(
                f"a layer would have {len(parts)} slots on this GPU; their number was fixed to {len(self._places)} "
                f"at the start"
            )
        self._places = [part._places[0] for part in parts]
        self.places_S.copy_(torch.tensor(self._places, dtype=torch.int32))

    def exchange(self, slot: int, new: "DeviceSlots") -> "DeviceSlots":
        """Let a slot serve the place of `new`, from the next launch on; returns the place that it had."""
        assert new.store is self.store, "an expert of another kind"
        old, self._places[slot] = self._places[slot], new._places[0]
        self.places_S[slot] = new._places[0]
        return DeviceSlots(self.store, [old])
