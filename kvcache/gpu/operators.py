"""Operators of PyTorch for what torch.compile shall not look into: how they find their objects, and writing pages.

A compiled graph calls an operator with tensors and numbers only, so what an organ needs besides (a cache with its step,
a module) is kept here under a number. Objects leave when nobody else holds them. Rejected: every kernel as an operator of
its own, with all its tensors as arguments: which kernels an organ launches depends on the step, and a graph would be
compiled again for every kind of step. PyTorch's opaque arguments are private still.
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
        """Give an object a number."""
        number = next(self._numbers)
        self._things[number] = thing
        return number

    def find(self, number: int) -> Thing:
        """Return the object that has it."""
        return self._things[number]


CACHES: Numbered["OperatedCache"] = Numbered()


class OperatedCache(DeviceCache):
    """The pages of a compiled model.

    Attributes:
        number: in `CACHES`.
        order_1: written by what writes pages and read by what reads them, for the compiler, which sees no pages.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """See `DeviceCache`."""
        super().__init__(*args, **options)
        self.number = CACHES.enter(self)
        self.order_1 = torch.zeros(1, dtype=torch.int32, device=options["device"])

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_options: Any, **_more: Any
    ) -> tuple[Tensor, Tensor]:
        """See `DeviceCache.update`."""
        torch.ops.wideep.write_layer(key, value, self.order_1, self.number, layer)
        return key, value


@torch.library.custom_op("wideep::write_layer", mutates_args=("order",))
def _write_layer(key: Tensor, value: Tensor, order: Tensor, cache: int, layer: int) -> None:
    DeviceCache.update(CACHES.find(cache), key, value, layer)
