"""Whether a checkpoint's images can be served, and which token marks an image in its prompts. Reads only JSON.

A model takes images if its family's towers, positions and processor were checked against `transformers`. Others are refused with the
reason, because a wrong position or a missing mask changes answers without an error.
"""

import importlib.util
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Attention among the tokens of an image is causal. `moe.vision` has the rest.
LINES = ("mistral3", "mistral_large4")  # a token follows each line of an image
IMAGE_TYPES = ("glm4v_moe", "intern_s2_preview", "qwen3_5_moe", "qwen3_vl_moe", *LINES)
LINE_TOKENS = ("[IMG_BREAK]", "[IMG_END]")  # after a line, and after the last one (Pixtral's processor)
_NEEDS_TORCHVISION = "its image processor needs torchvision, which WideEP does not use"
WHY_NOT = {
    "ernie4_5_vl_moe": "its experts for images are not loaded",
    "gemma4": "the tokens of an image attend to each other in both directions, which the kernels do not support",
    "kimi_k25": _NEEDS_TORCHVISION,
    "llama4": _NEEDS_TORCHVISION,
}
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class ImageSupport(NamedTuple):
    """How a model takes images."""

    token_id: int  # once per image in a rendered prompt, once per row in a request
    why_not: str = ""  # the reason if it takes none, in a form that follows "because"
    has_lines: bool = False  # LINE_TOKENS mark the lines of an image


def image_support_of(
    directory: Path, special_tokens: Collection[str] = (), *, device: str = "cpu"
) -> ImageSupport:
    """Read whether a model directory's images can be served on a device.

    Args:
        special_tokens: Those of the model's tokenizer.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return ImageSupport(0, f"{path} cannot be read")
    if not isinstance(config, dict):
        return ImageSupport(0, "config.json is not an object")
    token_id = config.get("image_token_id", config.get("image_token_index"))
    has_lines = config.get("model_type") in LINES
    reason = _why_not(config, directory, device)
    if not reason and not isinstance(token_id, int):
        reason = "config.json has no image_token_id"
    if not reason and has_lines and not set(LINE_TOKENS) <= set(special_tokens):
        reason = f"its tokenizer lacks {' or '.join(LINE_TOKENS)}"
    return ImageSupport(token_id if isinstance(token_id, int) else 0, reason, has_lines)


def _why_not(config: Mapping[str, Any], directory: Path, device: str) -> str:
    model_type = str(config.get("model_type"))
    if not isinstance(config.get("vision_config"), dict):
        return "it has no image tower"
    if model_type not in IMAGE_TYPES:
        return WHY_NOT.get(model_type, f"images for models of type {model_type} are not supported")
    if device != "cpu":
        return "images are supported with --device cpu only"
    if not any((directory / name).is_file() for name in PROCESSOR_FILES):
        return f"its directory has no {PROCESSOR_FILES[0]}"
    if importlib.util.find_spec("PIL") is None:
        return "Pillow is not installed on the server (pip install 'wideep[images]')"
    return ""
