"""Fill a model built on the meta device from a checkpoint; read only this rank's weights.

`transformers` defines names and layouts: its conversion mapping describes how the tensors of a checkpoint
become the parameters of a model (per-expert tensors merged, gate and up concatenated, old names). We run the
same conversions one expert at a time, for the experts in this rank's slots, so that a rank reads only its
share and peak memory is one expert. Everything is checked against the headers before any tensor is read, and all scales
of this rank before any weight.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe.load.plan import LoadPlan, ParameterSource
from moe.load.quantised_weight import INTEGER_BLOCK, QUANTISE, QuantisedWeight, int8_weight
from moe.load.stored_tensors import StoredTensors

WEIGHTS, EXPERTS = "weights", "experts"  # stages of loading that count bytes
Report = Callable[[str, int, int], None]  # stage, done, total
Weight = Tensor | QuantisedWeight
# Takes the name, the tensor as read (quantised only if it is a linear layer's weight) and the tensor that the model
# declared; returns the parameter or tensor for the module.
Keep = Callable[[str, Weight, Tensor], Tensor | nn.Parameter]


class Loader:
    """Reads a model's weights according to a plan."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: StoredTensors,
        plan: LoadPlan,
        dtype: str,
        quantization: str | None = None,
    ) -> None:
        """`dtype` is the storage type of weights: auto (the checkpoint's bfloat16 or float32), or one of the two.

        `quantization` (int8 or int4) quantises experts and linear layers as they are read. Weights that are already
        quantised in the checkpoint are not changed.
        """
        self._model, self._checkpoint, self._plan, self._dtype = model, checkpoint, plan, dtype
        self._quantise = None if quantization is None else QUANTISE[quantization]

    def for_model(self, model: PreTrainedModel) -> "Loader":
        """Return a loader of the same weights for another model with the same modules."""
        other = copy.copy(self)
        other._model = model
        return other

    def stored(self, name: str, tensor: Weight) -> Weight:
        """Convert a parameter's tensor, or one expert's, to the form in which weights are stored."""
        if isinstance(tensor, QuantisedWeight):
            return tensor
        if self._quantise is not None and tensor.shape[-1] % INTEGER_BLOCK == 0 and self._is_quantised(name):
            return (int8_weight if self._is_last(name) else self._quantise)(tensor)
        return self.cast(tensor)

    def _is_quantised(self, name: str) -> bool:
        """Return whether `--quantization` applies: to experts and linear layers, but not to routers."""
        if name in self._plan.experts or name in self._plan.fused:
            return True
        owner, _ = self._owner(name)
        return isinstance(owner, nn.Linear) and not name.endswith(("gate.weight", "router.weight"))

    def _is_last(self, name: str) -> bool:
        """Return whether it is the output projection, which gets at least eight bits."""
        return self._owner(name)[0] is self._model.get_output_embeddings()

    def cast(self, tensor: Tensor) -> Tensor:
        """Cast a tensor to the storage type of weights."""
        if self._dtype == "float32" or tensor.dtype not in (torch.bfloat16, torch.float32):
            return tensor.float()
        return tensor.bfloat16() if self._dtype == "bfloat16" else tensor

    def check_scales(self, local: Mapping[str, np.ndarray]) -> None:
        """Check the scales of all quantised weights on this rank, to find a damaged one early.

        Args:
            local: By expert parameter, the expert of each of this rank's slots, -1 if empty.

        Raises:
            QuantisedWeightError: Scales are invalid; the message names the first tensor.
        """
        own = [
            self._source(target, expert)
            for target, local_S in local.items()
            for expert in local_S[local_S >= 0].tolist()
        ]
        for source, row in (*((source, None) for source in self._plan.plain.values()), *own):
            for name, _ in source.names if self._plan.is_quantised(source) else ():
                self._checkpoint.check_scales(name, row)

    def load_plain(self, keep: Keep, report: Report) -> None:
        """Load all weights except experts, each in the form that `keep` returns."""
        plan = self._plan
        sizes = {target: self._num_bytes(source) for target, source in plan.plain.items()}
        done, total = 0, sum(sizes.values())
        for target, source in plan.plain.items():
            for name, tensor in self._convert(target, source).items():
                self._assign(name, tensor, keep)
            done += sizes[target]
            report(WEIGHTS, done, total)
        for target, original in (getattr(self._model, "all_tied_weights_keys", None) or {}).items():
            if target in plan.plain:
                continue
            owner, leaf = self._owner(target)
            if self._quantise is not None and self._is_last(target):  # the embedding stays unquantised
                self._assign(target, self._convert(original, plan.plain[original])[original], keep)
            else:
                other, other_leaf = self._owner(original)
                owner._parameters.pop(leaf, None)
                setattr(owner, leaf, getattr(other, other_leaf))

    def expert_bytes(self, target: str, local_S: np.ndarray) -> int:
        """Return the bytes in the files of one expert parameter, without its bias, for this rank's slots."""
        own = [self._source(target, expert) for expert in local_S[local_S >= 0].tolist()]
        return sum(self._num_bytes(source, row) for source, row in own)

    def _num_bytes(self, source: ParameterSource, row: int | None = None) -> int:
        return sum(self._checkpoint.num_bytes(name, row) for name, _ in source.names)

    def read_experts(
        self, module: Any, target: str, local_S: np.ndarray
    ) -> Iterator[tuple[int, Weight, Tensor | None]]:
        """Read one expert parameter for this rank's slots, one expert at a time.

        Args:
            module: Experts module.
            target: Parameter, `...experts.gate_up_proj`; its bias is read too.
            local_S: Expert of each of this rank's slots, -1 if empty.

        Yields:
            Slot; weight [outputs, inputs] in the checkpoint's dtype, or quantised; bias, or None if the family has none.
        """
        biases = dict(self._read_parameter(f"{target}_bias", local_S)) if module.has_bias else {}
        for slot, weight in self._read_parameter(target, local_S):
            # Quantised weights are always [outputs, inputs].
            if module.is_transposed and isinstance(weight, Tensor):
                weight = weight.T
            bias = biases.get(slot)
            assert not isinstance(bias, QuantisedWeight), f"{target}_bias is quantised"
            yield slot, weight, bias

    def _read_parameter(self, target: str, local_S: np.ndarray) -> Iterator[tuple[int, Weight]]:
        for slot, expert in enumerate(local_S.tolist()):
            if expert < 0:
                continue
            source, row = self._source(target, expert)
            yield slot, self._convert(target, source, row=row, is_one_expert=True)[target][0]

    def _source(self, target: str, expert: int) -> tuple[ParameterSource, int | None]:
        """Return the source of an expert's parameter, and its row if one tensor holds all experts."""
        plan = self._plan
        return (plan.fused[target], expert) if target in plan.fused else (plan.experts[target][expert], None)

    def is_quantised(self, target: str) -> bool:
        """Return whether one parameter's experts are quantised in the checkpoint."""
        plan = self._plan
        source = plan.fused.get(target) or next(iter(plan.experts[target].values()))
        return plan.is_quantised(source)

    def _convert(
        self, target: str, source: ParameterSource, *, row: int | None = None, is_one_expert: bool = False
    ) -> Mapping[str, Weight]:
        """Read a source and run its conversion on codes, scales and all other parts. Return parameters by name."""
        plan, stored = self._plan, self._checkpoint
        if not plan.is_quantised(source):
            return plan.convert(target, source, partial(stored.read, row=row), is_one_expert=is_one_expert)
        composition = stored.composition(source.names[0][0])
        parts = {
            part: plan.convert(
                target, source, partial(stored.read_part, part=part, row=row), is_one_expert=is_one_expert
            )
            for part in composition.parts
        }
        return {
            name: stored.quantised(name, composition, {part: made[name] for part, made in parts.items()})
            for name in parts["codes"]
        }

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self._model.get_submodule(path), leaf

    def _assign(self, name: str, tensor: Weight, keep: Keep) -> None:
        owner, leaf = self._owner(name)
        declared = getattr(owner, leaf)
        is_matrix = leaf == "weight" and len(tensor.shape) == 2 and leaf not in owner._buffers
        if isinstance(tensor, QuantisedWeight) and not is_matrix:
            tensor = tensor.dequantised()  # the kernels multiply only with matrices
        assert tensor.shape == declared.shape, f"{name}: the plan accepted shape {list(tensor.shape)}"
        if leaf in owner._buffers:
            assert isinstance(tensor, Tensor), "a buffer is a quantised matrix"
            owner._buffers[leaf] = tensor.to(declared.dtype)
            return
        kept = keep(name, tensor, declared)
        if isinstance(kept, nn.Parameter):
            owner._parameters[leaf] = kept
        else:
            del owner._parameters[leaf]
            setattr(owner, leaf, kept)


def restore_buffers(model: PreTrainedModel) -> None:
    """Compute again, on the CPU, the values that no checkpoint contains (rotary frequencies), which were lost on the meta device.

    The family's own initialisation computes them. It must not change the loaded weights, so these are marked as initialised.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        lost = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not lost:
            continue
        for name in lost:
            module._buffers[name] = torch.empty_like(getattr(module, name), device="cpu")
        model._init_weights(module)
    stranded = [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta
    ]
    assert not stranded, f"not materialised: {stranded}"
