"""Sparse attention's index (DeepSeek Sparse Attention, 2025): what a model asks of it, read off the model's own code.

An indexer projects queries, one key per token and a weight per head, and chooses for every row the tokens whose
`sum over heads of weight * relu(query . key)` is largest. Its module computes that densely, over one sequence per batch row.
Its projections are its own; what comes after `update_indexer` is not computed but noted: the keys that the cache returns
are a stand-in, which follows what is done with it and, once the best are asked for, lets the cache find them in the
pages of each row's own sequence. A module that does anything else with its keys fails, and is refused (`moe.rehearsal`).

Legend: T rows, I index heads, D index dim, K tokens that are chosen.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from attention.transformers_names import CACHE

INDEXED = "_indexed"  # behind an organ's name, for models with a sparse index, whose code wants a mask
FAR = 1 << 40  # keys that the dense code believes to see: it chooses as many as it may


# (cache, layer, queries [T, I, D], weights [T, I], factor on products, K) to [1, T, K], whatever attention takes for tokens.
Choose = Callable[[Any, int, Tensor, Tensor, float, int], Tensor]


class AnyMask:
    """Stands where a causal mask is sliced and added to scores: rows see what the kernels let them see."""

    dtype = torch.float32

    def __getitem__(self, _key: Any) -> "AnyMask":
        """Itself."""
        return self


ANY_MASK = AnyMask()


class _Keys:
    """All keys that rows may see."""

    def __init__(self, choose: Callable[[Tensor, Tensor, float, int], Tensor]) -> None:
        self.choose = choose

    def _same(self, *_arguments: Any, **_options: Any) -> "_Keys":
        return self

    transpose = float = unsqueeze = squeeze = to = _same

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply with queries [1, T, I, D]."""
        if function is torch.matmul and len(args) == 2 and isinstance(args[1], cls) and not kwargs:
            return _Scores(args[1], args[0])
        return NotImplemented


class _Scores:
    """Products of queries and keys."""

    def __init__(self, keys: _Keys, query: Tensor) -> None:
        self.keys, self.query, self.scale, self.is_positive = keys, query, 1.0, False

    def __mul__(self, factor: float) -> "_Scores":
        if not isinstance(factor, float | int) or factor <= 0:
            return NotImplemented
        self.scale *= factor
        return self

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take the positive part, or sum over heads with weights [1, T, 1, I]."""
        if function in (torch.nn.functional.relu, torch.relu) and isinstance(args[0], cls):
            args[0].is_positive = True
            return args[0]
        if function is torch.matmul and isinstance(args[1], cls) and args[1].is_positive and not kwargs:
            return _Sums(args[1], args[0])
        return NotImplemented


class _Sums:
    """A score per row and key."""

    def __init__(self, scores: _Scores, weight: Tensor) -> None:
        self._scores, self._weight = scores, weight
        self.shape = (1, scores.query.shape[1], FAR)

    def squeeze(self, _dim: int) -> "_Sums":
        """Itself: heads are summed."""
        return self

    def __add__(self, mask: Any) -> "_Sums":
        return self if isinstance(mask, AnyMask) else NotImplemented

    def topk(self, count: int, dim: int = -1) -> Any:
        """Let the cache choose."""
        if dim != -1:
            raise TypeError(f"an index along dimension {dim}")
        scores, keys = self._scores, self._scores.keys
        query_TID, weight_TI = scores.query[0], self._weight.reshape(scores.query.shape[1:3])
        return SimpleNamespace(indices=keys.choose(query_TID, weight_TI, scores.scale, count))


class _Pages:
    """What an indexer is given for a cache."""

    def __init__(self, cache: Any, choose: Choose) -> None:
        self._cache, self._choose = cache, choose

    def update_indexer(self, key: Tensor, layer: int) -> _Keys:
        """Keep the step's own keys; returns all."""
        self._cache.update_indexer(key, layer)
        return _Keys(partial(self._choose, self._cache, layer))


def indexers(net: nn.Module) -> list[Any]:
    """The modules that choose tokens one by one; `attention.sparse.pools` has those that choose pools."""
    return [
        module
        for module in net.modules()
        if "update_indexer" in _names(module) and not hasattr(module, "index_kpool")
    ]


def exchange(net: nn.Module, choose: Choose) -> bool:
    """Let indexers choose from the pages of the cache that they are given; returns whether there are any."""
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
