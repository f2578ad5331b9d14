"""The attention organ: what `transformers`' attention modules call instead of eager or SDPA attention.

Registered once under `NAME`, and without a mask function, for which `transformers` builds no mask: causality and
sliding windows are the kernels' business. The pages come from the model's `PagedCache`, which has written the step's keys and values by
the time this is called. Multi-head latent attention caches latents, which are read as they are: its modules carry
their `absorbed` weight (`moe.cpu.backend`).
"""

from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.cpu_attention import paged_attention
from attention.cpu_latents import latent_attention
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
        module: the attention module; `layer_idx` names its pages.
        query: [1, H, T, D] float32. key, value: the step's own rows, already cached; only their shape is used.
        scaling: factor on the scores.
        pages: the cache, passed through `model.forward(pages=...)`.
        s_aux: sink logits [H].
        indices: [1, T, K] int32 slots of the cache that rows attend to, of latents; None: all that they see.
        attention_mask: a `ChosenMask` has `indices`; others are not read, and neither are `options`. What changes results among them is refused before a model is loaded
            (`moe.rehearsal`); the window comes with the cache's shapes, because that is where the mask says it.

    Returns:
        [1, T, H, V] float32, and no attention weights.
    """
    own, step = int(module.layer_idx), pages.step
    if isinstance(attention_mask, ChosenMask):
        indices = attention_mask.indices
    shape = pages.shapes[own]
    layer = own if shape.source is None else shape.source
    assert step is not None, "a step must be set before the model runs"
    if not step.num_tokens:  # nothing to do here: this rank takes part in the others' exchanges
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
    )
    return out_THV[None, ..., : value.shape[-1]], None


def register() -> None:
    """Make the organ known to `transformers` under its names; may be called again."""
    for name in (NAME, NAME + INDEXED):
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME + INDEXED, lambda **_options: ANY_MASK)
