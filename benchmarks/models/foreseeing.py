"""A checkpoint whose multi-token-prediction layer often drafts right, though nothing was trained.

A decoder whose attention and experts add little to the embedding continues each token in a way of its own, and an MTP layer
that passes the embedding of the newest token on continues it in the same way. How much of what the layers add stays sets how
often the two agree. All of it is computed as for any model, so that steps and passes take their time.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.models.random_model import ensure_random_model

_ADDS = ("o_proj.weight", "down_proj.weight", "down_proj", "out_proj.weight")  # ends of what layers add
_NORMS = ("norm.weight", "layernorm.weight")


def foresee(tensors: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Change a checkpoint's tensors so that its own layers foresee it.

    Args:
        tensors: by name, drawn; MTP layers' among them.
        share: of what layers add to the embedding that stays, 0 to 1.
    """
    made = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(_ADDS):
            made[name] = tensor * share
        elif name.endswith(_NORMS) and tensor.dim() == 1:  # gains, or what is added to gains of 1
            made[name] = torch.ones_like(tensor) * tensor.float().mean().round().clamp(0, 1).to(tensor.dtype)
        elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            size = tensor.shape[0]
            made[name] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1).to(tensor.dtype)
        elif name.endswith("embed_tokens.weight"):
            made[name] = tensor / tensor.std()
    return made


def ensure_foreseeing_model(shape: str, share: float) -> Path:
    """Return a checkpoint's folder in the cache, with one MTP layer, making it where it is not there.

    Args:
        shape: of `benchmarks.models.random_model`, DeepSeek-V3's or like it.
        share: see `foresee`.
    """
    source = ensure_random_model(shape=shape, dtype=torch.bfloat16)
    target = source.with_name(f"foreseeing-{shape}-{share:g}-v1")
    if target.exists():
        return target
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        shutil.copytree(source, scratch, dirs_exist_ok=True)
        config = json.loads((scratch / "config.json").read_text())
        (scratch / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}, indent=2))
        [file] = scratch.glob("*.safetensors")
        tensors = load_file(file)
        save_file(
            foresee(_with_mtp(tensors, int(config["num_hidden_layers"])), share), file, {"format": "pt"}
        )
        os.rename(scratch, target)  # whole or not at all
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _with_mtp(tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Add an MTP layer: the last layer once more, and what joins its inputs."""
    last, own = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    copied = {
        own + name.removeprefix(last): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    gain = tensors["model.norm.weight"]
    norms = {f"{own}{name}.weight": gain.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    size = len(gain)
    return {
        **tensors,
        **copied,
        **norms,
        f"{own}eh_proj.weight": torch.zeros(size, 2 * size, dtype=gain.dtype),
    }
