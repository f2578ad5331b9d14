"""A random Qwen3-VL-MoE of moderate size: 12 layers of the tower, 8 of the decoder. Its answers mean nothing, its times do.

Run: `python -m benchmarks.models.seeing FOLDER` writes it, to try images without a large model.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

from tests.support.models.seeing import IMAGE_TOKEN, PROCESSOR, SEEING_TEMPLATE, SPECIAL_TOKENS
from tests.support.models.tiny_tokenizer import write_tokenizer

_TEXT = {
    "model_type": "qwen3_vl_moe_text",
    "vocab_size": 320,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10]},
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_VISION = {
    "model_type": "qwen3_vl_moe_vision",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "depth": 12,
    "num_heads": 6,
    "out_hidden_size": 512,
    "patch_size": 16,
    "deepstack_visual_indexes": [3, 6, 9],
}


def write_random_model(directory: Path) -> Path:
    """Write the model with a tokenizer and an image processor. Return its directory."""
    write_tokenizer(directory, chat_template=SEEING_TEMPLATE, special_tokens=SPECIAL_TOKENS)
    for name in ("config.json", "generation_config.json"):
        (directory / name).unlink()
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=_TEXT, vision_config=_VISION)
    config.image_token_id, config.video_token_id = IMAGE_TOKEN, IMAGE_TOKEN + 1
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    size = {"shortest_edge": 1024, "longest_edge": 4 << 20}
    described = {**PROCESSOR, "patch_size": _VISION["patch_size"], "size": size}
    (directory / "preprocessor_config.json").write_text(json.dumps(described))
    return directory


def main(arguments: list[str] | None = None) -> int:
    """Write the model and print its folder; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models.seeing", description=__doc__)
    parser.add_argument("folder", type=Path, help="new folder of the model")
    folder: Path = parser.parse_args(arguments).folder
    if folder.exists():
        print(f"{folder} exists; give a new folder", file=sys.stderr)
        return 2
    folder.mkdir(parents=True)
    print(write_random_model(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
