"""PyTorch operators that are opaque to torch.compile: how they find their objects, and writing pages.

A compiled graph calls an operator with tensors and numbers only. Other objects that an operator needs (a cache with its
step, a module) are registered here under a number, with weak references. Rejected: every kernel as a separate operator
with all its tensors as arguments. The kernels of an attention call depend on the step, so a graph would be compiled
again for every kind of step. PyTorch's opaque arguments are still private.
"""

import itertools
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvcache.gpu.cache import DeviceCache

Thing = TypeVar("Thing")


class Numbered(Generic[Thing]):
    """Objects by number."""

    def __init__(self) -> None:
        self._things: WeakValueDictionary[int, Thing] = WeakValueDictionary()
        self._numbers = itertools.count()

    def enter(self, thing: Thing) -> int:
        """Register an object. Returns its number."""
        number = next(self._numbers)
        self._things[number] = thing
        return number

    def find(self, number: int) -> Thing:
        """Return the object with this number."""
        return self._things[number]


CACHES: Numbered["OperatedCache"] = Numbered()


class OperatedCache(DeviceCache):
    """The pages of a compiled model.

    Attributes:
        number: Its number in `CACHES`.
        order_1: Written by operators that write pages and read by those that read them. It orders them for the compiler,
            which does not see pages.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Allocate as `DeviceCache` does, and register the cache."""
        super().__init__(*args, **options)
        self.number = CACHES.enter(self)
        self.order_1 = torch.zeros(1, dtype=torch.int32, device=options["device"])

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_options: Any, **_more: Any
    ) -> tuple[Tensor, Tensor]:
        torch.ops.wideep.write_layer(key, value, self.order_1, self.number, layer)
        return key, value


@torch.library.custom_op("wideep::write_layer", mutates_args=("order",))
def _write_layer(key: Tensor, value: Tensor, order: Tensor, cache: int, layer: int) -> None:
    DeviceCache.update(CACHES.find(cache), key, value, layer)
