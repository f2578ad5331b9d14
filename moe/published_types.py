"""Model types that published config.json files have and transformers does not, though it has their architecture.

Such a configuration is read as that of the other type. What differs is in four places only: fields of other names, tensors
that are stored another way, sizes that transformers derives, and parts that are left out. A value that the other type cannot
express is refused with its name; nothing is left to a default that happens to fit.

- `kimi_k2` (Kimi-K2, Kimi-K2-Thinking) is DeepSeek-V3, as vLLM has it (transformers_utils/config.py maps it to DeepseekV3Config).
- `mimo_v2` (MiMo-V2.5, MiMo-V2.5-Pro) is MiMo-V2-Flash with towers for images and sounds. Query, key and value are one tensor,
  `num_key_value_heads` groups of [query, key, value] rows behind each other, each group quantised on its own (vLLM's
  models/mimo_v2.py, `_shard_fp8_qkv_proj`). The Pro has as many key and value heads in sliding layers as in others, where
  transformers has twice as many. `mimo_v2_flash` in its published form is read the same way: transformers takes layer
  patterns, rotary bases and epsilon of that form for granted.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

Values = dict[str, Any]


class PublishedTypeError(ValueError):
    """A configuration that its architecture's class cannot express; the message says what."""


class _Published(NamedTuple):
    """How a type is read."""

    architecture: str  # transformers' type
    translate: Callable[[Values], Values]


def read_published(path: Path) -> PreTrainedConfig | None:
    """Read a config.json of a type that is another one's architecture; None if it is of no such type.

    Raises:
        PublishedTypeError: the architecture's class cannot express it.
    """
    try:
        values = json.loads(path.read_bytes())
    except ValueError:
        return None
    if not isinstance(values, dict) or not (published := _find(values)):
        return None
    translated = published.translate({name: value for name, value in values.items() if name != "auto_map"})
    translated["model_type"] = published.architecture
    config: PreTrainedConfig = type(AutoConfig.for_model(published.architecture)).from_dict(translated)
    return config


def architecture_of(model_type: str) -> str:
    """Return the type whose class a published type is read with: often itself."""
    return _TYPES[model_type].architecture if model_type in _TYPES else model_type


def published_types() -> list[str]:
    """Return the types that transformers lacks."""
    return [name for name, published in _TYPES.items() if name != published.architecture]


def _find(values: Values) -> _Published | None:
    model_type = values.get("model_type")
    if model_type == "mimo_v2_flash" and "hybrid_layer_pattern" not in values:
        return None  # as transformers writes it
    return _TYPES.get(str(model_type))


def settle(model: PreTrainedModel) -> None:
    """Give a model, on the meta device, the sizes and the names of tensors that its published form has."""
    settings: Mapping[str, Any] = getattr(model.config, _MIMO, None) or {}
    if not settings:
        return
    for layer in model.base_model.layers:
        attention = layer.self_attn
        if attention.sliding_window is not None:
            _set_heads(attention, int(settings["sliding_kv_heads"]))
    if settings["is_fused"]:
        parts = [f"self_attn.{name}_proj.weight" for name in "qkv"]
        converter = WeightConverter([_FUSED], parts, operations=[_SplitGroups(int(settings["groups"]))])
        model.conversions = [*get_model_conversion_mapping(model), converter]
    ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
    model._keys_to_ignore_on_load_unexpected = [*ignored, r"^(visual|audio_encoder|speech_embeddings)\."]


def row_parts(config: Any) -> tuple[str, int] | None:
    """Return the weights, by the end of their name, that were quantised in parts of their rows, and in how many."""
    settings = getattr(config, _MIMO, None) or {}
    return (_FUSED, int(settings["groups"])) if settings.get("is_fused") else None


def _set_heads(attention: Any, num_kv_heads: int) -> None:
    """Let an attention have so many key and value heads, whatever its class derived."""
    query: nn.Linear = attention.q_proj
    if attention.k_proj.out_features == num_kv_heads * attention.head_dim:
        return
    for name, dim in (("k_proj", attention.head_dim), ("v_proj", attention.v_head_dim)):
        weight = query.weight
        made = nn.Linear(
            query.in_features,
            num_kv_heads * dim,
            bias=query.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        setattr(attention, name, made)
    attention.num_key_value_groups = query.out_features // attention.head_dim // num_kv_heads


class _SplitGroups(ConversionOps):
    """Cut a fused projection into query, key and value: its rows are groups of [query, key, value]."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups

    @torch.no_grad
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        full_layer_name: str,
        model: Any,
        **_more: Any,
    ) -> dict[str, Tensor]:
        (found,) = input_dict.values()
        fused: Tensor = found[0] if isinstance(found, list) else found
        before = full_layer_name.removesuffix(target_patterns[0])
        rows = [model.get_parameter(before + name).shape[0] for name in target_patterns]
        if any(each % self._num_groups for each in rows) or sum(rows) != fused.shape[0]:
            raise ValueError(f"{fused.shape[0]} rows are not {self._num_groups} groups of {rows} rows")
        groups = fused.unflatten(0, (self._num_groups, -1))
        parts = groups.split([each // self._num_groups for each in rows], dim=1)
        return {name: part.flatten(0, 1) for name, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("checkpoints are not written in this form")


_MIMO = "mimo_v2_layout"  # of a configuration: what `settle` and `row_parts` need
_FUSED = "self_attn.qkv_proj.weight"
_MIMO_SAME = (  # of sliding layers and of all others: transformers has one field
    ("swa_num_attention_heads", "num_attention_heads"),
    ("swa_head_dim", "head_dim"),
    ("swa_v_head_dim", "v_head_dim"),
)
_MIMO_FIXED: dict[str, tuple[Any, ...]] = {  # what transformers' class computes
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "n_shared_experts": (None, 0),
    "add_full_attention_sink_bias": (False, None),
    "add_swa_attention_sink_bias": (True,),
    "rope_scaling": (None,),
    "attention_bias": (False, None),
    "attention_projection_layout": ("fused_qkv", "split", None),
}


def _translate_mimo(values: Values) -> Values:
    """Return a published MiMo-V2 configuration with the fields of transformers' MiMoV2FlashConfig."""
    for name, served in _MIMO_FIXED.items():
        if values.get(name, served[0]) not in served:
            raise PublishedTypeError(f"{name} = {values[name]!r}; served is {' or '.join(map(repr, served))}")
    for name, other in _MIMO_SAME:
        if values.get(name, values.get(other)) != values.get(other):
            raise PublishedTypeError(
                f"{name} = {values[name]!r} and {other} = {values.get(other)!r}; served are equal ones"
            )
    pattern, sparse = values.get("hybrid_layer_pattern"), values.get("moe_layer_freq")
    num_layers = values.get("num_hidden_layers")
    for name, each in (("hybrid_layer_pattern", pattern), ("moe_layer_freq", sparse)):
        if not isinstance(each, list) or len(each) != num_layers or not set(each) <= {0, 1}:
            raise PublishedTypeError(f"{name} is not a list of {num_layers} zeros and ones")
    assert isinstance(pattern, list) and isinstance(sparse, list), "seen above"
    rotary = {"rope_type": "default", "partial_rotary_factor": values.get("partial_rotary_factor", 1.0)}
    bases = {
        "full_attention": values["rope_theta"],
        "sliding_attention": values.get("swa_rope_theta", values["rope_theta"]),
    }
    kv_heads = int(values["num_key_value_heads"])
    gone = {
        "hybrid_layer_pattern", "moe_layer_freq", "rope_theta", "swa_rope_theta", "partial_rotary_factor", "layernorm_epsilon",
        "rope_scaling", "vision_config", "audio_config", *_MIMO_FIXED, *(name for name, _ in _MIMO_SAME),
    } - {"attention_bias"}  # fmt: skip
    return {name: value for name, value in values.items() if name not in gone} | {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in pattern],
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "rope_parameters": {kind: {**rotary, "rope_theta": base} for kind, base in bases.items()},
        "rms_norm_eps": values.get("layernorm_epsilon", 1e-5),
        "attention_value_scale": values.get("attention_value_scale"),
        # transformers adds the token itself to this.
        "sliding_window_size": values.get("sliding_window_size", values.get("sliding_window")),
        _MIMO: {
            "sliding_kv_heads": values.get("swa_num_key_value_heads", 2 * kv_heads),
            "groups": kv_heads,
            "is_fused": values.get("attention_projection_layout") == "fused_qkv",
        },
    }


_TYPES: Mapping[str, _Published] = {
    "kimi_k2": _Published("deepseek_v3", lambda values: values),
    "mimo_v2": _Published("mimo_v2_flash", _translate_mimo),
    "mimo_v2_flash": _Published("mimo_v2_flash", _translate_mimo),
}
