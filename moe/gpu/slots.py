"""Experts in a GPU's memory: one store for all layers whose experts look alike, and slots that point into it.

A store has a tensor [W, ...] for each thing that belongs to an expert's weight: the weight itself [W, N, K] (or its
codes), scales, a bias. Which of the W places a slot has is an int32 on the device, which the grouped kernel reads. So
an expert that has moved is switched to by writing one number, a captured graph sees it at its next replay, and spare
places serve any layer. The number of places is fixed at the start: growing would move every weight.
Experts come from a checkpoint one at a time, in the kernels' order of rows, quantised or not.

Legend: W places, S slots of a layer on this rank, N out features, K in features.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe.adopt.gates import Gate, arranged, gate_of
from moe.families import leaves
from moe.gpu.formats import SCALE_BLOCK
from moe.load.loader import Loader, Weight
from moe.load.quantised_weight import QuantisedWeight

Kind = tuple[Any, ...]  # leaf, in features, and each tensor's name, type and shape: what a store is for


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

    def give(self, place: int) -> None:
        """Take a place back that no slot has."""
        self._free.append(place)

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

    def release(self) -> None:
        """Give the first slot's place back to the store; nothing may serve it any more."""
        self.store.give(self._places[0])

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


def fused_gate(module: Any, *, is_fp8: bool) -> Gate:
    """The gate that the kernel applies: "none" where scales of 128 rows would be shared by gate and up."""
    gate = gate_of(module)
    rows = module.gate_up_proj.shape[2 if module.is_transposed else 1] // 2 if module.has_gate else 0
    return Gate("none") if is_fp8 and (gate.is_interleaved or rows % SCALE_BLOCK) else gate


class DeviceExperts:
    """Fills the stores of one model; `moe.backend.ExpertReader`."""

    def __init__(
        self,
        loader: Loader,
        modules: Mapping[str, Any],
        slots_per_layer: int,
        num_spare: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Reserve a store for each kind of weight: all layers' slots of the kind, and the spare ones.

        Args:
            modules: the experts modules by name, with their parameters on meta.
            num_spare: places of each store beyond the slots.
            dtype: of weights that are not quantised, and of biases.
        """
        self._loader, self._modules, self._dtype = loader, modules, dtype
        self._gates = {name: self._gate(name) for name in modules}
        likes = {(name, leaf): self._like(name, leaf) for name in modules for leaf in leaves(modules[name])}
        self._kinds = {at: self._kind(*at, like) for at, like in likes.items()}
        one_of = {kind: likes[at] for at, kind in self._kinds.items()}
        self._stores = {
            kind: SlotStore(count * slots_per_layer + num_spare, one_of[kind], in_dim=kind[1], device=device)
            for kind, count in Counter(self._kinds.values()).items()
        }

    def load(self, name: str, leaf: str, local_S: np.ndarray) -> DeviceSlots:
        """See `ExpertReader`."""
        store = self._stores[self._kinds[name, leaf]]
        slots = DeviceSlots(store, [store.take() for _ in local_S])
        self._fill(name, leaf, local_S, slots)
        return slots

    def read(self, name: str, leaf: str, expert: int, into: DeviceSlots) -> None:
        """See `ExpertReader`; the modules' parameters need not be there any more."""
        self._fill(name, leaf, np.array([expert]), into)

    def _fill(self, name: str, leaf: str, local_S: np.ndarray, slots: DeviceSlots) -> None:
        read = self._loader.read_experts(self._modules[name], f"{name}.{leaf}", local_S)
        for slot, weight, bias in read:
            slots.put(slot, self._parts(name, leaf, weight, bias))

    def _gate(self, name: str) -> Gate:
        module = self._modules[name]
        target = f"{name}.{leaves(module)[0]}"
        # MXFP4 has scales of single rows, which are put in order with them; only gpt-oss' layout has it.
        is_fp8 = self._loader.is_quantised(target) and not module.is_transposed
        return fused_gate(module, is_fp8=is_fp8)

    def _like(self, name: str, leaf: str) -> dict[str, Tensor]:
        """Tensors such as the experts of one layer have; read only if quantised, else on meta."""
        module, target = self._modules[name], f"{name}.{leaf}"
        weight: Weight = torch.empty(getattr(module, leaf).shape[1:], device="meta")
        if module.is_transposed and isinstance(weight, Tensor):
            weight = weight.T
        bias = (
            torch.empty(getattr(module, f"{leaf}_bias").shape[1:], device="meta") if module.has_bias else None
        )
        if self._loader.is_quantised(target):
            _, weight, bias = next(self._loader.read_experts(module, target, np.zeros(1, np.int64)))
        return self._parts(name, leaf, weight, bias)

    def _kind(self, name: str, leaf: str, like: dict[str, Tensor]) -> Kind:
        _, *sides = getattr(self._modules[name], leaf).shape
        in_dim = int(sides[0] if self._modules[name].is_transposed else sides[1])
        return leaf, in_dim, *((part, tensor.dtype, *tensor.shape) for part, tensor in like.items())

    def _parts(self, name: str, leaf: str, weight: Weight, bias: Tensor | None) -> dict[str, Tensor]:
        """One expert's tensors as the kernels take them."""
        gate = Gate("none") if leaf == "down_proj" else self._gates[name]
        if isinstance(weight, QuantisedWeight):
            is_mxfp4 = weight.codes.dtype == torch.uint8
            scales = weight.scales if is_mxfp4 else weight.block_scales(SCALE_BLOCK)
            parts = {"": weight.codes, "scales": scales}
        else:
            parts = {"": weight.to(self._dtype)}
        if bias is not None:
            parts["bias"] = bias.to(self._dtype)
        return {part: arranged(tensor, gate) for part, tensor in parts.items()}
