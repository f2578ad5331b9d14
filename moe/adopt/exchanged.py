"""Exchange the parts of a model that see more than one row: recurrences, long rotary embeddings and sparse indexes.

Modules that are exchanged as a whole must give the results of their own code, as in `moe.adopt.adopt`: lightning attention
(`attention.recurrences.mixers`), and indexes over pools of tokens (`attention.sparse.pools`).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention import latents
from attention.recurrences.mixers import Recurrences, exchange, lightning_modules
from attention.sparse import index as sparse_index
from attention.sparse import pools as pooled_index
from attention.transformers_names import CACHE
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Span, Step
from moe import long_rotary
from moe.adopt.adopt import SampleRows
from moe.families import UnsupportedModelError
from moe.text_part import use_attention

_TRIED_TOKENS = 24  # for lightning attention
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
_POOLS = 5  # complete pools, followed by a partial one
_CHOSEN = 2
# Least share of equal choices: nearly equal scores may change their order by rounding.
_LIKE = {torch.float32: 0.98, torch.bfloat16: 0.9}


class SequenceParts(NamedTuple):
    """A device's forms of these parts. `attention` is the name of its attention; `make_cache` as in `moe.backend.Backend`."""

    recurrences: Recurrences
    choose: sparse_index.Choose
    choose_pools: pooled_index.ChoosePools
    attention: str
    make_cache: Callable[..., PagedCache]


def exchange_parts(net: Any, step: Step, rows: SampleRows, parts: SequenceParts) -> None:
    """Exchange all such parts of a model.

    Raises:
        UnsupportedModelError: A module does something else than its form.
    """
    latents.expand_nothing(net)
    step.has_states = exchange(net, parts.recurrences) > 0
    _try_lightning(net, step, rows)
    if (limit := long_rotary.limit_of(net.config)) is not None:
        long_rotary.exchange(net, limit, step)
    if sparse_index.exchange(net, parts.choose):
        use_attention(net, parts.attention + sparse_index.INDEXED)
    if pooled := pooled_index.exchange(net, parts.choose_pools):
        _try_pools(net, pooled, step, rows, parts.make_cache)


@torch.no_grad()
def _try_lightning(net: Any, step: Step, rows: SampleRows) -> None:
    for module in lightning_modules(net):
        step.fill([Span(0, min(_TRIED_TOKENS, step.max_tokens), range(2))])
        step.inputs([0] * step.num_tokens, [])
        heads, dim, layer = int(module.num_attention_heads), int(module.head_dim), int(module.layer_idx)
        states = {layer: torch.zeros(0, heads, dim, dim, device=rows.device)}
        pages = SimpleNamespace(step=step, states=states)
        x = rows.draw(1, step.num_padded, module.qkv_proj.weight.shape[1])
        wanted = type(module).forward(module, x, None, None)[0][:, : step.num_tokens]
        found = module.forward(x, **{CACHE: pages})[0][:, : step.num_tokens]
        tolerance = _TOLERANCE[rows.dtype]
        if not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance):
            raise UnsupportedModelError(
                f"{net.config.model_type}: layer {layer} computes an unknown form of lightning attention"
            )


@torch.no_grad()
def _try_pools(
    net: Any, modules: list[Any], step: Step, rows: SampleRows, make_cache: Callable[..., PagedCache]
) -> None:
    for module in modules:
        layer, size, topk = int(module.layer_idx), int(module.index_kpool), module.index_topk
        tokens = min(_POOLS * size + size // 2, step.max_tokens)
        blocks = -(-tokens // step.block_tokens)
        width = 2 * int(module.head_dim) + int(module.head_dim) // size
        pages = make_cache([LayerShape()] * layer + [LayerShape(index_dim=width)], blocks, 0, step)
        step.fill([Span(0, tokens, range(blocks))])
        step.inputs([0] * tokens, [])
        hidden = rows.draw(1, step.num_padded, module.wk.in_features)
        query = rows.draw(1, step.num_padded, module.wq_b.in_features, seed=1)
        seen = torch.ones(1, tokens, dtype=torch.bool, device=rows.device)
        module.index_topk = _CHOSEN * size
        try:
            wanted = type(module).forward(module, hidden[:, :tokens], query[:, :tokens], seen, None)[0]
            found = module.forward(hidden, query, None, **{CACHE: pages})[0, :tokens]
        finally:
            module.index_topk = topk
        if _share_alike(found, wanted) < _LIKE[rows.dtype]:
            raise UnsupportedModelError(
                f"{net.config.model_type}: layer {layer} chooses pools of tokens by an unknown rule"
            )


def _share_alike(found: Tensor, wanted: Tensor) -> float:
    """Return the share of wanted tokens that were found."""
    is_found = (wanted[:, :, None] == found[:, None]).any(2) & (wanted >= 0)
    return float(is_found.sum() / (wanted >= 0).sum())
