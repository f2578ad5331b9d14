"""The attention organ: what `transformers`' attention modules call instead of eager or SDPA attention.

Registered once under `NAME`, and without a mask function, for which `transformers` builds no mask: causality and
sliding windows are the kernels' business. The pages come from the model's `PagedCache`, which has written the step's keys and values by
the time this is called. Multi-head latent attention caches latents; its history is expanded through the
module's own `expand_kv` into scratch pages, and then read like any other.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.cpu_attention import paged_attention
from kvcache.paged_cache import BLOCK_TOKENS, LayerShape, PagedCache
from kvcache.step import Span, Step

NAME = "wideep_paged"


def _expanded(module: Any, cache: PagedCache, layer: int) -> tuple[PagedCache, Step]:
    """Expand the latents of the step's sequences into one-layer scratch pages with block tables of their own."""
    step, latents = cache.step, cache.keys[layer]
    assert step is not None
    spans, tables, used = [], [], 0
    starts, contexts = step.query_start_S.tolist(), step.context_S.tolist()
    for sequence in range(step.num_sequences):
        blocks = -(-contexts[sequence] // BLOCK_TOKENS)
        length = starts[sequence + 1] - starts[sequence]
        spans.append(Span(contexts[sequence] - length, length, range(used, used + blocks)))
        tables.append(step.block_table_SM[sequence, :blocks])
        used += blocks
    latent_1CL = latents[torch.cat(tables)].view(1, -1, latents.shape[-1])
    rank = latent_1CL.shape[-1] - module.qk_rope_head_dim
    key, value = module.expand_kv(latent_1CL[None, ..., :rank], latent_1CL[None, ..., rank:])
    shape = LayerShape(num_kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3])
    scratch = PagedCache([shape], used)
    every_block = Step(
        max_tokens=used * BLOCK_TOKENS, max_sequences=1, max_blocks=used, block_tokens=BLOCK_TOKENS
    )
    every_block.fill([Span(0, used * BLOCK_TOKENS, range(used))])
    scratch.step = every_block
    scratch.update(key, value, 0)
    narrow = Step(
        max_tokens=step.num_tokens, max_sequences=len(spans), max_blocks=used, block_tokens=BLOCK_TOKENS
    )
    narrow.is_parallel = step.is_parallel
    narrow.fill(spans)
    return scratch, narrow


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float,
    pages: PagedCache,
    s_aux: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend the packed batch to the paged cache.

    Args:
        module: the attention module; `layer_idx` names its pages.
        query: [1, H, T, D] float32. key, value: the step's own rows, already cached; only their shape is used.
        scaling: factor on the scores.
        pages: the cache, passed through `model.forward(pages=...)`.
        s_aux: sink logits [H].
        attention_mask, options: not read. What changes results among them is refused before a model is loaded
            (`moe.rehearsal`); the window comes with the cache's shapes, because that is where the mask says it.

    Returns:
        [1, T, H, V] float32, and no attention weights.
    """
    layer, step = int(module.layer_idx), pages.step
    window = pages.shapes[layer].window
    assert step is not None, "a step must be set before the model runs"
    if not step.num_tokens:  # nothing to do here: this rank takes part in the others' exchanges
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    if pages.shapes[layer].latent:
        pages, step = _expanded(module, pages, layer)
        layer = 0
    query_HTD = query[0] if query.stride(-1) == 1 else query[0].contiguous()
    out_THV = paged_attention(
        query_HTD,
        pages.keys[layer],
        pages.values[layer],
        step,
        scale=scaling,
        window=window,
        sinks_H=s_aux,
    )
    return out_THV[None, ..., : value.shape[-1]], None


def register() -> None:
    """Make the organ known to `transformers` under `NAME`; may be called again."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
