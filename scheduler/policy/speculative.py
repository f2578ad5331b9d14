"""`--speculative-config`: how tokens are drafted, and how many. Uses vLLM's keys; checked before weights are read.

Three methods: the model's own layers for multi-token prediction (mtp); continuations of the same few tokens earlier in
the request (ngram); or in the request and in recent answers, by frequency (suffix). Does not use torch.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MOST_DRAFTS = 32  # drafts that a step may try after the newest token
_OWN_KEYS = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "mtp": (),
}
# vLLM's older names for mtp, one per model family.
_MTP_NAMES = (
    "deepseek_mtp", "ernie_mtp", "glm4_moe_mtp", "mimo_mtp", "nemotron_h_mtp", "qwen3_next_mtp", "qwen3_5_mtp",
)  # fmt: skip
_UNUSED = {"draft_tensor_parallel_size": 1}  # keys accepted with this value only, which has no effect


class SpeculativeConfigError(ValueError):
    """An unsupported speculative configuration. The message names what is allowed."""


class Method(StrEnum):
    """Source of drafts. The values are vLLM's."""

    NGRAM = "ngram"
    SUFFIX = "suffix"
    MTP = "mtp"


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted.

    Attributes:
        num_drafts: Most drafts tried after a sequence's newest token.
        shortest_match, longest_match: Number of tokens at the end of the text that must have occurred before.
        max_cached_requests: Answers that a rank keeps as a source for later requests (suffix).
        drafts_per_match: Most drafts per matched token (suffix).
        least_share: Least share of earlier occurrences that continued with the draft (suffix).
    """

    method: Method
    num_drafts: int
    shortest_match: int = 2
    longest_match: int = 5
    max_cached_requests: int = 0
    drafts_per_match: float = 1.0
    least_share: float = 0.0


def parse_speculative_config(given: str) -> SpeculativeConfig:
    """Parse a configuration.

    Args:
        given: JSON object with vLLM's keys.

    Raises:
        SpeculativeConfigError: The message names the value seen and the values allowed.
    """
    try:
        keys = json.loads(given)
    except json.JSONDecodeError as error:
        raise SpeculativeConfigError(f"it is not valid JSON ({error})") from error
    if not isinstance(keys, dict):
        raise SpeculativeConfigError(
            f'it is {given}; give a JSON object such as {{"method": "ngram", "num_speculative_tokens": 4}}'
        )
    keys = {key: value for key, value in keys.items() if value is not None}
    method = _method(keys)
    for key, value in _UNUSED.items():
        if keys.pop(key, value) != value:
            raise SpeculativeConfigError(f"{key} must be {value}: every rank makes its own drafts")
    allowed = ("num_speculative_tokens", *_OWN_KEYS[method.value])
    if unknown := sorted(keys.keys() - {*allowed}):
        raise SpeculativeConfigError(
            f"{unknown[0]} is not a key of method {method.value}; the keys are {', '.join(allowed)}"
        )
    readers = {Method.NGRAM: _ngram, Method.SUFFIX: _suffix, Method.MTP: _mtp}
    return readers[method](keys)


def _method(keys: dict[str, Any]) -> Method:
    name = keys.pop("method", None)
    if name in _MTP_NAMES:
        return Method.MTP
    methods = [method.value for method in Method]
    if name not in methods:
        seen = "no method is given" if name is None else f"the method is {name!r}"
        raise SpeculativeConfigError(f"{seen}; it must be one of {', '.join(methods)}")
    return Method(name)


def _ngram(keys: dict[str, Any]) -> SpeculativeConfig:
    # As in vLLM, one of the two sets both, and 5 is the default.
    shortest, longest = keys.get("prompt_lookup_min"), keys.get("prompt_lookup_max")
    shortest, longest = shortest or longest or 5, longest or shortest or 5
    for key, value in (("prompt_lookup_min", shortest), ("prompt_lookup_max", longest)):
        _whole(key, value, 1, 64)
    if shortest > longest:
        raise SpeculativeConfigError(
            f"prompt_lookup_min is {shortest}; it must not exceed prompt_lookup_max, which is {longest}"
        )
    return SpeculativeConfig(
        method=Method.NGRAM, num_drafts=_num_drafts(keys), shortest_match=shortest, longest_match=longest
    )


def _suffix(keys: dict[str, Any]) -> SpeculativeConfig:
    depth = _whole("suffix_decoding_max_tree_depth", keys.get("suffix_decoding_max_tree_depth", 24), 2, 256)
    cached = "suffix_decoding_max_cached_requests"
    return SpeculativeConfig(
        method=Method.SUFFIX,
        num_drafts=_num_drafts(keys, default=min(depth, MOST_DRAFTS)),
        longest_match=depth,
        max_cached_requests=_whole(cached, keys.get(cached, 10_000), 0, 1_000_000),
        drafts_per_match=_number("suffix_decoding_max_spec_factor", keys, 1.0, 0.0, 64.0),
        least_share=_number("suffix_decoding_min_token_prob", keys, 0.1, 0.0, 1.0),
    )


def _mtp(keys: dict[str, Any]) -> SpeculativeConfig:
    return SpeculativeConfig(method=Method.MTP, num_drafts=_num_drafts(keys, default=1))


def _num_drafts(keys: dict[str, Any], default: int | None = None) -> int:
    value = keys.get("num_speculative_tokens", default)
    if value is None:
        raise SpeculativeConfigError(
            "num_speculative_tokens is missing; give how many tokens to draft, such as 4"
        )
    return _whole("num_speculative_tokens", value, 1, MOST_DRAFTS)


def _whole(key: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SpeculativeConfigError(f"{key} is {value!r}; it must be a whole number from {least} to {most}")
    return value


def _number(key: str, keys: dict[str, Any], default: float, least: float, most: float) -> float:
    value = keys.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise SpeculativeConfigError(f"{key} is {value!r}; it must be a number from {least:g} to {most:g}")
    return float(value)
