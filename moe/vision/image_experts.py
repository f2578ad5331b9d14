"""Experts for images next to the experts for text in each MoE layer (ERNIE 4.5 Technical Report, 2025).

Rows of an image, and the tokens before and after it, are routed among the experts for images. All other rows are routed among the
experts for text. `transformers` cuts a batch into the two kinds of rows. Here both experts modules take the whole batch, and each gets
rows of the other kind without a choice of an expert. So the ranks of a group always call the same modules in the same order.
Both modules have their own slots, which are placed, counted and moved like those of any layer.

The kind of a row depends only on its token, so cached blocks, replays and drafts keep it.
Rejected: one module with the experts of both kinds. Experts for images have another size.

Legend: T rows, D hidden dim, K choices.
"""

import copy
import re
from functools import reduce
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dispatch.layout import NO_CHOICE
from moe.families import UnsupportedModelError

_PARTS = ("text_moe", "vision_moe")
_OF_IMAGES = re.compile(r"(image|video)(_start|_end)?_token_id")
_KINDS = "moe_mm_token_type_ids"  # transformers' argument: 0 is text
_TRIED_ROWS, _SMALL_DIM, _SMALL_EXPERTS, _SMALL_CHOICES = 11, 16, 5, 2  # sizes of the twin
_TOLERANCE = 1e-5
# Errors of a block that takes other sizes or returns something else.
_FOREIGN_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


def has_any(model: PreTrainedModel) -> bool:
    """Return whether a model has blocks with both kinds of experts."""
    return any(_has_both(module) for module in model.modules())


def exchange(model: PreTrainedModel) -> int:
    """Let every block with both kinds of experts run both on the whole batch. Return the number of these blocks.

    Raises:
        UnsupportedModelError: A trial of a small block shows other results.
    """
    if not tokens_of_images(model.config):
        return 0  # a decoder alone, to which no row of an image comes
    found = [module for module in model.modules() if _has_both(module)]
    config = model.config.get_text_config(decoder=True)
    for kind in {type(module) for module in found}:
        if not _agrees(kind, config):
            raise UnsupportedModelError(
                f"{model.config.model_type}: {kind.__name__} uses its experts for images in an unknown way"
            )
    for module in found:
        _exchange(module)
    if found:
        _note_kinds(model)
    return len(found)


def tokens_of_images(config: Any) -> list[int]:
    """Return the tokens with rows for the experts for images, from a model's configuration."""
    found = {name: value for name, value in vars(config).items() if _OF_IMAGES.fullmatch(name)}
    return sorted({value for value in found.values() if isinstance(value, int)})


def _has_both(module: nn.Module) -> bool:
    return all(
        hasattr(getattr(getattr(module, part, None), "experts", None), "is_concatenated") for part in _PARTS
    )


def _note_kinds(model: PreTrainedModel) -> None:
    """Let the decoder get the kind of each row."""
    tokens = tokens_of_images(model.config)

    def add_kinds(_decoder: nn.Module, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids_1T: Tensor = options["input_ids"]
        # Without a list of the tokens on the device: a captured step copies nothing from the host.
        is_image_1T = reduce(torch.bitwise_or, [ids_1T == token for token in tokens])
        return inputs, {**options, _KINDS: is_image_1T}

    model.get_decoder().register_forward_pre_hook(add_kinds, with_kwargs=True)


def _exchange(block: Any) -> None:
    this = ref(block)

    def forward(hidden_states: Tensor, moe_mm_token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        module: Any = this()
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        is_image_T1 = moe_mm_token_type_ids.reshape(-1, 1).bool()
        text_TD, logits_TE = _of_rows(module.text_moe, x_TD, ~is_image_T1)
        image_TD, _ = _of_rows(module.vision_moe, x_TD, is_image_T1)
        out = torch.where(is_image_T1, image_TD, text_TD).reshape(hidden_states.shape)
        if module.shared_experts is not None:
            out = out + module.shared_experts(hidden_states)
        return out, logits_TE

    block.forward = forward


def _of_rows(part: Any, x_TD: Tensor, is_own_T1: Tensor) -> tuple[Tensor, Tensor]:
    """Run a router and its experts; other rows than its own choose no expert."""
    logits_TE, weights_TK, ids_TK = part.gate(x_TD)
    out_TD: Tensor = part.experts(x_TD, torch.where(is_own_T1, ids_TK, NO_CHOICE), weights_TK)
    return out_TD, logits_TE


@torch.no_grad()
def _agrees(kind: Any, config: Any) -> bool:
    """Return whether a small twin gives the same results exchanged as before; on the CPU."""
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.device("cpu"):
            twin = kind(_small(config)).float()
        for parameter in twin.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        x = torch.randn(1, _TRIED_ROWS, _SMALL_DIM, generator=generator)
        kinds = torch.arange(_TRIED_ROWS)[None] % 3
        wanted = twin(x, kinds)[0].clone()
        _exchange(twin)
        for part in _PARTS:
            experts = getattr(twin, part).experts
            experts.forward = _without_choices(experts.forward)
        found = twin(x, kinds)[0]
    except _FOREIGN_ERRORS:
        return False
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE)


def _small(config: Any) -> Any:
    small = copy.deepcopy(config)
    small._experts_implementation = "eager"
    inner = small.moe_intermediate_size
    sizes = {
        "hidden_size": _SMALL_DIM,
        "moe_intermediate_size": [_SMALL_DIM * (1 + place) for place in range(len(inner))],
        "num_experts": _SMALL_EXPERTS,
        "num_experts_per_tok": _SMALL_CHOICES,
    }
    for name, size in sizes.items():
        setattr(small, name, size)
    return small


def _without_choices(run: Any) -> Any:
    """Let `transformers`' experts accept rows without a choice, as the experts organ does."""

    def forward(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TD: Tensor = run(x_TD, ids_TK.clamp(min=0), weights_TK * (ids_TK >= 0))
        return out_TD

    return forward
