"""Fill a model built on the meta device from a checkpoint: this rank's own weights, and no byte more.

Names and layouts are `transformers`' business: its conversion mapping says how the tensors of a checkpoint
become the parameters of a model (per-expert tensors merged, gate and up concatenated, old names). We run the
same conversions one expert at a time, for the experts that this rank's slots hold, so that a rank reads its
share and peak memory is one expert. Everything is checked against the headers before any tensor is read.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcache.step import Step
from moe.checkpoint import Checkpoint
from moe.load_plan import LoadPlan
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

    def load_plain(self, step: Step, report: Report) -> None:
        """Load everything that is not an expert; matrices become `PackedWeight`s, the rest float32 parameters."""
        plan = self._plan
        for done, (target, source) in enumerate(plan.plain.items()):
            for name, tensor in plan.convert(target, source, self._checkpoint.read).items():
                self._assign(name, tensor, step)
            report("weights", (done + 1) / len(plan.plain))
        for target, original in (getattr(self._model, "all_tied_weights_keys", None) or {}).items():
            if target not in plan.plain:
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
        for slot, expert in enumerate(local_experts.tolist()):
            if expert < 0:
                continue
            if target in plan.fused:
                made = plan.convert(target, plan.fused[target], partial(checkpoint.read_row, row=expert))
            else:
                made = plan.convert(target, plan.experts[target][expert], checkpoint.read)
            yield slot, made[target][0]

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self._model.get_submodule(path), leaf

    def _assign(self, name: str, tensor: Tensor, step: Step) -> None:
        owner, leaf = self._owner(name)
        assert tensor.shape == getattr(owner, leaf).shape, f"{name}: the plan let {list(tensor.shape)} pass"
        if leaf in owner._buffers:
            owner._buffers[leaf] = tensor.to(getattr(owner, leaf).dtype)
        elif leaf == "weight" and tensor.dim() == 2:
            del owner._parameters[leaf]
            owner.weight = PackedWeight(self.stored(tensor), step)
        else:
            owner._parameters[leaf] = nn.Parameter(tensor.float(), requires_grad=False)
