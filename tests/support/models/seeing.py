"""Tiny seeded checkpoints of models that take images, and prompts with images for them and for `transformers`' whole model.

Images are random pixels, already in patches, as an image processor returns them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from kvcache.images import Image
from moe.vision.tower import Tower
from tests.support.models.families import VOCABULARY, make_config, seed_special_tensors
from tests.support.models.published_types import as_intern_s2
from tests.support.models.tiny_tokenizer import write_tokenizer

ONE_AXIS = ("kimi_k25",)  # positions count the rows of an image
LINES = ("mistral3", "mistral_large4")  # a token follows each line of an image
WITH_EXPERTS = ("ernie4_5_vl_moe",)  # for images
SAME_CLASS = {"intern_s2_preview": "qwen3_5_moe"}  # types that `transformers` lacks
PLACE = 250  # token of a row of an image
PART_END, LINE_END, LAST = (
    248,
    249,
    247,
)  # tokens after a part and after a line of an image, and before its last part
BEGIN, END = 252, 253  # before an image, and after it
_TEXT_TOKENS = 240  # others are special
MERGE = 2  # patches per row, in each direction


class Picture(NamedTuple):
    """An image as its processor returns it."""

    inputs: dict[str, Tensor]
    token_ids: list[int]  # of its rows, and those between them
    has_experts: bool = False  # the model has experts for images
    has_axes: bool = False  # the model's inputs name the tokens of images


class SeenPrompt(NamedTuple):
    """A prompt with pictures."""

    token_ids: list[int]
    pictures: list[Picture]
    starts: list[int]  # of the pictures' tokens

    def inputs(self, token_ids: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Return the inputs of `transformers`' whole model for the prompt, or for these tokens that begin with it."""
        ids = torch.tensor([self.token_ids if token_ids is None else list(token_ids)])
        inputs = {"input_ids": ids}
        if self.pictures and self.pictures[0].has_axes:
            inputs["mm_token_type_ids"] = (ids == PLACE).int()
        if self.pictures and self.pictures[0].has_experts:  # as transformers' processor of the family
            inputs["moe_mm_token_type_ids"] = torch.isin(ids, torch.tensor([PLACE, BEGIN, END])).int()
        for name in self.pictures[0].inputs if self.pictures else ():
            if name == "aspect_ratios":  # only processors use it
                continue
            parts = [picture.inputs[name] for picture in self.pictures]
            if "image_position_ids" in self.pictures[0].inputs:
                most_patches = max(part.shape[1] for part in parts)
                blank = -1 if name == "image_position_ids" else 0
                parts = [pad(part, (0, 0, 0, most_patches - part.shape[1]), value=blank) for part in parts]
            if name == "pixel_values" and parts[0].dim() == 4:  # pictures of a batch are padded to one size
                most = [max(part.shape[dim] for part in parts) for dim in (2, 3)]
                parts = [
                    pad(part, (0, most[1] - part.shape[3], 0, most[0] - part.shape[2])) for part in parts
                ]
            inputs[name] = torch.cat(parts)
        return inputs

    def images(self, tower: Tower) -> list[Image]:
        """Return the pictures as a request carries them."""
        found = []
        for start, picture in zip(self.starts, self.pictures, strict=True):
            seen = tower.encode(picture.inputs)
            digest = f"{int(picture.inputs['pixel_values'].double().sum() * 1e6) % 2**64:064x}"
            rows = seen.rows_LND.numpy().copy()
            places = [place for place, token in enumerate(picture.token_ids) if token == PLACE]
            length = seen.part or len(places)
            assert len(places) == rows.shape[1]
            for first in range(0, len(places), length):
                assert places[first + length - 1] == places[first] + length - 1, "a part is consecutive"
                place = start + places[first]
                found.append(Image(digest, place, length, first, seen.height, seen.width, rows=rows))
        return found


def write_seeing_checkpoint(
    family: str,
    directory: Path,
    seed: int = 0,
    *,
    vocab_size: int = VOCABULARY,
    place: int = PLACE,
    **settings: Any,
) -> PreTrainedModel:
    """Write a checkpoint with a tower of three layers. Return the oracle, `transformers`' whole eager model in float32.

    Args:
        settings: Fields of the text decoder's configuration that differ.
    """
    per_layer = {"vocab_size_per_layer_input": vocab_size} if family == "gemma4" else {}
    config = make_config(SAME_CLASS.get(family, family), vocab_size=vocab_size, **per_layer, **settings)
    vision = config.vision_config
    changes = {"depth": 3, "deepstack_visual_indexes": [0, 2]}
    if family in LINES:
        changes = {"num_hidden_layers": 2, "image_size": 14 * 16}
    if family == "llama4":
        wide = vision.hidden_size * MERGE**2  # hidden values of the patches that become a row
        changes = {"num_hidden_layers": 2, "image_size": 14 * 4, "intermediate_size": wide}
        changes |= dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 48)
    if family == "gemma4":
        changes = {"num_hidden_layers": 2, "pooling_kernel_size": MERGE, "position_embedding_size": 64}
        config.text_config.use_bidirectional_attention = "vision"
        config.boi_token_id, config.eoi_token_id = place + 2, place + 3
    for name, value in changes.items():
        if hasattr(vision, name):
            setattr(vision, name, value)
    config.image_token_id = place
    for name in ("video_token_id", "video_start_token_id", "video_end_token_id"):
        if hasattr(config, name) and family not in ONE_AXIS:  # Kimi's is outside the vocabulary
            setattr(config, name, place + 1)
    if hasattr(config, "projection_hidden_size"):
        config.projection_hidden_size = vision.hidden_size
    if family in WITH_EXPERTS:
        config.image_start_token_id, config.image_end_token_id = place + BEGIN - PLACE, place + END - PLACE
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForMultimodalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    model.set_experts_implementation("eager")
    seed_special_tensors(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # rows as large as embedded tokens, so that a wrong one shows
        for name, tensor in model.named_parameters():
            if "language_model" not in name and "lm_head" not in name and tensor.dim() > 1:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor[0].numel() ** 0.5)
        # No answer has the token of a row: `transformers` would count it as one of an image.
        model.get_output_embeddings().weight[place] = 0
        # The tokenizer's first token is also the padding token. With zeros, all scores of an attention's index would be equal.
        embedding = model.get_input_embeddings().weight
        embedding[0] = torch.randn(embedding.shape[1], generator=generator) * embedding[1:].std()
    model.save_pretrained(directory)
    if family == "intern_s2_preview":
        as_intern_s2(directory)
    return model


def draw_picture(height: int, width: int, seed: int, config: PreTrainedConfig) -> Picture:
    """Draw an image of patches for a model."""
    vision, generator = config.vision_config, torch.Generator().manual_seed(seed)
    lines, columns = height // MERGE, width // MERGE
    if config.model_type == "llama4":
        return _draw_tiles(lines // 2, columns // 2, vision.image_size, generator)
    if config.model_type == "gemma4":
        return _draw_padded(height, width, vision.patch_size, generator)
    if config.model_type in LINES:
        size = height * vision.patch_size, width * vision.patch_size
        inputs = {
            "pixel_values": torch.randn(1, 3, *size, generator=generator),
            "image_sizes": torch.tensor([size]),
        }
        line = [PLACE] * columns + [LINE_END]
        return Picture(inputs, (line * lines)[:-1])  # END takes the place of the last one
    values = getattr(vision, "temporal_patch_size", 1) * 3 * vision.patch_size**2
    inputs = {
        "pixel_values": torch.randn(height * width, values, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }
    if config.model_type in ONE_AXIS:
        patches = inputs["pixel_values"]
        inputs["pixel_values"] = patches.reshape(-1, 3, vision.patch_size, vision.patch_size)
    has_experts, has_axes = config.model_type in WITH_EXPERTS, config.model_type not in ONE_AXIS
    return Picture(inputs, [PLACE] * lines * columns, has_experts, has_axes)


def _draw_padded(height: int, width: int, size: int, generator: torch.Generator) -> Picture:
    """Draw an image of patches with their places, and padding after them."""
    count, padding = height * width, 16
    places = [[place % width, place // width] for place in range(count)] + [[-1, -1]] * padding
    values = torch.rand(1, count + padding, 3 * size**2, generator=generator)
    values[0, count:] = 0
    inputs = {"pixel_values": values, "image_position_ids": torch.tensor([places])}
    return Picture(inputs, [PLACE] * (count // MERGE**2), has_axes=True)


def _draw_tiles(lines: int, columns: int, size: int, generator: torch.Generator) -> Picture:
    """Draw an image of tiles with four rows each. The last one shows the whole image."""
    num_tiles, tile = lines * columns, [PLACE] * 4
    num_tiles += num_tiles > 1
    line = tile + [PART_END, *tile] * (columns - 1) + [LINE_END]
    inputs = {
        "pixel_values": torch.randn(num_tiles, 3, size, size, generator=generator),
        "aspect_ratios": torch.tensor([[lines, columns]]),
    }
    return Picture(inputs, line * lines * (num_tiles > 1) + [LAST, *tile])


def prompt_of(parts: Sequence[int | Picture], seed: int = 0) -> SeenPrompt:
    """Return a prompt of random texts, given by their numbers of tokens, and pictures."""
    generator = torch.Generator().manual_seed(seed)
    prompt = SeenPrompt([], [], [])
    for part in parts:
        if isinstance(part, Picture):
            prompt.token_ids.append(BEGIN)
            prompt.starts.append(len(prompt.token_ids))
            prompt.pictures.append(part)
            prompt.token_ids.extend([*part.token_ids, END])
        else:
            prompt.token_ids.extend(torch.randint(3, _TEXT_TOKENS, (part,), generator=generator).tolist())
    return prompt


# A template as Qwen3-VL's: one token per image between two others.
SEEING_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")  # ids from 2
IMAGE_TOKEN = 2
PROCESSOR: dict[str, object] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",  # as published
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},  # 1 to 16 tokens
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "kimi_k25": {"image_processor_type": "Kimi_K25ImageProcessor", "size": {"max_height": 8, "max_width": 8}},
    "ernie4_5_vl_moe": {"image_processor_type": "Ernie4_5_VLMoeImageProcessor", "temporal_patch_size": 1},
}


class Shown(NamedTuple):
    """How the directory of a family describes images."""

    mark: str  # in the chat template, once per image
    special_tokens: tuple[str, ...]  # ids from 2
    place: int  # token of a row
    processor: dict[str, Any]


SHOWN = {
    "gemma4": Shown(
        "<|image|>",
        ("<|image|>", "<|video|>", "<|image>", "<image|>"),
        place=2,
        processor={
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 14,
            "max_soft_tokens": 70,
            "pooling_kernel_size": MERGE,
        },
    ),
    "llama4": Shown(
        "<|image|>",
        (
            *("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        place=5,
        processor={
            "image_processor_type": "Llama4ImageProcessorFast",  # as published
            "size": {"height": 56, "width": 56},
            "max_patches": 4,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
        },
    ),
}
_SHOWN_AS_QWEN = Shown("<|vision_start|><|image_pad|><|vision_end|>", SPECIAL_TOKENS, IMAGE_TOKEN, PROCESSOR)
_SHOWN_AS_PIXTRAL = Shown(
    "[IMG]",
    ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    place=2,
    processor={
        "image_processor_type": "PixtralImageProcessorFast",  # as published
        "size": {"longest_edge": 14 * 16},
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
)
SHOWN |= {
    "glm4v_moe": Shown(
        "<|begin_of_image|><|image|><|end_of_image|>",
        ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
        place=2,
        processor={**PROCESSOR, "image_processor_type": "Glm4vImageProcessor"},
    ),
    "mistral3": _SHOWN_AS_PIXTRAL,
    "mistral_large4": _SHOWN_AS_PIXTRAL,
    "qwen3_5_moe": _SHOWN_AS_QWEN,
}


def write_seeing_model(directory: Path, family: str = "qwen3_vl_moe") -> PreTrainedModel:
    """Write a model directory that a service can serve with images. Return the oracle."""
    shown = SHOWN.get(family, _SHOWN_AS_QWEN)
    template = SEEING_TEMPLATE.replace(_SHOWN_AS_QWEN.mark, shown.mark)
    write_tokenizer(directory, chat_template=template, special_tokens=shown.special_tokens)
    for name in ("config.json", "generation_config.json"):
        (directory / name).unlink()
    oracle = write_seeing_checkpoint(family, directory, vocab_size=320, place=shown.place)
    processor = shown.processor | OF_FAMILY.get(family, {})
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return oracle
