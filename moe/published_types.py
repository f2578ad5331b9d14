"""Model types in published config.json files that transformers lacks, although it has their architecture.

Such a configuration is read as one of the other type. Only four things differ: names of fields, the form in which tensors
are stored, sizes that transformers derives, and parts that are left out. A value that the other type cannot express is
refused by name; no field is left to a default that happens to fit.

- `kimi_k2` (Kimi-K2, Kimi-K2-Thinking) is DeepSeek-V3, as in vLLM (transformers_utils/config.py maps it to DeepseekV3Config).
- `mimo_v2` (MiMo-V2.5, MiMo-V2.5-Pro) is MiMo-V2-Flash with towers for images and audio. Query, key and value are one
  tensor of `num_key_value_heads` consecutive groups of [query, key, value] rows, each group quantised separately (vLLM's
  models/mimo_v2.py, `_shard_fp8_qkv_proj`). In the Pro, sliding layers have the same number of key and value heads as
  others; transformers doubles it. `mimo_v2_flash` in its published form is read the same way: transformers assumes
  the layer patterns, rotary bases and epsilon of that form.
- `bailing_hybrid` is Ling 3.0 in transformers (Kimi delta attention). Ling 2.6 and Ring 2.6 (BailingMoeV2_5ForCausalLM,
  lightning attention) are published with the same type and are refused.
- `bailing_moe` (Ling 2.0, Ring-1T: BailingMoeV2ForCausalLM) is GLM-4.5 with other names and one tensor for query, key and
  value (modeling_bailing_moe_v2.py of inclusionAI/Ling-mini-2.0).
- `step3p5` (Step-3.5) is the decoder of Step-3.7: its config.json is the text_config of Step-3.7. transformers has no class
  for the decoder alone.
- `intern_s2_preview` (Intern-S2-Preview) is Qwen3.5 MoE with a tower for time series, as in vLLM and SGLang.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

Values = dict[str, Any]


class PublishedTypeError(ValueError):
    """A configuration that its architecture's class cannot express; the message gives the reason."""


class _Published(NamedTuple):
    """How a type is read: transformers' type, and the function that translates the fields."""

    architecture: str
    translate: Callable[[Values], Values]


def read_published(path: Path) -> PreTrainedConfig | None:
    """Read a config.json with a published type of this module. Return None if it has another type.

    Raises:
        PublishedTypeError: The architecture's class cannot express the configuration.
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
    """Return the transformers type that reads a model type; usually the same type."""
    return _TYPES[model_type].architecture if model_type in _TYPES else model_type


def published_types() -> list[str]:
    """Return the types that transformers lacks."""
    return [name for name, published in _TYPES.items() if name != published.architecture]


def _find(values: Values) -> _Published | None:
    model_type = values.get("model_type")
    if model_type == "mimo_v2_flash" and "hybrid_layer_pattern" not in values:
        return None  # the form that transformers writes
    return _TYPES.get(str(model_type))


def settle(model: PreTrainedModel) -> None:
    """Adapt the sizes and tensor names of a model on the meta device to its published form."""
    form: Mapping[str, Any] = getattr(model.config, _FORM, None) or {}
    if "sliding_kv_heads" in form:
        for layer in model.base_model.layers:
            if layer.self_attn.sliding_window is not None:
                _set_heads(layer.self_attn, int(form["sliding_kv_heads"]))
    transforms: list[Any] = [WeightRenaming(old, new) for old, new in form.get("renamed", {}).items()]
    if "fused" in form:
        parts = [f"{name}_proj.weight" for name in "qkv"]
        transforms.append(
            WeightConverter([form["fused"]], parts, operations=[_SplitGroups(int(form["groups"]))])
        )
    if transforms:
        model.conversions = [*get_model_conversion_mapping(model), *transforms]
    if "left_out" in form:
        ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
        model._keys_to_ignore_on_load_unexpected = [*ignored, form["left_out"]]


def row_parts(config: Any) -> tuple[str, int] | None:
    """Return the name suffix of weights that were quantised in parts of their rows, and the number of parts."""
    form = getattr(config, _FORM, None) or {}
    return (form["fused"], int(form["groups"])) if form.get("groups", 1) > 1 else None


def _set_heads(attention: Any, num_kv_heads: int) -> None:
    """Set an attention's number of key and value heads, which its class derives differently."""
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


class _SplitGroups(ConversionOps):  # type: ignore[misc]  # transformers has no type for it
    """Split a fused projection, with rows in groups of [query, key, value], into query, key and value."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups

    @torch.no_grad()
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
        groups = fused.view(self._num_groups, -1, *fused.shape[1:])
        parts = torch.split(groups, [each // self._num_groups for each in rows], dim=1)
        return {name: part.flatten(0, 1) for name, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("checkpoints cannot be written in this form")


_FORM = "published_form"  # configuration attribute that `settle` and `row_parts` read
_MIMO_SAME = (  # fields of sliding layers and of all others; transformers has one for both
    ("swa_num_attention_heads", "num_attention_heads"),
    ("swa_head_dim", "head_dim"),
    ("swa_v_head_dim", "v_head_dim"),
)
_MIMO_FIXED: dict[str, tuple[Any, ...]] = {  # values that transformers' class implements
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
    """Translate a published MiMo-V2 configuration to the fields of transformers' MiMoV2FlashConfig."""
    for name, served in _MIMO_FIXED.items():
        if values.get(name, served[0]) not in served:
            raise PublishedTypeError(f"{name} = {values[name]!r}; must be {' or '.join(map(repr, served))}")
    for name, other in _MIMO_SAME:
        if values.get(name, values.get(other)) != values.get(other):
            raise PublishedTypeError(
                f"{name} = {values[name]!r} and {other} = {values.get(other)!r} differ; they must be equal"
            )
    pattern, sparse = values.get("hybrid_layer_pattern"), values.get("moe_layer_freq")
    num_layers = values.get("num_hidden_layers")
    for name, each in (("hybrid_layer_pattern", pattern), ("moe_layer_freq", sparse)):
        if not isinstance(each, list) or len(each) != num_layers or not set(each) <= {0, 1}:
            raise PublishedTypeError(f"{name} is not a list of {num_layers} zeros and ones")
    assert isinstance(pattern, list) and isinstance(sparse, list), "checked above"
    rotary = {"rope_type": "default", "partial_rotary_factor": values.get("partial_rotary_factor", 1.0)}
    bases = {
        "full_attention": values["rope_theta"],
        "sliding_attention": values.get("swa_rope_theta", values["rope_theta"]),
    }
    kv_heads = int(values["num_key_value_heads"])
    is_fused = values.get("attention_projection_layout") == "fused_qkv"
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
        # transformers adds the current token to this.
        "sliding_window_size": values.get("sliding_window_size", values.get("sliding_window")),
        _FORM: {
            "sliding_kv_heads": values.get("swa_num_key_value_heads", 2 * kv_heads),
            "left_out": r"^(visual|audio_encoder|speech_embeddings)\.",
            **({"fused": "qkv_proj.weight", "groups": kv_heads} if is_fused else {}),
        },
    }


_BAILING_FIXED: dict[str, tuple[Any, ...]] = {  # values that transformers' class implements
    "architectures": (["BailingMoeV2ForCausalLM"],),
    "score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "use_qkv_bias": (False,),
    "use_bias": (False,),
    "norm_head": (False,),
    "use_sliding_window": (False,),
}


def _translate_bailing(values: Values) -> Values:
    """Translate a published Ling 2.0 configuration to the fields of transformers' Glm4MoeConfig."""
    _check_fixed(values, _BAILING_FIXED)
    shared = int(values["num_shared_experts"])
    size = values.get("moe_shared_expert_intermediate_size")
    if size not in (None, shared * values["moe_intermediate_size"]):
        raise PublishedTypeError(
            f"moe_shared_expert_intermediate_size = {size}; it must be num_shared_experts times moe_intermediate_size"
        )
    gone = {"num_experts", "num_shared_experts", "architectures"}
    return {name: value for name, value in values.items() if name not in gone} | {
        "n_routed_experts": values["num_experts"],
        "n_shared_experts": shared,
        "n_group": values["n_group"],
        "topk_group": values["topk_group"],
        "routed_scaling_factor": values["routed_scaling_factor"],
        "first_k_dense_replace": values["first_k_dense_replace"],
        "use_qk_norm": values.get("use_qk_norm", False),
        "attention_bias": False,
        "partial_rotary_factor": values.get("partial_rotary_factor", 1.0),
        _FORM: {
            "fused": "query_key_value.weight",
            "groups": 1,
            "renamed": {
                r"^model\.word_embeddings\.": "model.embed_tokens.",
                r"\.attention\.": ".self_attn.",
                r"\.self_attn\.dense\.": ".self_attn.o_proj.",
                r"\.query_layernorm\.": ".q_norm.",
                r"\.key_layernorm\.": ".k_norm.",
                r"\.mlp\.gate\.expert_bias": ".mlp.gate.e_score_correction_bias",
            },
        },
    }


def _translate_intern_s2(values: Values) -> Values:
    """Translate Intern-S2-Preview's configuration to one of Qwen3.5 MoE."""
    text, vision = values.get("text_config"), values.get("vision_config")
    if not isinstance(text, dict) or not isinstance(vision, dict) or not text.get("num_experts"):
        raise PublishedTypeError(
            "it needs a text_config with num_experts and a vision_config, as Qwen3.5 MoE has them"
        )
    types = {"text_config": (text, "qwen3_5_moe_text"), "vision_config": (vision, "qwen3_5_moe_vision")}
    inner = {name: {**part, "model_type": kind} for name, (part, kind) in types.items()}
    left_out = r"^(model\.time_series|time_series|time_series_forecaster)\."
    return (
        {name: value for name, value in values.items() if name != "ts_config"}
        | inner
        | {_FORM: {"left_out": left_out}}
    )


def _translate_step(values: Values) -> Values:
    """Translate Step-3.5's configuration to Step-3.7's, without the towers."""
    outer = ("quantization_config", "eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype")
    return {"text_config": values, **{name: values[name] for name in outer if name in values}}


def _check_step(values: Values) -> Values:
    """Refuse a Step-3.7 configuration that is not nested: transformers would use its own defaults instead."""
    if not isinstance(values.get("text_config"), dict):
        raise PublishedTypeError("it has no text_config; supported: Step-3.7's published form, which has one")
    return values


def _translate_bailing_hybrid(values: Values) -> Values:
    """Refuse Ling 2.6. It has Ling 3.0's type, but not the linear attention of transformers' class."""
    _check_fixed(values, {"architectures": (["BailingMoeV3ForCausalLM"], ["BailingHybridForCausalLM"], None)})
    return values


def _check_fixed(values: Values, fixed: Mapping[str, tuple[Any, ...]]) -> None:
    for name, served in fixed.items():
        if values.get(name, served[0]) not in served:
            raise PublishedTypeError(f"{name} = {values[name]!r}; must be {' or '.join(map(repr, served))}")


_TYPES: Mapping[str, _Published] = {
    "bailing_hybrid": _Published("bailing_hybrid", _translate_bailing_hybrid),
    "bailing_moe": _Published("glm4_moe", _translate_bailing),
    "intern_s2_preview": _Published("qwen3_5_moe", _translate_intern_s2),
    "kimi_k2": _Published("deepseek_v3", lambda values: values),
    "step3p5": _Published("step3p7", _translate_step),
    "step3p7": _Published("step3p7", _check_step),
    "mimo_v2": _Published("mimo_v2_flash", _translate_mimo),
    "mimo_v2_flash": _Published("mimo_v2_flash", _translate_mimo),
}
