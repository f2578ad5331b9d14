"""Fill a model built on the meta device from a checkpoint: this rank's own weights, and no byte more.

Names and layouts are `transformers`' business: its conversion mapping says how the tensors of a checkpoint
become the parameters of a model (per-expert tensors merged, gate and up concatenated, old names). We run the
same conversions one expert at a time, for the experts that this rank's slots hold, so that a rank reads its
share and peak memory is one expert. Everything is checked against the headers before any tensor is read.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from kvcache.step import Step
from moe.checkpoint import Checkpoint, CheckpointError
from moe.packed_weight import PackedWeight

EXPERT_INDEX = re.compile(r"experts\.(\d+)\.")
ALWAYS_IGNORED = (r"rotary_emb\.inv_freq", r"\.masked_bias$")
LISTED = 8  # names an error lists before it counts the rest
Report = Callable[[str, float], None]  # stage, fraction done


@dataclass
class Source:
    """The checkpoint tensors that become one parameter (of one expert, for per-expert layouts)."""

    converter: WeightConverter | None = None
    names: list[tuple[str, str]] = field(
        default_factory=list
    )  # (tensor name, the converter's source pattern)


class LoadPlan:
    """Which tensors of the checkpoint make which parameters; built from names and shapes alone."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, num_experts: dict[str, int]) -> None:
        """Match names.

        Args:
            model: built on meta.
            checkpoint: opened.
            num_experts: experts of every expert parameter, by parameter name.

        Raises:
            CheckpointError: listing missing, unexpected and wrong-shaped tensors.
        """
        self.plain: dict[str, Source] = defaultdict(Source)
        self.experts: dict[str, dict[int, Source]] = defaultdict(lambda: defaultdict(Source))
        self.fused: dict[str, Source] = {}
        self._model, self._checkpoint, self._num_experts = model, checkpoint, num_experts
        self._meta = dict(model.state_dict())
        transforms = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        unexpected = [
            name for name in sorted(checkpoint.names(), key=dot_natural_key) if not self._place(name)
        ]
        problems = [
            *self._listed("missing", self._missing()),
            *self._listed("unexpected", self._not_ignored(unexpected, "_keys_to_ignore_on_load_unexpected")),
            *self._listed("of the wrong shape", self._mismatched()),
        ]
        if problems:
            raise CheckpointError(
                f"{checkpoint.directory} does not fit {type(model).__name__}:\n" + "\n".join(problems)
            )

    def shape(self, target: str) -> tuple[int, ...]:
        """A parameter's shape in the model."""
        return tuple(self._meta[target].shape)

    def _place(self, name: str) -> bool:
        """Put a checkpoint tensor where it belongs; False when nothing takes it."""
        prefix = self._model.base_model_prefix
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._meta)
        if target not in self._meta:  # a checkpoint that has the model's own names already
            target, pattern = rename_source_key(name, [], [], prefix, self._meta)
        if target not in self._meta:
            return False
        source = self.plain[target] if target not in self._num_experts else self._expert_source(target, name)
        if pattern is not None and source.converter is None:
            source.converter = next(c for c in self._converters if pattern in c.source_patterns)
        source.names.append((name, pattern or name))
        return True

    def _expert_source(self, target: str, name: str) -> Source:
        index = EXPERT_INDEX.search(name)
        if index is None:
            return self.fused.setdefault(target, Source())
        return self.experts[target][int(index.group(1))]

    def _missing(self) -> list[str]:
        tied = set(getattr(self._model, "all_tied_weights_keys", None) or {})
        missing = []
        for name in self._meta:
            if name in self._num_experts and name not in self.fused:
                absent = sorted(set(range(self._num_experts[name])) - set(self.experts[name]))
                missing += [f"{name} of expert {expert}" for expert in absent]
            elif name not in self._num_experts and name not in self.plain and name not in tied:
                missing.append(name)
        produced = {target for source in self.plain.values() for target in self._outputs(source)}
        missing = [name for name in missing if name not in produced]
        return self._not_ignored(missing, "_keys_to_ignore_on_load_missing")

    def _outputs(self, source: Source) -> list[str]:
        """All parameters of a one-to-many conversion; the plan is keyed by the first."""
        if source.converter is None or len(source.converter.target_patterns) < 2:
            return []
        name, pattern = source.names[0]
        return [name.replace(pattern, target, 1) for target in source.converter.target_patterns]

    def _mismatched(self) -> list[str]:
        wrong = []
        for target, source in (*self.plain.items(), *self.fused.items()):
            seen, wanted = self._checkpoint.shape(source.names[0][0]), tuple(self._meta[target].shape)
            if source.converter is None and seen != wanted:
                wrong.append(f"{target}: {list(seen)} instead of {list(wanted)}")
        return wrong

    def _not_ignored(self, names: list[str], attribute: str) -> list[str]:
        patterns = (*(getattr(self._model, attribute, None) or ()), *ALWAYS_IGNORED)
        return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]

    @staticmethod
    def _listed(what: str, names: list[str]) -> list[str]:
        if not names:
            return []
        rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        return [f"  {what}: {', '.join(names[:LISTED])}{rest}"]


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
