"""Which model types of the installed `transformers` can be served, by the same checks as at start.

A type's default configuration is saved and built like a model directory. If the defaults lack something that makes a
model of the type (number of experts, layers that attend), it is set as in published checkpoints.
"""

import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from moe.families import UnsupportedModelError
from moe.model import Skeleton
from moe.published_types import architecture_of, published_types
from moe.text_part import is_wrapped


class SupportStatus(StrEnum):
    """Result of the checks for a type."""

    SERVED = "served"
    TEXT_PART = "text part"  # its text decoder is served
    REFUSED = "refused"


class Verdict(NamedTuple):
    """Result of the checks at start for one type."""

    model_type: str
    status: SupportStatus
    why: str  # reason for a refusal, one sentence; "" otherwise


_GEMMA4 = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_GRANITE_HYBRID = {"layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 4}
_MINIMAX_M3 = {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57}
_QWEN4 = {
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}  # fmt: skip
# By type, fields to set in its text configuration.
_SET: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_ocr2": {"num_experts_per_tok": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 31},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "head_dim": 128},
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "diffusion_gemma": _GEMMA4,
    "glm4v_moe": {"head_dim": 128},
    "granitemoehybrid": _GRANITE_HYBRID,
    "hunyuan_v1_moe": {"num_experts": 64, "moe_topk": 8, "head_dim": 128},
    "lfm2_moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
    "minimax_m3_vl": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "qwen3_omni_moe_thinker": {"head_dim": 128, "num_attention_heads": 32},
    "qwen4_exp": _QWEN4,
    "step3p5": {"sliding_window": 512},
    "step3p7": {"sliding_window": 512},
    "qwen4_exp_text": _QWEN4,
}


def moe_types() -> list[str]:
    """Return all types with experts in their configuration: transformers' own, and those of `published_types`."""
    return [name for name in sorted({*CONFIG_MAPPING_NAMES, *published_types()}) if _config(name) is not None]


def survey(model_types: list[str]) -> Iterator[Verdict]:
    """Check types one after the other; each takes about a second.

    Args:
        model_types: Names from `moe_types`.
    """
    for model_type in model_types:
        config = _config(model_type)
        assert config is not None, f"{model_type} has no experts in its configuration"
        yield _verdict(model_type, config)


def _config(model_type: str) -> PreTrainedConfig | None:
    """Return a type's configuration, or None if it has no experts or cannot be made."""
    try:
        config = AutoConfig.for_model(architecture_of(model_type))
        text = config.get_text_config(decoder=True)
        names = {*config.to_dict(), *text.to_dict()}
    except (AttributeError, ImportError, KeyError, StrictDataclassError, TypeError, ValueError):
        return None
    if not any("experts" in name for name in names):
        return None
    for name, value in _SET.get(model_type, {}).items():
        setattr(text, name, value)
    return config


def _verdict(model_type: str, config: PreTrainedConfig) -> Verdict:
    with tempfile.TemporaryDirectory() as directory:
        try:
            config.save_pretrained(directory)
            Skeleton(Path(directory))
        except StrictDataclassError as error:
            return Verdict(
                model_type, SupportStatus.REFUSED, f"transformers rejects this configuration: {error}"
            )
        except UnsupportedModelError as error:
            return Verdict(model_type, SupportStatus.REFUSED, str(error))
    return Verdict(model_type, SupportStatus.TEXT_PART if is_wrapped(config) else SupportStatus.SERVED, "")
