"""What a model's config.json says, and whether it is of a model that is served.

A first look by field names; the authoritative check, against the model's own code, comes when moe builds the model.
"""

import json
from pathlib import Path
from typing import Any

from moe.load.quantisation import UnservedQuantisationError, read_quantisation
from server.process.preflight.preflight_error import PreflightError

EXPERT_COUNT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def read_config(directory: Path) -> dict[str, Any]:
    """Return a model directory's config.json."""
    if not directory.exists():
        raise PreflightError(f"the model path {directory} does not exist")
    if not directory.is_dir():
        raise PreflightError(
            f"the model path {directory} is a file; give the directory that holds config.json"
        )
    path = directory / "config.json"
    if not path.is_file():
        raise PreflightError(f"{directory} is not a model directory: it has no config.json")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise PreflightError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise PreflightError(f"{path} is not a JSON object")
    return config


def check_is_moe(config: dict[str, Any], directory: Path) -> None:
    """Check that a config has experts."""
    if num_experts(config) < 2:
        raise PreflightError(
            f"{directory} is not a Mixture-of-Experts model: its config.json (model_type "
            f"{config.get('model_type', 'unknown')!r}) has none of {', '.join(EXPERT_COUNT_FIELDS)} above 1; WideEP "
            "serves MoE models only"
        )


def check_quantisation(config: dict[str, Any], directory: Path) -> None:
    """Check that the weights are kept in a way that is served."""
    try:
        read_quantisation(field_of(config, "quantization_config"))
    except UnservedQuantisationError as error:
        raise PreflightError(f"{directory} cannot be served: {error}") from error


def check_length(config: dict[str, Any], max_model_len: int | None) -> None:
    """Check that the length asked for is one the model was made for."""
    longest = max(largest(field_of(config, name)) for name in _LENGTH_FIELDS)
    if max_model_len is not None and 0 < longest < max_model_len:
        raise PreflightError(f"--max-model-len is {max_model_len}; the model takes at most {longest} tokens")


def num_experts(config: dict[str, Any]) -> int:
    """Return the routed experts per layer that a config names, 0 where it names none."""
    return max((largest(field_of(config, name)) for name in EXPERT_COUNT_FIELDS), default=0)


def field_of(config: dict[str, Any], name: str) -> Any:
    """Look a field up in the config or, for models of several parts, in its text model's."""
    parts = (config, config.get("text_config"), config.get("llm_config"))
    return next((part[name] for part in parts if isinstance(part, dict) and part.get(name) is not None), None)


def largest(value: Any) -> int:
    """Return a count, or the largest of a count per layer."""
    counts = value if isinstance(value, list) else [value]
    return max((count for count in counts if isinstance(count, int)), default=0)
