"""Rotary embeddings that change once a sequence grows past a length (`longrope`): chosen for each by its own.

`transformers` looks at the longest position of the batch, and takes other frequencies (and factors) for all of it. Here
a module's own code runs for rows of short sequences, and again, made to see a far position, for those of long ones;
each row takes its own. Keys and values of a sequence that grows past the length are computed anew
(`scheduler.policy.scheduler`), so that every token sees what it would see in one forward of the whole text.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvcache.step import ROW_MULTIPLE, Step

KIND = "longrope"


def limit_of(config: Any) -> int | None:
    """Tokens up to which a model's sequences are short; None: it makes no difference."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if parameters.get("rope_type") != KIND:
        return None
    return int(parameters["original_max_position_embeddings"])


def exchange(net: nn.Module, limit: int, step: Step) -> None:
    """Let rotary modules choose by the step's sequences; their buffers are there."""
    step.tells_long = True
    for module in _modules(net):
        module.forward = _by_sequence(module.forward, limit, step)


def rehearse(net: nn.Module) -> None:
    """Let rotary modules run on meta: they look at positions, which there are none of."""
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
        far = position_ids.new_full((1, ROW_MULTIPLE), limit)  # full vectors more, for the sake of equal bits
        rows = position_ids.shape[1]
        long = (each[:, :rows] for each in own(x, torch.cat((position_ids, far), 1)))
        cosines, sines = (
            torch.where(is_long[:, None], one, other) for one, other in zip(long, short, strict=True)
        )
        return cosines, sines

    return forward
