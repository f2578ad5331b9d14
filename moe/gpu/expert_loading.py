"""Experts from a checkpoint to the stores of a GPU, one at a time: in the kernels' order of rows, quantised or not.

Legend: S slots of this rank, N out features, K in features.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe.adopt.gates import Gate, arranged, gate_of
from moe.cpu.backend import leaves
from moe.gpu.formats import SCALE_BLOCK
from moe.gpu.slots import DeviceSlots, SlotStore
from moe.load.loader import Loader, Weight
from moe.load.quantised_weight import QuantisedWeight

Kind = tuple[Any, ...]  # leaf, in features, and each tensor's name, type and shape: what a store is for


def fused_gate(module: Any, *, is_fp8: bool) -> Gate:
    """The gate that the kernel applies: "none" where scales of 128 rows would be shared by gate and up."""
    gate = gate_of(module)
    rows = module.gate_up_proj.shape[2 if module.is_transposed else 1] // 2 if module.has_gate else 0
    return Gate("none") if is_fp8 and (gate.is_interleaved or rows % SCALE_BLOCK) else gate


class ExpertLoading:
    """Fills the stores of one model."""

    def __init__(
        self,
        loader: Loader,
        modules: Mapping[str, Any],
        *,
        slots_per_layer: int,
        num_spare: int,
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
        self.gates = {name: self._gate(name) for name in modules}
        likes = {(name, leaf): self._like(name, leaf) for name in modules for leaf in leaves(modules[name])}
        self._kinds = {at: self._kind(*at, like) for at, like in likes.items()}
        one_of = {kind: likes[at] for at, kind in self._kinds.items()}
        self._stores = {
            kind: SlotStore(count * slots_per_layer + num_spare, one_of[kind], in_dim=kind[1], device=device)
            for kind, count in Counter(self._kinds.values()).items()
        }

    def load(self, name: str, leaf: str, local_S: np.ndarray) -> DeviceSlots:
        """Load one weight of all of this rank's slots in one layer.

        Args:
            name: of the experts module. leaf: of its parameter.
            local_S: expert of each slot, -1 where empty.
        """
        loader, module, store = self._loader, self._modules[name], self._stores[self._kinds[name, leaf]]
        slots = DeviceSlots(store, [store.take() for _ in local_S])
        biases: dict[int, Weight] = {}
        if module.has_bias:
            biases = dict(loader.load_experts(f"{name}.{leaf}_bias", local_S))
        for slot, weight in loader.load_experts(f"{name}.{leaf}", local_S):
            slots.put(slot, self._parts(name, leaf, weight, biases.get(slot)))
        return slots

    def read(self, name: str, leaf: str, expert: int, slots: DeviceSlots) -> None:
        """Read one weight of one expert into the first slot; the modules' parameters need not be there any more."""
        only = np.array([expert])
        biases: dict[int, Weight] = {}
        if self._modules[name].has_bias:
            biases = dict(self._loader.load_experts(f"{name}.{leaf}_bias", only))
        for slot, weight in self._loader.load_experts(f"{name}.{leaf}", only):
            slots.put(slot, self._parts(name, leaf, weight, biases.get(slot)))

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
        if self._loader.is_quantised(target):
            _, weight = next(self._loader.load_experts(target, np.zeros(1, np.int64)))
        bias = (
            torch.empty(getattr(module, f"{leaf}_bias").shape[1:], device="meta") if module.has_bias else None
        )
        return self._parts(name, leaf, weight, bias)

    def _kind(self, name: str, leaf: str, like: dict[str, Tensor]) -> Kind:
        _, *sides = getattr(self._modules[name], leaf).shape
        in_dim = int(sides[0] if self._modules[name].is_transposed else sides[1])
        return leaf, in_dim, *((part, tensor.dtype, *tensor.shape) for part, tensor in like.items())

    def _parts(self, name: str, leaf: str, weight: Weight, bias: Weight | None) -> dict[str, Tensor]:
        """One expert's tensors as the kernels take them."""
        gate = Gate("none") if leaf == "down_proj" else self.gates[name]
        if isinstance(weight, QuantisedWeight):
            is_mxfp4 = weight.codes.dtype == torch.uint8
            scales = weight.scales if is_mxfp4 else weight.block_scales(SCALE_BLOCK)
            parts = {"": weight.codes, "scales": scales}
        else:
            rows = weight.T if self._modules[name].is_transposed else weight
            parts = {"": rows.to(self._dtype)}
        if bias is not None:
            assert isinstance(bias, Tensor), f"the bias of {name} is quantised"
            parts["bias"] = bias.to(self._dtype)
        return {part: arranged(tensor, gate) for part, tensor in parts.items()}
