"""Write a model directory that preflight accepts: a config with experts and a safetensors file of a few bytes."""

import json
import struct
from pathlib import Path
from typing import Any

CONFIG = {"model_type": "mixtral", "num_local_experts": 4, "max_position_embeddings": 128}


def write_safetensors(
    path: Path, shapes: dict[str, list[int]], dtype: str = "F32", element_bytes: int = 4
) -> None:
    """Write zeros under these names and shapes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = element_bytes
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(end))


def write_checkpoint(directory: Path, **config: Any) -> Path:
    """Write a tiny MoE checkpoint. Keyword arguments are added to its config."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (directory / "tokenizer.json").write_text("{}")
    shapes = {"model.embed_tokens.weight": [16, 8]}
    shapes |= {f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight": [8, 8] for expert in range(4)}
    write_safetensors(directory / "model.safetensors", shapes)
    return directory
