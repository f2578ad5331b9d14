"""A checkpoint with an untrained multi-token-prediction layer whose drafts are often right.

If attention and experts of a decoder add little to the embedding, it continues each token in a fixed way. An MTP layer that
passes the embedding of the newest token through continues it in the same way. The share of the layers' outputs that is kept
sets how often the two agree. Everything is computed as in any model, so steps and drafts take a realistic time.
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

_ADDS = ("o_proj.weight", "down_proj.weight", "down_proj", "out_proj.weight")  # last matrices of the layers
_NORMS = ("norm.weight", "layernorm.weight")


def foresee(tensors: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Change a checkpoint's tensors so that its MTP layers predict its output.

    Args:
        tensors: Random tensors by name, including those of MTP layers.
        share: Share of the layers' outputs to keep, 0 to 1.
    """
    made = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(_ADDS):
            made[name] = tensor * share
        elif name.endswith(_NORMS) and tensor.dim() == 1:  # gains, or offsets of gains of 1
            made[name] = torch.ones_like(tensor) * tensor.float().mean().round().clamp(0, 1).to(tensor.dtype)
        elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            size = tensor.shape[0]
            made[name] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1).to(tensor.dtype)
        elif name.endswith("embed_tokens.weight"):
            made[name] = tensor / tensor.std()
    return made


def ensure_foreseeing_model(shape: str, share: float) -> Path:
    """Return the cached folder of a checkpoint with one MTP layer. Create it if it does not exist.

    Args:
        shape: Shape from `benchmarks.models.random_model`: DeepSeek-V3's or a similar one.
        share: Share of the layers' outputs (see `foresee`).
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
        os.rename(scratch, target)  # atomic
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _with_mtp(tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Add an MTP layer: a copy of the last layer, and the tensors that join its inputs."""
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
