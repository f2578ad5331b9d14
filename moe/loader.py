"""Fill a model built on the meta device from a checkpoint: this rank's own weights, and no byte more.

Names and layouts are `transformers`' business: its conversion mapping says how the tensors of a checkpoint
become the parameters of a model (per-expert tensors merged, gate and up concatenated, old names). We run the
same conversions one expert at a time, for the experts that this rank's slots hold, so that a rank reads its
share and peak memory is one expert. Everything is checked against the headers before any tensor is read.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcache.step import Step
from moe.checkpoint import Checkpoint, CheckpointError
from moe.load_plan import LoadPlan, Source
from moe.packed_weight import PackedWeight

Report = Callable[[str, float], None]  # stage, fraction done


class Loader:
    """Reads what a plan says into a model."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, plan: LoadPlan, dtype: str) -> None:
        """`dtype` is what weights are kept in: auto (the checkpoint's bfloat16 or float32), or one of the two."""
        self._model, self._checkpoint, self._plan, self._dtype = model, checkpoint, plan, dtype

    def stored(self, tensor: Tensor) -> Tensor:
        """Cast a tensor to the dtype that weights are kept in."""
        if self._dtype == "float32" or tensor.dtype not in (torch.bfloat16, torch.float32):
            return tensor.float()
        return tensor.bfloat16() if self._dtype == "bfloat16" else tensor

    def _convert(self, target: str, source: Source, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Read a source's tensors and run its conversion; returns the parameters it makes."""
        if source.converter is None:
            return {target: read(source.names[0][0])}
        converter = copy.deepcopy(source.converter)
        for name, pattern in source.names:
            tensor = read(name)
            converter.add_tensor(target, name, pattern, lambda tensor=tensor: tensor)
        made = converter.convert(target, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def load_plain(self, step: Step, report: Report) -> None:
        """Load everything that is not an expert; matrices become `PackedWeight`s, the rest float32 parameters."""
        for done, (target, source) in enumerate(self._plan.plain.items()):
            for name, tensor in self._convert(target, source, self._checkpoint.read).items():
                self._assign(name, tensor, step)
            report("weights", (done + 1) / len(self._plan.plain))
        for target, original in (getattr(self._model, "all_tied_weights_keys", None) or {}).items():
            if target not in self._plan.plain:
                owner, leaf = self._owner(target)
                other, other_leaf = self._owner(original)
                owner._parameters.pop(leaf, None)
                setattr(owner, leaf, getattr(other, other_leaf))

    def load_experts(self, target: str, local_experts: np.ndarray) -> Iterator[tuple[int, Tensor]]:
        """Read one expert parameter for this rank's slots, one expert at a time.

        Args:
            target: the parameter, `...experts.gate_up_proj`.
            local_experts: [slots] expert of each of this rank's slots, -1 where empty.

        Yields:
            Slot, and the parameter without its expert dimension, in the checkpoint's dtype.
        """
        plan, checkpoint = self._plan, self._checkpoint
        wanted = plan.shape(target)[1:]
        for slot, expert in enumerate(local_experts.tolist()):
            if expert < 0:
                continue
            if target in plan.fused:
                made = self._convert(target, plan.fused[target], partial(checkpoint.read_row, row=expert))
            else:
                made = self._convert(target, plan.experts[target][expert], checkpoint.read)
            tensor = made[target][0]
            if tuple(tensor.shape) != wanted:
                raise CheckpointError(
                    f"{checkpoint.directory}: {target} of expert {expert} has shape "
                    f"{list(tensor.shape)} instead of {list(wanted)}"
                )
            yield slot, tensor

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self._model.get_submodule(path), leaf

    def _assign(self, name: str, tensor: Tensor, step: Step) -> None:
        owner, leaf = self._owner(name)
        wanted = tuple(getattr(owner, leaf).shape)
        if tuple(tensor.shape) != wanted:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)} instead of {list(wanted)}")
        if leaf in owner._buffers:
            owner._buffers[leaf] = tensor.to(getattr(owner, leaf).dtype)
        elif leaf == "weight" and tensor.dim() == 2:
            del owner._parameters[leaf]
            owner.weight = PackedWeight(self.stored(tensor), step)
        else:
            owner._parameters[leaf] = nn.Parameter(tensor.float(), requires_grad=False)
