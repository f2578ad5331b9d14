"""What a checkpoint's config.json says, under the names that families give it.

Reads dictionaries and nothing else, so that the front, which has no torch, uses it as well.
"""

from collections.abc import Mapping
from typing import Any

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
    """Return the routed experts per layer that a config names, 0 where it names none."""
    return max((largest(field_of(config, name)) for name in EXPERT_COUNT_FIELDS), default=0)


def experts_per_token(config: Mapping[str, Any]) -> int:
    """Return the routed experts of a token that a config names, 0 where it names none."""
    return max((largest(field_of(config, name)) for name in _TOP_K_FIELDS), default=0)


def field_of(config: Mapping[str, Any], name: str) -> Any:
    """Look a field up in the config or, for models of several parts, in its text model's."""
    parts = (config, config.get("text_config"), config.get("llm_config"))
    return next((part[name] for part in parts if isinstance(part, dict) and part.get(name) is not None), None)


def largest(value: Any) -> int:
    """Return a count, or the largest of a count per layer."""
    counts = value if isinstance(value, list) else [value]
    return max((count for count in counts if isinstance(count, int)), default=0)
