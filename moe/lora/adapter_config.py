"""The configuration of a LoRA adapter in PEFT's format: scales of low-rank products, and refusals of other methods.

`adapter_config.json` has some fifty fields. Those that change a result are read or refused by name. A field that this module does
not know is refused if it has a value, because it may change the result (PEFT adds such fields every few months).

Reference: PEFT 0.21, `LoraConfig` and `get_pattern_key`. Without torch: the front checks adapters, too.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
# Fields that are read here; and those of training only, or of an adapter's origin.
_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "target_modules",
    "target_parameters",
}
_WITHOUT_EFFECT = {
    "task_type", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version", "lora_dropout",
    "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "eva_config", "runtime_config",
    "qalora_group_size", "init_lora_weights", "bias", "modules_to_save",
}  # fmt: skip
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA (BD-LoRA)",
    "lora_bias": "its own biases (lora_bias)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "trainable_token_indices": "rows of the embedding (trainable_token_indices)",
    "megatron_config": "Megatron's parallel layers (megatron_config)",
    "loftq_config": "LoftQ, which changes the base weights",
    "corda_config": "CorDA, which changes the base weights",
    "lora_ga_config": "LoRA-GA, which changes the base weights",
    "arrow_config": "Arrow, which mixes adapters",
    "ensure_weight_tying": "tied adapters (ensure_weight_tying)",
}
_HEADS_OF_CLASSIFIERS = {"classifier", "score"}  # PEFT's defaults; a causal language model has neither
# Starting points that PEFT subtracts from the base weights. The others leave them as they are.
_PLAIN_STARTS = ("true", "false", "gaussian", "eva", "orthogonal")
_MOST_RANK = 4096


class AdapterError(ValueError):
    """An adapter that cannot be served; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The part of an adapter's configuration that concerns its tensors."""

    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    is_rank_stabilised: bool  # rsLoRA: the scale is alpha / sqrt(rank)
    target_modules: tuple[str, ...]  # one regular expression, or ends of names
    target_parameters: tuple[str, ...]

    def rank_of(self, name: str) -> int:
        """Return the configured rank of a module or parameter."""
        return self.rank_pattern.get(_pattern_for(name, self.rank_pattern), self.rank)

    def has_pattern(self, name: str) -> bool:
        """Return whether the configuration gives a rank for this name."""
        return bool(_pattern_for(name, self.rank_pattern))

    def scale_of(self, name: str, rank: int, *, factor: int = 1) -> float:
        """Return the factor of a low-rank product. `factor` multiplies the configured alpha."""
        alpha = self.alpha_pattern.get(_pattern_for(name, self.alpha_pattern), self.alpha) * factor
        return alpha / rank**0.5 if self.is_rank_stabilised else alpha / rank

    @property
    def splits_gate_and_up(self) -> bool:
        """Whether it names gate and up apart. PEFT fuses them if the model does, with twice the rank and alpha."""
        return any(
            target in ("all-linear", "gate_proj", "up_proj", "w1", "w3") for target in self.target_modules
        )


def read_config(directory: Path) -> AdapterConfig:
    """Read and check an adapter's configuration.

    Raises:
        AdapterError: It is missing, invalid, or of a method that is not supported.
    """
    path = directory / CONFIG_NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError(
            f"{directory} has no {CONFIG_NAME}; give the directory of a PEFT adapter"
        ) from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{path} holds no object")
    _refuse_other_methods(path, fields)
    return AdapterConfig(
        rank=_positive(path, "r", fields.get("r", 8)),
        alpha=_number(path, "lora_alpha", fields.get("lora_alpha", 8)),
        rank_pattern={
            _pattern(path, name): _positive(path, f"rank_pattern[{name!r}]", value)
            for name, value in _table(path, "rank_pattern", fields).items()
        },
        alpha_pattern={
            _pattern(path, name): _number(path, f"alpha_pattern[{name!r}]", value)
            for name, value in _table(path, "alpha_pattern", fields).items()
        },
        is_rank_stabilised=bool(fields.get("use_rslora")),
        target_modules=_names(path, "target_modules", fields),
        target_parameters=_names(path, "target_parameters", fields),
    )  # fmt: skip


def _refuse_other_methods(path: Path, fields: dict[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path}: peft_type is {kind!r}; only LORA is supported")
    for name, described in _REFUSED.items():
        if fields.get(name):
            raise AdapterError(f"{path}: {described} is not supported")
    bias = fields.get("bias", "none")
    if bias not in (None, "none"):
        raise AdapterError(f"{path}: bias is {bias!r}; adapters with biases are not supported, only 'none'")
    saved = sorted({*(fields.get("modules_to_save") or ())} - _HEADS_OF_CLASSIFIERS)
    if saved:
        raise AdapterError(
            f"{path}: modules_to_save is {saved}; whole modules in an adapter are not supported"
        )
    start = str(fields.get("init_lora_weights", True)).lower()
    if start not in _PLAIN_STARTS:
        raise AdapterError(
            f"{path}: init_lora_weights is {start!r}, which changes the base weights; convert the adapter to a plain LoRA "
            f"(PEFT's path_initial_model_for_weight_conversion)"
        )
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterError(f"{path}: task_type is {fields['task_type']!r}; only CAUSAL_LM is served")
    for name in sorted(fields.keys() - _READ - _WITHOUT_EFFECT - _REFUSED.keys()):
        if fields[name] not in (None, False, "", [], {}, 0):
            raise AdapterError(
                f"{path}: {name} is {fields[name]!r}, a field that is not known here and may change the result"
            )


def _pattern_for(name: str, patterns: dict[str, Any]) -> str:
    """Return the first pattern that matches the end of a name at a dot, as PEFT does, or ""."""
    return next((each for each in patterns if re.match(rf"(.*\.)?({each})$", name)), "")


def _pattern(path: Path, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise AdapterError(f"{path}: the pattern {text!r} is not a regular expression: {error}") from error
    return text


def _table(path: Path, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    table = fields.get(name) or {}
    if not isinstance(table, dict):
        raise AdapterError(f"{path}: {name} is {table!r}; it must be an object")
    return table


def _names(path: Path, name: str, fields: dict[str, Any]) -> tuple[str, ...]:
    names = fields.get(name) or ()
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        raise AdapterError(f"{path}: {name} is {names!r}; it must be a list of names")
    return tuple(names)


def _positive(path: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST_RANK:
        raise AdapterError(f"{path}: {name} is {value!r}; it must be an integer from 1 to {_MOST_RANK}")
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise AdapterError(f"{path}: {name} is {value!r}; it must be a number")
    return float(value)
