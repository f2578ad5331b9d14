"""Which tensors of a checkpoint make which parameters of a model, from names and headers alone.

Names and layouts are `transformers`' business: its conversion mapping says how the tensors of a checkpoint
become the parameters of a model (per-expert tensors merged, gate and up concatenated, old names).
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from moe.checkpoint import Checkpoint, CheckpointError

EXPERT_INDEX = re.compile(r"experts\.(\d+)\.")
ALWAYS_IGNORED = (r"rotary_emb\.inv_freq", r"\.masked_bias$")
LISTED = 8  # names an error lists before it counts the rest


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
