"""Fill a model built on the meta device from a checkpoint: this rank's own weights, and no byte more.

Names and layouts are `transformers`' business: its conversion mapping says how the tensors of a checkpoint
become the parameters of a model (per-expert tensors merged, gate and up concatenated, old names). We run the
same conversions one expert at a time, for the experts that this rank's slots hold, so that a rank reads its
share and peak memory is one expert. Everything is checked against the headers before any tensor is read, and all scales
that this rank keeps before any weight is.
"""

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
Report = Callable[[str, int, int], None]  # stage, how much of it is done, of how much
Weight = Tensor | QuantisedWeight
# Name, the tensor as it was read (quantised only if it is a linear layer's weight), and what the model declared: what
# a module gets for it.
Keep = Callable[[str, Weight, Tensor], Tensor | nn.Parameter]


class Loader:
    """Reads what a plan says into a model."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: StoredTensors,
        plan: LoadPlan,
        dtype: str,
        quantization: str | None = None,
    ) -> None:
        """`dtype` is what weights are kept in: auto (the checkpoint's bfloat16 or float32), or one of the two.

        With `quantization`, int8 or int4, experts and linear layers are quantised as they are read. Weights that are
        quantised in the checkpoint are kept as they are, whatever is asked for.
        """
        self._model, self._checkpoint, self._plan, self._dtype = model, checkpoint, plan, dtype
        self._quantise = None if quantization is None else QUANTISE[quantization]

    def stored(self, name: str, tensor: Weight) -> Weight:
        """Bring a parameter's tensor, or one expert's, to the form that weights are kept in."""
        if isinstance(tensor, QuantisedWeight):
            return tensor
        if self._quantise is not None and tensor.shape[-1] % INTEGER_BLOCK == 0 and self._is_quantised(name):
            return (int8_weight if self._is_last(name) else self._quantise)(tensor)
        return self.cast(tensor)

    def _is_quantised(self, name: str) -> bool:
        """Whether it is an expert's or a linear layer's; what chooses is left alone."""
        if name in self._plan.experts or name in self._plan.fused:
            return True
        owner, _ = self._owner(name)
        return isinstance(owner, nn.Linear) and not name.endswith(("gate.weight", "router.weight"))

    def _is_last(self, name: str) -> bool:
        """Whether it is the output projection, which has eight bits at least."""
        return self._owner(name)[0] is self._model.get_output_embeddings()

    def cast(self, tensor: Tensor) -> Tensor:
        """Cast a tensor to the dtype that weights are kept in."""
        if self._dtype == "float32" or tensor.dtype not in (torch.bfloat16, torch.float32):
            return tensor.float()
        return tensor.bfloat16() if self._dtype == "bfloat16" else tensor

    def check_scales(self, local: Mapping[str, np.ndarray]) -> None:
        """Check the scales of all quantised weights that this rank keeps, so that a damaged one is found at once.

        Args:
            local: expert of each of this rank's slots, -1 where empty, by expert parameter.

        Raises:
            QuantisedWeightError: no kernel computes with them; it names the first tensor.
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
        """Load everything that is not an expert, as `keep` wants it."""
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
            if self._quantise is not None and self._is_last(target):  # the embedding is left alone
                self._assign(target, self._convert(original, plan.plain[original])[original], keep)
            else:
                other, other_leaf = self._owner(original)
                owner._parameters.pop(leaf, None)
                setattr(owner, leaf, getattr(other, other_leaf))

    def expert_bytes(self, target: str, local_S: np.ndarray) -> int:
        """What one expert parameter takes in the files, without its bias, for this rank's slots."""
        own = [self._source(target, expert) for expert in local_S[local_S >= 0].tolist()]
        return sum(self._num_bytes(source, row) for source, row in own)

    def _num_bytes(self, source: ParameterSource, row: int | None = None) -> int:
        return sum(self._checkpoint.num_bytes(name, row) for name, _ in source.names)

    def read_experts(
        self, module: Any, target: str, local_S: np.ndarray
    ) -> Iterator[tuple[int, Weight, Tensor | None]]:
        """Read one expert parameter for this rank's slots, one expert at a time.

        Args:
            module: the experts module.
            target: the parameter, `...experts.gate_up_proj`; its bias is read with it.
            local_S: expert of each of this rank's slots, -1 where empty.

        Yields:
            Slot; the weight [outputs, inputs] in the checkpoint's dtype, or quantised; its bias, if the family has any.
        """
        biases = dict(self._read_parameter(f"{target}_bias", local_S)) if module.has_bias else {}
        for slot, weight in self._read_parameter(target, local_S):
            if module.is_transposed and isinstance(
                weight, Tensor
            ):  # quantised ones are [outputs, inputs] always
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
        """What an expert's parameter is read from, and which row of it, where all experts are one tensor."""
        plan = self._plan
        return (plan.fused[target], expert) if target in plan.fused else (plan.experts[target][expert], None)

    def is_quantised(self, target: str) -> bool:
        """Whether experts of one parameter are quantised in the checkpoint."""
        plan = self._plan
        source = plan.fused.get(target) or next(iter(plan.experts[target].values()))
        return plan.is_quantised(source)

    def _convert(
        self, target: str, source: ParameterSource, *, row: int | None = None, is_one_expert: bool = False
    ) -> Mapping[str, Weight]:
        """Read a source and run its conversion, over codes, scales and all else alike; returns parameters by name."""
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
            tensor = tensor.dequantised()  # nothing that kernels of ours multiply with
        assert tensor.shape == declared.shape, f"{name}: the plan let {list(tensor.shape)} pass"
        if leaf in owner._buffers:
            assert isinstance(tensor, Tensor), "a buffer that is a matrix of a linear layer"
            owner._buffers[leaf] = tensor.to(declared.dtype)
            return
        kept = keep(name, tensor, declared)
        if isinstance(kept, nn.Parameter):
            owner._parameters[leaf] = kept
        else:
            del owner._parameters[leaf]
            setattr(owner, leaf, kept)
