"""Fields of a checkpoint's config.json and names of its tensors, as model families have them.

This module reads only dictionaries, so that the front, which has no torch, can use it.
"""

import re
from collections.abc import Mapping
from typing import Any

# Towers for images and audio, and their projectors; they are not read (`moe.text_part`).
NOT_OF_TEXT = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|audio_tower|multi_modal_projector|mm_projector|embed_vision|embed_audio"
    r"|resampler_model|vision_encoder|vision_language_adapter|patch_merger|pre_mm_projector_norm)\."
)
EXPERT_COUNT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K_FIELDS = (
    "num_experts_per_tok",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
    "num_experts_per_token",
)


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts per layer in a config. Returns 0 if the config has no such field."""
    return max(most(config, name) for name in EXPERT_COUNT_FIELDS)


def experts_per_token(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts per token in a config. Returns 0 if the config has no such field."""
    return max(most(config, name) for name in _TOP_K_FIELDS)


def field_of(config: Mapping[str, Any], name: str) -> Any:
    """Return a field of the config or, for models with several parts, of the text model's config."""
    parts = (config, config.get("text_config"), config.get("llm_config"))
    found = (part.get(name) for part in parts if isinstance(part, Mapping))
    return next((value for value in found if value is not None), None)


def most(config: Mapping[str, Any], name: str) -> int:
    """Return a count in a config, or the maximum of its counts per layer. Returns 0 if the config has no such field."""
    value = field_of(config, name)
    counts = value if isinstance(value, list) else [value]
    return max((count for count in counts if isinstance(count, int)), default=0)
