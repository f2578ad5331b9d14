"""Experts in a GPU's memory: one store for all layers with experts of the same kind, and slots that point into it.

A store has a tensor [W, ...] for each part of an expert's weight: the weight itself [W, N, K] (or its codes), scales,
second scales, zeros, a bias. A slot's place among the W is an int32 on the device, which the grouped kernel reads. So
one written number puts a moved expert into service, a captured graph uses it at its next replay, and spare
places serve any layer. The number of places is fixed at the start: growing would move every weight.
Experts come from a checkpoint one at a time, in the kernels' order of rows, quantised or not.

Legend: W places, S slots of a layer on this rank, N out features, K in features.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe.adopt.gates import Gate, arranged, gate_of
from moe.families import leaves
from moe.gpu.weights.formats import PLAIN, DeviceFormat, PlacedWeights, format_of, parts_of
from moe.load.loader import Loader, Weight
from moe.load.quantised_weight import QuantisedWeightError

Kind = tuple[Any, ...]  # kind of a store: leaf, format, and each tensor's name, type and shape


class NoSpareSlotError(RuntimeError):
    """More experts move at once than memory was reserved for."""


class SlotStore:
    """Weights of one kind, by place."""

    def __init__(
        self, places: int, like: Mapping[str, Tensor], *, form: DeviceFormat = PLAIN, device: torch.device
    ) -> None:
        """Reserve zeroed places, all free.

        Args:
            places: W.
            like: One expert's tensors by name, for their types and shapes: "" is the weight; "scales", "row_scales",
                "zeros" and "bias" are its other parts.
            form: Format of the weight.
        """
        self.device = device
        self.parts = {
            name: torch.zeros(places, *tensor.shape, dtype=tensor.dtype, device=device)
            for name, tensor in like.items()
        }
        self.weights = PlacedWeights.of(self.parts, form)
        self._free = list(range(places))

    @property
    def bias(self) -> Tensor | None:
        """Biases [W, N], or None if the family has none."""
        return self.parts.get("bias")

    def at(self, place: int) -> dict[str, Tensor]:
        """Return one place's tensors by name; views."""
        return {name: tensor[place] for name, tensor in self.parts.items()}

    def take(self) -> int:
        """Take a free place.

        Raises:
            NoSpareSlotError: No place is free.
        """
        if not self._free:
            raise NoSpareSlotError(
                f"all {len(self.weights.codes)} places for experts of this kind are in use; move fewer experts at once"
            )
        return self._free.pop(0)

    def give(self, place: int) -> None:
        """Return a place that no slot uses."""
        self._free.append(place)

    @property
    def place_bytes(self) -> int:
        """Bytes of one place."""
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self.parts.values())


class DeviceSlots:
    """One named weight of some slots of a layer; `moe.backend.Slots`.

    Attributes:
        store: Store of the weights.
        places_S: int32 places on the device.
    """

    def __init__(self, store: SlotStore, places: Sequence[int]) -> None:
        """Point at places of a store."""
        self.store, self._places = store, list(places)
        self.places_S = torch.tensor(self._places, dtype=torch.int32, device=store.device)

    @property
    def in_dim(self) -> int:
        return self.store.weights.in_dim

    @property
    def out_dim(self) -> int:
        """Number of outputs."""
        return self.store.weights.codes.shape[1]

    @property
    def slot_bytes(self) -> int:
        return self.store.place_bytes

    @property
    def num_bytes(self) -> int:
        return self.store.place_bytes * len(self._places)

    def put(self, slot: int, parts: Mapping[str, Tensor]) -> None:
        """Store one expert's tensors in a slot."""
        for name, tensor in self.store.at(self._places[slot]).items():
            tensor.copy_(parts[name])

    def tensors(self) -> dict[str, Tensor]:
        return self.store.at(self._places[0])

    def at(self, slot: int) -> "DeviceSlots":
        return DeviceSlots(self.store, [self._places[slot]])

    def spare(self) -> "DeviceSlots":
        """Take a place that no slot uses.

        Raises:
            NoSpareSlotError: No place is free.
        """
        return DeviceSlots(self.store, [self.store.take()])

    def release(self) -> None:
        """Return the first slot's place to the store. Nothing may serve it afterwards."""
        self.store.give(self._places[0])

    def rearrange(self, parts: Sequence["DeviceSlots"]) -> None:
        """Use the places of single slots, in this order, from the next launch on.

        Raises:
            NoSpareSlotError: The number of slots would change.
        """
        if len(parts) != len(self._places):
            raise NoSpareSlotError(
                f"a layer would have {len(parts)} slots on this GPU; their number was fixed to {len(self._places)} "
                f"at the start"
            )
        self._places = [part._places[0] for part in parts]
        self.places_S.copy_(torch.tensor(self._places, dtype=torch.int32))

    def exchange(self, slot: int, new: "DeviceSlots") -> "DeviceSlots":
        """Let a slot use the place of `new`, from the next launch on. Return its old place."""
        assert new.store is self.store, "an expert of another kind"
        old, self._places[slot] = self._places[slot], new._places[0]
        self.places_S[slot] = new._places[0]
        return DeviceSlots(self.store, [old])


class DeviceExperts:
    """`moe.backend.ExpertReader` that fills the stores of one model."""

    def __init__(
        self,
        loader: Loader,
        modules: Mapping[str, Any],
        slots_per_layer: int,
        num_spare: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        fp8_rows: bool = False,
    ) -> None:
        """Reserve a store for each kind of weight, with the slots of all layers of this kind and the spare ones.

        Args:
            modules: Experts modules by name, with their parameters on meta.
            num_spare: Places of each store beyond the slots.
            dtype: Type of weights that are not quantised, and of biases.
            fp8_rows: Whether rows are quantised if the checkpoint does so.
        """
        self.loader, self._modules, self._dtype, self._fp8_rows = loader, modules, dtype, fp8_rows
        self._device = device
        self._gates = {name: gate_of(module) for name, module in modules.items()}
        likes = {(name, leaf): self._like(name, leaf) for name in modules for leaf in leaves(modules[name])}
        self._kinds = {at: _kind_of(at[1], like) for at, like in likes.items()}
        one_of = {kind: likes[at] for at, kind in self._kinds.items()}
        self._stores = {
            kind: SlotStore(
                count * slots_per_layer + num_spare, one_of[kind].parts, form=one_of[kind].form, device=device
            )
            for kind, count in Counter(self._kinds.values()).items()
        }

    def load(self, name: str, leaf: str, local_S: np.ndarray) -> DeviceSlots:
        store = self._stores[self._kinds[name, leaf]]
        slots = DeviceSlots(store, [store.take() for _ in local_S])
        self._fill(name, leaf, local_S, slots)
        return slots

    def read(self, name: str, leaf: str, expert: int, into: DeviceSlots) -> None:
        """Read one weight of one expert. Does not need the modules' parameters, which may be gone."""
        self._fill(name, leaf, np.array([expert]), into)

    def _fill(self, name: str, leaf: str, local_S: np.ndarray, slots: DeviceSlots) -> None:
        read = self.loader.read_experts(self._modules[name], f"{name}.{leaf}", local_S)
        wanted = _types(slots.store.parts, leading=1)
        for slot, weight, bias in read:
            made = self._stored(name, leaf, weight, bias, slots.store.weights.format)
            if _types(made.parts) != wanted:
                raise QuantisedWeightError(
                    f"{name}.{leaf}: expert {local_S[slot]} has {_types(made.parts)}; the first expert has {wanted}"
                )
            slots.put(slot, made.parts)

    def _like(self, name: str, leaf: str) -> "_Stored":
        """Return an expert of a layer as an example: on meta, or read if it is quantised."""
        module, target = self._modules[name], f"{name}.{leaf}"
        weight: Weight = torch.empty(getattr(module, leaf).shape[1:], device="meta")
        if module.is_transposed and isinstance(weight, Tensor):
            weight = weight.T
        bias = (
            torch.empty(getattr(module, f"{leaf}_bias").shape[1:], device="meta") if module.has_bias else None
        )
        if self.loader.is_quantised(target):
            _, weight, bias = next(self.loader.read_experts(module, target, np.zeros(1, np.int64)))
        return self._stored(name, leaf, weight, bias)

    def _stored(
        self, name: str, leaf: str, weight: Weight, bias: Tensor | None, form: DeviceFormat | None = None
    ) -> "_Stored":
        """Convert one expert for the kernels, to `form` or its own format."""
        gate = Gate("none") if leaf == "down_proj" else self._gates[name]
        weight = self.loader.stored(f"{name}.{leaf}", weight)
        if isinstance(weight, Tensor):
            weight = arranged(weight.to(self._dtype), gate)
        else:
            # On the device, which orders codes faster. Examples stay on meta.
            in_order: dict[str, Any] = {
                part: arranged(tensor if tensor.is_meta else tensor.to(self._device), gate)
                for part, tensor in weight.tensors().items()
            }
            weight = replace(weight, **in_order)
        form = form or format_of(weight, fp8_rows=self._fp8_rows)
        parts = parts_of(weight, form)
        if bias is not None:
            parts["bias"] = arranged(bias.to(self._dtype), gate)
        return _Stored(form, parts)


class _Stored(NamedTuple):
    """One expert's tensors by name, and the format of its weight."""

    form: DeviceFormat
    parts: dict[str, Tensor]


def _kind_of(leaf: str, like: _Stored) -> Kind:
    return leaf, like.form, *_types(like.parts)


def _types(parts: Mapping[str, Tensor], *, leading: int = 0) -> list[tuple[Any, ...]]:
    """Return each tensor's name, type and shape without leading dimensions."""
    return [(name, tensor.dtype, *tensor.shape[leading:]) for name, tensor in parts.items()]
