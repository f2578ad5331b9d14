"""Which tensors of a checkpoint make which parameters of a model, from names and headers alone.

`transformers` defines names and layouts: its conversion mapping describes how the tensors of a checkpoint
become the parameters of a model (per-expert tensors merged, gate and up concatenated, old names). The same
conversions run on meta tensors to find the results. So one error lists all problems of a checkpoint, for all
experts and not only this rank's, before any byte is read.
"""

import copy
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from moe.load.checkpoint import CheckpointError
from moe.load.quantisation import ROWS
from moe.load.stored_tensors import StoredTensors
from moe.mtp.layers import drafting_of
from moe.mtp.names import MtpNames
from moe.text_part import conversions, left_out

EXPERT_INDEX = re.compile(r"experts\.(\d+)\.")
ALWAYS_IGNORED = (r"rotary_emb\.inv_freq", r"\.masked_bias$")
LISTED = 50  # names that an error lists; the rest are counted


@dataclass
class ParameterSource:
    """Checkpoint tensors that become one parameter (of one expert, for per-expert layouts)."""

    converter: WeightConverter | None = None
    names: list[tuple[str, str]] = field(default_factory=list)  # (tensor, the converter's source pattern)

    def absent(self) -> list[str]:
        """Return the converter's source patterns that match no tensor."""
        if self.converter is None:
            return []
        return sorted(set(self.converter.source_patterns) - {pattern for _, pattern in self.names})


class ParameterPart(NamedTuple):
    """A source, the parameter that it makes, and the required shape."""

    target: str
    source: ParameterSource
    expert: int | None
    wanted: tuple[int, ...]


class _Target(NamedTuple):
    """The parameter that a checkpoint tensor belongs to, and the converter and source pattern that matched."""

    name: str
    pattern: str | None
    converter: WeightConverter | None


class LoadPlan:
    """Assignment of checkpoint tensors to parameters, built from names and shapes alone."""

    def __init__(
        self, model: PreTrainedModel, checkpoint: StoredTensors, num_experts: dict[str, int]
    ) -> None:
        """Match names.

        Args:
            model: Model on the meta device.
            checkpoint: Its weights. Quantised ones have the shape of the plain weight.
            num_experts: Number of experts of every expert parameter, by parameter name.

        Raises:
            CheckpointError: Tensors are missing, unexpected or of the wrong shape; the message lists them.
        """
        self.plain: dict[str, ParameterSource] = defaultdict(ParameterSource)
        self.experts: dict[str, dict[int, ParameterSource]] = defaultdict(
            lambda: defaultdict(ParameterSource)
        )
        self.fused: dict[str, ParameterSource] = {}
        self._model, self._checkpoint, self._num_experts = model, checkpoint, num_experts
        self._meta = dict(model.state_dict())
        self._left_out = left_out(model)
        self._known = {**dict.fromkeys(self._left_out), **self._meta}
        transforms = conversions(model)
        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        self._parts_of_lists: dict[int, list[WeightConverter]] = {}  # cache of `_converters_of_parts`
        names = sorted(checkpoint.names(), key=dot_natural_key)
        self._mtp = MtpNames(names, _num_layers(model))
        self._unscoped = _without_scope(self._renamings), _without_scope(self._converters)
        unread = [name for name in names if not self._place(name)] + self._twice()
        unexpected = self._not_ignored(unread, "_keys_to_ignore_on_load_unexpected")
        # Tensors of an MTP layer must all be used if the model has the layer, and are ignored otherwise.
        if drafting_of(model) is not None:
            unexpected += [name for name in unread if name not in unexpected and self._mtp.renamed(name)]
        else:
            unexpected = [name for name in unexpected if self._mtp.renamed(name) is None]
        self._settle()
        problems = [
            *_listed("missing", self._missing()),
            *_listed("unexpected", unexpected),
            *_listed("of the wrong shape", self._mismatched()),
            *_listed("quantised in a way that cannot be merged", self._unmergeable()),
        ]
        if problems:
            raise CheckpointError(
                f"{checkpoint.directory} does not fit {type(model).__name__}:\n" + "\n".join(problems)
            )

    def shape(self, target: str) -> tuple[int, ...]:
        """Return a parameter's shape in the model."""
        return tuple(self._meta[target].shape)

    def convert(
        self,
        target: str,
        source: ParameterSource,
        read: Callable[[str], Tensor],
        *,
        is_one_expert: bool = False,
    ) -> dict[str, Tensor]:
        """Read a source's tensors and run its conversion. Return the resulting parameters by name.

        Args:
            read: Reads a tensor by name. is_one_expert: True if it reads, and the result holds, one expert only.
        """
        if source.converter is None:
            return {target: read(source.names[0][0])}
        converter = copy.deepcopy(source.converter)
        for name, pattern in source.names:
            tensor = read(name)
            converter.add_tensor(target, name, pattern, lambda tensor=tensor: tensor)
        declared: Any = _Declared(self._model, self._meta, 1 if is_one_expert else None)
        made = converter.convert(target, model=declared, config=self._model.config)
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in made.items()
            if name not in self._left_out
        }

    def is_quantised(self, source: ParameterSource) -> bool:
        """Return whether a source is quantised, so that its parts must be converted separately."""
        return any(self._checkpoint.is_quantised(name) for name, _ in source.names)

    def _place(self, name: str) -> bool:
        """Assign a checkpoint tensor to its parameter. Return False if no parameter takes it."""
        of_mtp = None if drafting_of(self._model) is None else self._mtp.renamed(name)
        if of_mtp == "":  # a copy of a tensor of the model
            return True
        target, pattern, converter = self._target(name) if of_mtp is None else self._mtp_target(of_mtp)
        index = EXPERT_INDEX.search(name)
        expert = None if index is None else int(index.group(1))
        if expert is not None and converter is not None and target in self._num_experts:
            parts, first = self._converters_of_parts(converter), converter.target_patterns[0]
            at, expert = divmod(expert, self._num_experts[target]) if len(parts) > 1 else (0, expert)
            if at >= len(parts):
                return False
            converter = parts[at]
            target = target.replace(first, converter.target_patterns[0], 1)
        if target not in self._meta:
            return target in self._known  # belongs to a part that was removed
        source = (
            self.plain[target] if target not in self._num_experts else self._expert_source(target, expert)
        )
        if source is None:
            return False
        source.converter = source.converter or converter
        source.names.append((name, pattern or name))
        return True

    def _target(self, name: str) -> "_Target":
        prefix = self._model.base_model_prefix
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._known)
        if target not in self._known:  # the checkpoint already has the model's own names
            target, pattern = rename_source_key(name, [], [], prefix, self._known)
        return _Target(target, pattern, _converter_of(pattern, self._converters))

    def _mtp_target(self, name: str) -> "_Target":
        """Return the target of an MTP layer's tensor; its decoder layers are converted like the decoder's own."""
        renamings, converters = self._unscoped
        target, pattern = rename_source_key(name, renamings, converters)
        return _Target(target, pattern, _converter_of(pattern, converters))

    def _settle(self) -> None:
        """Let quantised fused experts be read as [outputs, inputs] in any layout, without a transposition."""
        for target, source in self.fused.items():
            if len(source.names) != 1 or not self.is_quantised(source):
                continue
            if source.converter is None or _only_turns(source.converter):
                source.converter = None
                module = self._model.get_submodule(target.rpartition(".")[0])
                is_transposed = bool(getattr(module, "is_transposed", False))
                self._checkpoint.settle(source.names[0][0], self.shape(target), is_transposed=is_transposed)

    def _expert_source(self, target: str, expert: int | None) -> ParameterSource | None:
        if expert is None:
            return self.fused.setdefault(target, ParameterSource())
        return self.experts[target][expert] if expert < self._num_experts[target] else None

    def _converters_of_parts(self, converter: WeightConverter) -> list[WeightConverter]:
        """Return one converter per module if a list holds the experts of several modules in sequence; otherwise itself.

        ERNIE-4.5-VL has experts for text and for images in one list. A trial shows whether a conversion splits it this way.
        """
        if id(converter) not in self._parts_of_lists:
            parts = [_with_target(converter, target) for target in converter.target_patterns]
            are_parts = len(parts) > 1 and _cuts_lists(converter, self._model.config)
            self._parts_of_lists[id(converter)] = parts if are_parts else [converter]
        return self._parts_of_lists[id(converter)]

    def _twice(self) -> list[str]:
        """Return tensors for parameters that another tensor already makes."""
        spare = [
            name
            for target in self.fused
            for source in self.experts.get(target, {}).values()
            for name, _ in source.names
        ]
        per_expert = [source for sources in self.experts.values() for source in sources.values()]
        for source in (*self.plain.values(), *self.fused.values(), *per_expert):
            if source.converter is None:
                spare += [name for name, _ in source.names[1:]]
        for source in per_expert:
            patterns = [pattern for _, pattern in source.names]
            spare += [name for at, (name, pattern) in enumerate(source.names) if pattern in patterns[:at]]
        return spare

    def _missing(self) -> list[str]:
        tied = set(getattr(self._model, "all_tied_weights_keys", None) or {})
        missing = []
        for name in self._meta:
            if name in self._num_experts and name not in self.fused:
                missing += self._missing_experts(name)
            elif name not in self._num_experts and name not in self.plain and name not in tied:
                missing.append(name)
        produced = {name for target, source in self.plain.items() for name in _outputs(target, source)}
        missing = [name for name in missing if name not in produced]
        return self._not_ignored(missing, "_keys_to_ignore_on_load_missing")

    def _missing_experts(self, target: str) -> list[str]:
        sources, missing = self.experts.get(target, {}), []
        for expert in range(self._num_experts[target]):
            if expert not in sources:
                missing.append(f"{target} of expert {expert}")
            elif absent := sources[expert].absent():
                missing.append(f"{', '.join(absent)} for {target} of expert {expert}")
        return missing

    def _parts(self) -> Iterator[ParameterPart]:
        for target, source in (*self.plain.items(), *self.fused.items()):
            yield ParameterPart(target, source, None, self.shape(target))
        for target, sources in self.experts.items():
            for expert, source in sources.items():
                if not source.absent():
                    yield ParameterPart(target, source, expert, (1, *self.shape(target)[1:]))

    def _mismatched(self) -> list[str]:
        """Return sources that do not fit their parameter. Equal shapes with equal conversions are tried once."""
        wrong, fitting = [], set()
        for part in self._parts():
            shapes = [self._checkpoint.shape(name) for name, _ in part.source.names]
            if part.source.converter is None:
                fits = shapes[0] == part.wanted
            else:
                patterns = tuple(pattern for _, pattern in part.source.names)
                key = (id(part.source.converter), patterns, tuple(shapes), part.wanted)
                fits = key in fitting or self._fits(part)
                if fits:
                    fitting.add(key)
            if not fits:
                wrong.append(_mismatch(part, shapes))
        return wrong

    def _fits(self, part: ParameterPart) -> bool:
        """Try a conversion on meta tensors."""

        def read(name: str) -> Tensor:
            return torch.empty(self._checkpoint.shape(name), device="meta")

        try:
            made = self.convert(part.target, part.source, read, is_one_expert=part.expert is not None)
        # Errors of torch and transformers for shapes that do not match.
        except (IndexError, RuntimeError, ValueError):
            return False
        if part.expert is not None:
            return tuple(made[part.target].shape) == part.wanted
        return all(
            name in self._meta and tensor.shape == self._meta[name].shape for name, tensor in made.items()
        )

    def _unmergeable(self) -> list[str]:
        """Return sources that are only partly quantised, or with blocks of rows that a merge would split."""
        problems = []
        for part in self._parts():
            names = [name for name, _ in part.source.names]
            if part.source.converter is None or not self.is_quantised(part.source):
                continue
            plain = [name for name in names if not self._checkpoint.is_quantised(name)]
            if plain:
                problems.append(
                    f"{', '.join(plain)} (not quantised) for {part.target}, which is otherwise quantised"
                )
            if any(isinstance(operation, Transpose) for operation in part.source.converter.operations):
                problems.append(f"{', '.join(names)} (must be transposed) for {part.target}")
            codes = [name for name in names if name not in plain]
            forms = {self._checkpoint.composition(name): name for name in codes}
            if len(forms) > 1:
                problems.append(f"{' and '.join(forms.values())} (in different formats) for {part.target}")
            shares = any(form.format.block_rows > 1 for form in forms)
            uneven = [name for name in codes if self._checkpoint.shape(name)[-2] % ROWS]
            if shares and uneven and len(names) > 1:
                problems.append(f"{', '.join(uneven)} (outputs not a multiple of {ROWS})")
        return problems + self._unlike()

    def _unlike(self) -> list[str]:
        """Return experts of one layer in different formats: they could not exchange slots."""
        problems = []
        for target, sources in self.experts.items():
            forms = {
                self._checkpoint.composition(name) if self._checkpoint.is_quantised(name) else None: name
                for source in sources.values()
                for name, _ in source.names
            }
            if len(forms) > 1:
                problems.append(f"{' and '.join(forms.values())} (in different formats) for {target}")
        return problems

    def _not_ignored(self, names: list[str], attribute: str) -> list[str]:
        patterns = (*(getattr(self._model, attribute, None) or ()), *ALWAYS_IGNORED)
        return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _num_layers(model: PreTrainedModel) -> int:
    """Return the number of decoder layers, or a larger number if the configuration does not give it."""
    return int(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0) or sys.maxsize)


def _converter_of(pattern: str | None, converters: list[WeightConverter]) -> WeightConverter | None:
    return None if pattern is None else next(c for c in converters if pattern in c.source_patterns)


def _without_scope(transforms: list[Any]) -> list[Any]:
    """Copy a model part's conversions for tensors of MTP layers, which have names outside that part."""
    copies = [copy.copy(each) for each in transforms if not isinstance(each, PrefixChange)]
    for each in copies:
        each.scope_prefix = None
    return copies


def _outputs(target: str, source: ParameterSource) -> list[str]:
    """Return all parameters of a one-to-many conversion. The plan is keyed by the first, `target`."""
    if source.converter is None or len(source.converter.target_patterns) < 2:
        return []
    first, *others = source.converter.target_patterns
    return [target, *(target.replace(first, other, 1) for other in others)]


def _only_turns(converter: WeightConverter) -> bool:
    return all(isinstance(operation, Transpose) for operation in converter.operations)


def _with_target(converter: WeightConverter, target: str) -> WeightConverter:
    made: WeightConverter = converter.copy(
        converter.source_patterns, [target], operations=converter.operations
    )
    return made


def _cuts_lists(converter: WeightConverter, config: Any) -> bool:
    """Return whether a conversion splits a list of experts evenly, in order, among its targets."""
    tried, targets = copy.deepcopy(converter), converter.target_patterns
    for number in range(2 * len(targets)):
        for pattern in converter.source_patterns:
            name = pattern.replace("*", str(number))
            tried.add_tensor(targets[0], name, pattern, lambda number=number: torch.full((2, 2), number))
    try:
        made = tried.convert(targets[0], config=config)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return made.keys() == set(targets) and all(
        made[target].dim() == 3 and made[target][:, 0, 0].tolist() == [2 * at, 2 * at + 1]
        for at, target in enumerate(targets)
    )


class _Declared:
    """Takes the model's place in a conversion: its parameters as declared, perhaps with fewer experts."""

    def __init__(self, model: PreTrainedModel, meta: dict[str, Tensor], num_experts: int | None) -> None:
        self._model, self._meta, self._num_experts = model, meta, num_experts

    def get_parameter(self, name: str) -> Tensor:
        declared = self._meta[name]
        return declared if self._num_experts is None else declared[: self._num_experts]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _mismatch(part: ParameterPart, shapes: list[tuple[int, ...]]) -> str:
    if part.source.converter is None:
        return f"{part.source.names[0][0]}: {list(shapes[0])} instead of {list(part.wanted)}"
    seen = [f"{name} {list(shape)}" for (name, _), shape in zip(part.source.names, shapes, strict=True)]
    wanted = part.wanted if part.expert is None else part.wanted[1:]
    return f"{' and '.join(seen[:4])}, to make {part.target} {list(wanted)}"


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return [f"  {what}: {', '.join(names[:LISTED])}{rest}"]
