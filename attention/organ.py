"""The attention organ: the function that `transformers`' attention modules call instead of eager or SDPA attention.

It is registered once under `NAME`. No mask function is registered, so `transformers` builds no mask: the kernels apply
causality and sliding windows. The pages come from the model's `PagedCache`, which already holds the step's keys and
values when this is called. Multi-head latent attention caches latents, which are read directly: its modules carry their
`absorbed` weight (`moe.cpu.backend`).
"""

from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.cpu.attention import paged_attention
from attention.cpu.latents import latent_attention
from attention.sparse.cpu import chosen_attention
from attention.sparse.index import ANY_MASK, INDEXED
from attention.sparse.pools import ChosenMask
from kvcache.paged_cache import PagedCache

NAME = "wideep_paged"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float,
    pages: PagedCache,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend the packed batch to the paged cache.

    Args:
        module: The attention module. `layer_idx` selects its pages.
        query: [1, H, T, D] float32. key, value: the step's own rows, already cached; only their shape is used.
        scaling: Factor on the scores.
        pages: The cache, passed through `model.forward(pages=...)`.
        s_aux: Sink logits [H].
        indices: [1, T, K] int32 cache slots that the rows attend to (latents only); None for all visible tokens.
        attention_mask: Its `indices` are used if it is a `ChosenMask`. Other masks and `options` are ignored: those
            that change results are rejected before a model is loaded (`moe.rehearsal`). The cache's shapes have the window.

    Returns:
        [1, T, H, V] float32, and None instead of attention weights.
    """
    own, step = int(module.layer_idx), pages.step
    if isinstance(attention_mask, ChosenMask):
        indices = attention_mask.indices
    shape = pages.shapes[own]
    layer = own if shape.source is None else shape.source
    assert step is not None, "a step must be set before the model runs"
    if not step.num_tokens:  # no work, but this rank still takes part in the exchanges
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    query_HTD = query[0] if query.stride(-1) == 1 else query[0].contiguous()
    if shape.latent:
        of_rotary = int(module.qk_rope_head_dim)
        if indices is not None:
            out_THV = chosen_attention(
                query_HTD, pages.keys[layer], indices[0], step, module.absorbed, rotary_dim=of_rotary, scale=scaling,
                sinks_H=s_aux,
            )  # fmt: skip
            return out_THV[None], None
        out_THV = latent_attention(
            query_HTD, pages.keys[layer], step, module.absorbed, rotary_dim=of_rotary, scale=scaling,
            window=shape.window,
        )  # fmt: skip
        return out_THV[None], None
    out_THV = paged_attention(
        query_HTD,
        pages.keys[layer],
        pages.values[layer],
        step,
        scale=scaling,
        window=shape.window,
        chunk=shape.chunk,
        sinks_H=s_aux,
        sees_images=shape.sees_images,
    )
    return out_THV[None, ..., : value.shape[-1]], None


def register() -> None:
    """Register the organ with `transformers` under its names. It may be called again."""
    for name in (NAME, NAME + INDEXED):
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME + INDEXED, lambda **_options: ANY_MASK)
