"""The index of sparse attention (DeepSeek Sparse Attention, 2025), derived from the model's own code.

An indexer projects queries, one key per token and a weight per head. For every row it chooses the tokens with the largest
`sum over heads of weight * relu(query . key)`. Its module computes that densely, over one sequence per batch row. We run the
module's projections as they are. The operations after `update_indexer` are recorded, not computed: the cache returns a
stand-in for the keys that follows these operations, and `topk` on it lets the cache choose from the pages of each row's
sequence. A module that does anything else with its keys fails and is rejected (`moe.rehearsal`).

Legend: T rows, I index heads, D index dim, K number of chosen tokens.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from attention.transformers_names import CACHE

INDEXED = "_indexed"  # suffix of an organ's name for models with a sparse index, whose code needs a mask
FAR = 1 << 40  # number of keys that the dense code sees, so that it chooses the largest number allowed


# (cache, layer, queries [T, I, D], weights [T, I], factor on products, K) to [1, T, K], in attention's format of tokens.
Choose = Callable[[Any, int, Tensor, Tensor, float, int], Tensor]


class AnyMask:
    """Stand-in for a causal mask that is sliced and added to scores. The kernels apply the real mask."""

    dtype = torch.float32

    def __getitem__(self, _key: Any) -> "AnyMask":
        return self


ANY_MASK = AnyMask()


class _Keys:
    """Stand-in for all keys that rows may see."""

    def __init__(self, choose: Callable[[Tensor, Tensor, float, int], Tensor]) -> None:
        self.choose = choose

    def _same(self, *_arguments: Any, **_options: Any) -> "_Keys":
        return self

    transpose = float = unsqueeze = squeeze = to = _same

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a product with queries [1, T, I, D]."""
        if function is torch.matmul and len(args) == 2 and isinstance(args[1], cls) and not kwargs:
            return _Scores(args[1], args[0])
        return NotImplemented


class _Scores:
    """Stand-in for the products of queries and keys."""

    def __init__(self, keys: _Keys, query: Tensor) -> None:
        self.keys, self.query, self.scale, self.is_positive = keys, query, 1.0, False

    def __mul__(self, factor: float) -> "_Scores":
        if not isinstance(factor, float | int) or factor <= 0:
            return NotImplemented
        self.scale *= factor
        return self

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the positive part, or the sum over heads with weights [1, T, 1, I]."""
        if function in (torch.nn.functional.relu, torch.relu) and isinstance(args[0], cls):
            args[0].is_positive = True
            return args[0]
        if function is torch.matmul and isinstance(args[1], cls) and args[1].is_positive and not kwargs:
            return _Sums(args[1], args[0])
        return NotImplemented


class _Sums:
    """Stand-in for one score per row and key."""

    def __init__(self, scores: _Scores, weight: Tensor) -> None:
        self._scores, self._weight = scores, weight
        self.shape = (1, scores.query.shape[1], FAR)

    def squeeze(self, _dim: int) -> "_Sums":
        """Return itself: heads are already summed."""
        return self

    def __add__(self, mask: Any) -> "_Sums":
        return self if isinstance(mask, AnyMask) else NotImplemented

    def topk(self, count: int, dim: int = -1) -> Any:
        """Let the cache choose the tokens."""
        if dim != -1:
            raise TypeError(f"topk of an index along dimension {dim}; only the last is supported")
        scores, keys = self._scores, self._scores.keys
        query_TID, weight_TI = scores.query[0], self._weight.reshape(scores.query.shape[1:3])
        return SimpleNamespace(indices=keys.choose(query_TID, weight_TI, scores.scale, count))


class _Pages:
    """Stand-in for a cache, passed to an indexer."""

    def __init__(self, cache: Any, choose: Choose) -> None:
        self._cache, self._choose = cache, choose

    def update_indexer(self, key: Tensor, layer: int) -> _Keys:
        """Cache the step's own keys and return a stand-in for all keys."""
        self._cache.update_indexer(key, layer)
        return _Keys(partial(self._choose, self._cache, layer))


def indexers(net: nn.Module) -> list[Any]:
    """Return the modules that choose single tokens; `attention.sparse.pools` has those that choose pools."""
    return [
        module
        for module in net.modules()
        if "update_indexer" in _names(module) and not hasattr(module, "index_kpool")
    ]


def exchange(net: nn.Module, choose: Choose) -> bool:
    """Make indexers choose from the pages of the cache passed to them. Return whether there are any."""
    found = indexers(net)
    for module in found:
        module.forward = _choosing(module, choose)
    return bool(found)


def _choosing(module: Any, choose: Choose) -> Callable[..., Any]:
    forward = type(module).forward

    def run(*inputs: Any, **options: Any) -> Any:
        return forward(module, *inputs, **{**options, CACHE: _Pages(options.get(CACHE), choose)})

    return run


def _names(module: nn.Module) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names
