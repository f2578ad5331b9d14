"""Tiny seeded checkpoints of models that take images, and prompts with images for them and for `transformers`' whole model.

Images are random pixels, already in patches, as an image processor returns them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from kvcache.images import Image
from moe.vision.tower import Tower
from tests.support.models.families import VOCABULARY, make_config, seed_special_tensors
from tests.support.models.tiny_tokenizer import write_tokenizer

LINES = ("mistral3", "mistral_large4")  # a token follows each line of an image
PLACE, LINE_END = 250, 249  # tokens of a row of an image, and after a line of it
BEGIN, END = 252, 253  # before an image, and after it
_TEXT_TOKENS = 240  # others are special
MERGE = 2  # patches per row, in each direction


class Picture(NamedTuple):
    """An image as its processor returns it."""

    inputs: dict[str, Tensor]
    height: int  # rows per column
    width: int  # rows per line
    has_lines: bool  # a token follows each line


class SeenPrompt(NamedTuple):
    """A prompt with pictures."""

    token_ids: list[int]
    pictures: list[Picture]
    starts: list[int]  # of the pictures' tokens

    def inputs(self, token_ids: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Return the inputs of `transformers`' whole model for the prompt, or for these tokens that begin with it."""
        ids = torch.tensor([self.token_ids if token_ids is None else list(token_ids)])
        inputs = {"input_ids": ids}
        if self.pictures and not self.pictures[0].has_lines:
            inputs["mm_token_type_ids"] = (ids == PLACE).int()
        for name in self.pictures[0].inputs if self.pictures else ():
            parts = [picture.inputs[name] for picture in self.pictures]
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
            assert bool(seen.line) == picture.has_lines
            if not seen.line:
                shape = {"height": seen.height, "width": seen.width}
                found.append(Image(digest, start, rows.shape[1], rows=rows, **shape))
            for line in range(rows.shape[1] // seen.line if seen.line else 0):
                first = line * seen.line
                found.append(Image(digest, start + first + line, seen.line, first, rows=rows))
        return found


def write_seeing_checkpoint(
    family: str, directory: Path, seed: int = 0, *, vocab_size: int = VOCABULARY, place: int = PLACE
) -> PreTrainedModel:
    """Write a checkpoint with a tower of three layers. Return the oracle, `transformers`' whole eager model in float32."""
    config = make_config(family, vocab_size=vocab_size)
    vision = config.vision_config
    changes = {"depth": 3, "deepstack_visual_indexes": [0, 2]}
    if family in LINES:
        changes = {"num_hidden_layers": 2, "image_size": 14 * 16}
    for name, value in changes.items():
        if hasattr(vision, name):
            setattr(vision, name, value)
    config.image_token_id = place
    if hasattr(config, "video_token_id"):
        config.video_token_id = place + 1
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
    model.save_pretrained(directory)
    return model


def draw_picture(height: int, width: int, seed: int, config: PreTrainedConfig) -> Picture:
    """Draw an image of patches for a model."""
    vision, has_lines = config.vision_config, config.model_type in LINES
    generator = torch.Generator().manual_seed(seed)
    if has_lines:
        size = height * vision.patch_size, width * vision.patch_size
        inputs = {
            "pixel_values": torch.randn(1, 3, *size, generator=generator),
            "image_sizes": torch.tensor([size]),
        }
    else:
        values = vision.temporal_patch_size * 3 * vision.patch_size**2
        inputs = {
            "pixel_values": torch.randn(height * width, values, generator=generator),
            "image_grid_thw": torch.tensor([[1, height, width]]),
        }
    return Picture(inputs, height // MERGE, width // MERGE, has_lines)


def prompt_of(parts: Sequence[int | Picture], seed: int = 0) -> SeenPrompt:
    """Return a prompt of random texts, given by their numbers of tokens, and pictures."""
    generator = torch.Generator().manual_seed(seed)
    prompt = SeenPrompt([], [], [])
    for part in parts:
        if isinstance(part, Picture):
            prompt.token_ids.append(BEGIN)
            prompt.starts.append(len(prompt.token_ids))
            prompt.pictures.append(part)
            line = [PLACE] * part.width + [LINE_END] * part.has_lines
            prompt.token_ids.extend(line * part.height)
            if part.has_lines:
                prompt.token_ids.pop()  # END takes the place of the last one
            prompt.token_ids.append(END)
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
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",  # as published
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},  # 1 to 16 tokens
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_seeing_model(directory: Path, family: str = "qwen3_vl_moe") -> PreTrainedModel:
    """Write a model directory that a service can serve with images. Return the oracle."""
    write_tokenizer(directory, chat_template=SEEING_TEMPLATE, special_tokens=SPECIAL_TOKENS)
    for name in ("config.json", "generation_config.json"):
        (directory / name).unlink()
    oracle = write_seeing_checkpoint(family, directory, vocab_size=320, place=IMAGE_TOKEN)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return oracle
