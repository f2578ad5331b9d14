"""Whether a checkpoint's images can be served, and which token marks an image in its prompts. Reads only JSON.

A model takes images if its family's towers, positions and processor were checked against `transformers`. Others are refused with the
reason, because a wrong position or a missing mask changes answers without an error.
"""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_LINES: dict[str, tuple[str, ...]] = {
    "after_line": ("[IMG_BREAK]",),
    "after": ("[IMG_END]",),
}  # Pixtral's processor
_TILES: dict[str, tuple[str, ...]] = {  # Llama 4's processor
    "shown": ("<|image|>",),
    "before": ("<|image_start|>",),
    "after_part": ("<|tile_x_separator|>",),
    "after_line": ("<|tile_y_separator|>",),
    "before_last": ("<|image|>",),
    "after": ("<|image_end|>",),
}
# Types that take images, and the tokens that show an image or that their processors write next to its rows: special tokens of
# the tokenizer, or fields of config.json. `moe.vision` has the rest.
IMAGE_TYPES: dict[str, dict[str, tuple[str, ...]]] = {
    "ernie4_5_vl_moe": {},
    "gemma4": {"before": ("boi_token_id",), "after": ("eoi_token_id",)},
    "glm4v_moe": {},
    "intern_s2_preview": {},
    "kimi_k25": {},
    "llama4": _TILES,
    "mistral3": _LINES,
    "mistral_large4": _LINES,
    "qwen3_5_moe": {},
    "qwen3_vl_moe": {},
}
_EDGES = ("size.longest_edge", "size.shortest_edge")
_PIXELS = (*_EDGES, "min_pixels", "max_pixels")  # Qwen2-VL's processor
# Settings of a type's image processor that decide how many tokens an image becomes, with a dot before keys of an object.
# --mm-processor-kwargs may change them.
SIZE_SETTINGS: dict[str, tuple[str, ...]] = {
    "ernie4_5_vl_moe": _EDGES,
    "gemma4": ("max_soft_tokens",),
    "glm4v_moe": _EDGES,
    "intern_s2_preview": _PIXELS,
    "kimi_k25": ("size.max_height", "size.max_width", "max_patches"),
    "llama4": ("max_patches",),
    "mistral3": ("size.longest_edge",),
    "mistral_large4": ("size.longest_edge",),
    "qwen3_5_moe": _PIXELS,
    "qwen3_vl_moe": _PIXELS,
}
# Tokens of `transformers`' configurations, which files that it writes may leave out.
_DEFAULT_TOKENS = {"ernie4_5_vl_moe": 100295, "kimi_k25": 163605}
_TOKEN_NAMES = ("image_token_id", "image_token_index", "media_placeholder_token_id")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class ImageTokens(NamedTuple):
    """Tokens of an image in a prompt.

    An image has one part of consecutive rows, or several in lines. Some models mark their parts (Pixtral).
    """

    shown: int  # in a rendered prompt, once per image
    row: int  # in a request, once per row
    before: tuple[int, ...] = ()  # the image
    after_part: tuple[int, ...] = ()  # after a part that another one of its line follows
    after_line: tuple[int, ...] = ()  # after the last part of a line, except the last one of the image
    before_last: tuple[int, ...] = ()  # before the last part of the image
    after: tuple[int, ...] = ()  # the image


class ImageSupport(NamedTuple):
    """How a model takes images."""

    tokens: ImageTokens
    why_not: str = ""  # the reason if it takes none, in a form that follows "because"
    stays_whole: bool = False  # one step must run all tokens of an image, because they attend to each other in both directions


_NO_TOKENS = ImageTokens(0, 0)
_WITH_IMAGE_EXPERTS = "ernie4_5_vl_moe"


def image_support_of(
    directory: Path, special_ids: Mapping[str, int] | None = None, *, has_image_experts: bool = True
) -> ImageSupport:
    """Read whether a model directory's images can be served.

    Args:
        special_ids: Special tokens of the model's tokenizer.
        has_image_experts: Whether ranks read experts for images (`preflight.memory.has_image_experts`).
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return ImageSupport(_NO_TOKENS, f"{path} cannot be read")
    if not isinstance(config, dict):
        return ImageSupport(_NO_TOKENS, "config.json is not an object")
    if reason := why_no_images(config, directory, has_image_experts=has_image_experts):
        return ImageSupport(_NO_TOKENS, reason)
    default = _DEFAULT_TOKENS.get(config["model_type"])
    token_id = next((config[name] for name in _TOKEN_NAMES if name in config), default)
    if not isinstance(token_id, int):
        return ImageSupport(_NO_TOKENS, "config.json has no image_token_id")
    names = IMAGE_TYPES[config["model_type"]]
    fields = {
        name: value for name, value in config.items() if name.endswith("_token_id") and value is not None
    }
    known = {**(special_ids or {}), **fields}
    missing = [name for each in names.values() for name in each if name not in known]
    if missing:
        return ImageSupport(_NO_TOKENS, f"its tokenizer or config.json lacks {' and '.join(missing)}")
    around = {field: tuple(known[name] for name in each) for field, each in names.items()}
    [shown] = around.pop("shown", (token_id,))
    text = config.get("text_config")
    stays_whole = isinstance(text, dict) and text.get("use_bidirectional_attention") == "vision"
    return ImageSupport(ImageTokens(shown, token_id, **around), stays_whole=stays_whole)


def why_no_images(config: Mapping[str, Any], directory: Path, *, has_image_experts: bool) -> str:
    """Return why a model takes no images, from its config.json and its files, in a form that follows "because"; empty if it may."""
    model_type = str(config.get("model_type"))
    if not isinstance(config.get("vision_config"), dict):
        return "it has no image tower"
    if model_type not in IMAGE_TYPES:
        return f"images for models of type {model_type} are not supported"
    if not has_image_experts and model_type == _WITH_IMAGE_EXPERTS:
        return f"images for models of type {model_type} are not supported with --enable-torch-compile"
    if not any((directory / name).is_file() for name in PROCESSOR_FILES):
        return f"its directory has no {PROCESSOR_FILES[0]}"
    if importlib.util.find_spec("PIL") is None:
        return "Pillow is not installed on the server (pip install 'wideep[images]')"
    return ""
