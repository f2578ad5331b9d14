"""Checkpoints whose own layers often draft right, though nothing was trained.

A decoder whose attention and experts add little to the embedding continues each token in a way of its own; an MTP layer that
passes the embedding of the newest token on does the same. How much both add sets how often they agree.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
_ADDS = (
    "o_proj.weight",
    "down_proj.weight",
    "down_proj",
    "out_proj.weight",
    "o_proj",
)  # ends of what layers add
_NORMS = ("norm.weight", "layernorm.weight", "enorm.weight", "hnorm.weight")


def foreseeing(share: float) -> Callable[[Tensors], Tensors]:
    """Return what makes a checkpoint of drawn tensors foresee itself; `share`: of what its layers add that stays."""

    def change(tensors: Tensors) -> Tensors:
        made = dict(tensors)
        for name, tensor in tensors.items():
            if name.endswith(_ADDS):
                made[name] = tensor * share
            elif name.endswith(_NORMS) and tensor.dim() == 1:
                made[name] = torch.ones_like(tensor) * tensor.abs().mean().round().clamp(0, 1)
            elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
                hidden = tensor.shape[0]
                made[name] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1).to(
                    tensor.dtype
                )
            elif name.endswith("embed_tokens.weight"):
                made[name] = tensor / tensor.std()
        return made

    return change
