"""Rotary embeddings that change once a sequence grows past a length (`longrope`), chosen separately for each sequence.

`transformers` looks at the longest position of the batch and uses its frequencies (and factors) for the whole batch. Here
a module's own code runs twice: for rows of short sequences, and with an added far position for rows of long ones.
Each row takes its own result. Keys and values of a sequence that grows past the length are recomputed
(`scheduler.policy.step_plans`), so that every token sees the same as in one forward of the whole text.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvcache.step import ROW_MULTIPLE, Step

KIND = "longrope"


def limit_of(config: Any) -> int | None:
    """Return the most tokens of a short sequence, or None if the model makes no such difference."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if parameters.get("rope_type") != KIND:
        return None
    return int(parameters["original_max_position_embeddings"])


def exchange(net: nn.Module, limit: int, step: Step) -> None:
    """Let rotary modules choose by the step's sequences. Their buffers must be loaded."""
    step.tells_long = True
    for module in _modules(net):
        module.forward = _by_sequence(module.forward, limit, step)


def rehearse(net: nn.Module) -> None:
    """Let rotary modules run on meta, without the values of positions."""
    for module in _modules(net):
        dim = 2 * len(ROPE_INIT_FUNCTIONS[KIND](module.config, device="cpu")[0])

        def forward(x: Tensor, position_ids: Tensor, dim: int = dim) -> tuple[Tensor, Tensor]:
            angles = x.new_empty(*position_ids.shape, dim)
            return angles, angles

        module.forward = forward


def restore(net: nn.Module) -> None:
    """Let rotary modules run their own code again, after a rehearsal."""
    for module in _modules(net):
        vars(module).pop("forward", None)


def _modules(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if getattr(module, "rope_type", None) == KIND]


def _by_sequence(own: Callable[..., tuple[Tensor, Tensor]], limit: int, step: Step) -> Callable[..., Any]:
    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        short = own(x, position_ids.clamp(max=limit - 1))
        is_long = step.long_rows(position_ids.shape[1])
        if is_long is None:
            return short
        far = position_ids.new_full((1, ROW_MULTIPLE), limit)  # whole vectors, so that bits stay equal
        rows = position_ids.shape[1]
        long = (each[:, :rows] for each in own(x, torch.cat((position_ids, far), 1)))
        cosines, sines = (
            torch.where(is_long[:, None], one, other) for one, other in zip(long, short, strict=True)
        )
        return cosines, sines

    return forward
