"""A sparse index over pools of tokens (GLM-5.3, 2026): what its modules cache, and how they are replaced.

Every token has a key and a gate per channel. A pool is a few adjacent tokens (`index_kpool`, 16 in the published model).
Once a pool is complete, its key is the mean of its tokens' keys, weighted by a softmax over the gates. Rows choose pools by
scores as in `attention.sparse.index`, and see all tokens of these pools and of the incomplete pool. The original modules
pool all keys again in every forward and build a mask. The replacements cache the keys of pools and pass tokens to attention.

Legend: T rows, I index heads, D index dim, K largest number of chosen tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from attention.sparse.index import AnyMask
from attention.transformers_names import CACHE

_PARTS = (
    "index_kpool", "index_kpool_always_select_tail", "index_kpool_compress_ape", "index_kpool_compress_gate", "index_topk",
    "wq_b", "wk", "k_norm", "weights_proj", "softmax_scale", "n_heads", "head_dim", "layer_idx",
)  # fmt: skip
_MASKING = "build_attention_mask_from_topk"


class Pooling(NamedTuple):
    """Settings of one layer's index."""

    pool_tokens: int
    num_chosen: int  # pools
    bias_BD: Tensor  # added to gates, by position in the pool

    @property
    def num_tokens(self) -> int:
        """Largest number of chosen tokens, K."""
        return self.num_chosen * self.pool_tokens + self.pool_tokens - 1


# (cache, layer, queries [T, I, D], weights [T, I], factor on products, pooling) to [1, T, K].
ChoosePools = Callable[[Any, int, Tensor, Tensor, float, Pooling], Tensor]


class ChosenMask(AnyMask):
    """Stand-in for a mask built from the choice of an index: attention takes the indices themselves."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices


def modules(net: nn.Module) -> list[Any]:
    """Return the modules that choose pools."""
    return [module for module in net.modules() if all(hasattr(module, name) for name in _PARTS)]


def why_not(net: nn.Module, block_tokens: int) -> str | None:
    """Return why pools cannot be kept in blocks, as "the model has ...", or None if they can."""
    for module in modules(net):
        size = int(module.index_kpool)
        if block_tokens % size or module.head_dim % size:
            return f"an index over pools of {size} tokens; blocks have {block_tokens}, and index keys {module.head_dim} values"
        if not module.index_kpool_always_select_tail:
            return "an index that leaves out the tokens of an incomplete pool"
    return None


def exchange(net: nn.Module, choose: ChoosePools) -> list[Any]:
    """Make indexes choose from the pages of the cache passed to them. Return their modules."""
    found = modules(net)
    for module in found:
        module.forward = choosing(module, choose)
    for module in net.modules() if found else ():
        if hasattr(module, _MASKING):
            setattr(module, _MASKING, lambda topk_indices, **_options: ChosenMask(topk_indices))
    return found


def choosing(module: Any, choose: ChoosePools) -> Callable[..., Tensor]:
    """Return the forward of a module that chooses from pages."""
    own, layer = ref(module), int(module.layer_idx)

    def run(hidden_states: Tensor, q_resid: Tensor, attention_mask: Any, **options: Any) -> Tensor:
        index: Any = own()
        pages = options[CACHE]
        heads, dim, pool_tokens = int(index.n_heads), int(index.head_dim), int(index.index_kpool)
        query_TID = index.wq_b(q_resid).view(-1, heads, dim)
        key = index.k_norm(index.wk(hidden_states))
        gate = F.linear(hidden_states, index.index_kpool_compress_gate)
        pages.update_indexer(torch.cat((key, gate), -1), layer, more=dim // pool_tokens)
        weight_TI = index.weights_proj(hidden_states)[0].float() * heads**-0.5
        pooling = Pooling(pool_tokens, index.index_topk // pool_tokens, index.index_kpool_compress_ape)
        return choose(pages, layer, query_TID, weight_TI, index.softmax_scale, pooling)

    return run
