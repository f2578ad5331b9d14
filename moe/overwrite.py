"""Copy the weights of one model over those of another, which keeps its addresses: captured steps read them there.

Two models of one configuration are built alike, so the same path leads to the same weight in both: through modules, weights of
kernels, records of adopted layers, and closures of their forwards. `Overwrite` follows both at once. So it also finds what was
derived from weights: a norm's weight plus 1, a router's weight in float32, packed projections. A difference is an error, before
anything is written.

Experts are not part of it (`moe.model.Model.overwrite`), nor are steps, caches and dispatchers.
"""

import functools
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from attention.recurrences.mixers import Derived, MixerCall
from moe.kernel_weight import KernelWeight

_RECORDS = ("moe.adopt.", "attention.")  # modules of other classes with weights in their attributes


class OtherStructureError(Exception):
    """The models refer to their weights in different ways."""


class Overwrite:
    """The tensors of a model, each with the one of another model that is to be copied there.

    Attributes:
        pairs: Tensors of both.
        derived: Values of the first model that its mixers compute when they first run.
    """

    def __init__(self, ours: nn.Module, theirs: nn.Module) -> None:
        """Find all tensors except experts.

        Raises:
            OtherStructureError: A tensor has no counterpart of its type and shape. The message has its path.
        """
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.derived: list[Derived] = []
        seen: dict[int, Any] = {}  # by id; kept alive, because another object could get the id of a freed one
        left: list[tuple[str, Any, Any]] = [("model", ours, theirs)]
        while left:
            path, one, other = left.pop()
            if id(one) in seen:
                continue
            seen[id(one)] = one
            if type(one).__qualname__ != type(other).__qualname__:
                if not (_may_hold_weights(one) or _may_hold_weights(other)):
                    continue
                raise OtherStructureError(f"{path} is a {type(one).__name__} or a {type(other).__name__}")
            if isinstance(one, Tensor) and not isinstance(one, KernelWeight):
                self._add(path, one, other)
                continue
            parts, others = dict(_parts(one)), dict(_parts(other))
            if isinstance(one, MixerCall):
                self.derived += one.kept.values()
            if lacking := parts.keys() ^ others.keys():
                raise OtherStructureError(f"{path} has other parts: {sorted(lacking)}")
            left += [(f"{path}.{name}", part, others[name]) for name, part in parts.items()]

    def _add(self, path: str, one: Tensor, other: Tensor) -> None:
        if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
            raise OtherStructureError(
                f"{path} is {one.dtype} {list(one.shape)} on {one.device}, and {other.dtype} {list(other.shape)} on "
                f"{other.device}"
            )
        if any(stride == 0 < size - 1 for size, stride in zip(one.shape, one.stride(), strict=True)):
            raise OtherStructureError(f"{path} has several elements at one address")
        if not one.is_meta:
            self.pairs.append((one, other))

    def run(self) -> None:
        """Copy, while no step runs. Call it in inference mode: steps made the derived values in it."""
        for ours, theirs in self.pairs:
            ours.copy_(theirs)
        for each in self.derived:
            each.refresh()


def _may_hold_weights(one: Any) -> bool:
    return isinstance(one, Tensor) or next(_parts(one), None) is not None


def _parts(one: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, by name, if weights may be there."""
    if isinstance(one, nn.Module):
        lasting = {each: one._buffers[each] for each in one._buffers.keys() - one._non_persistent_buffers_set}
        attributes = {name: value for name, value in vars(one).items() if name[0] != "_"}
        yield from {**one._parameters, **lasting, **one._modules, **attributes}.items()
    elif isinstance(one, MixerCall):
        return  # it has the cache of its last step, and what `derived` lists
    elif isinstance(one, Mapping):
        yield from ((str(key), value) for key, value in one.items())
    elif isinstance(one, list | tuple):
        yield from ((str(place), value) for place, value in enumerate(one))
    elif isinstance(one, functools.partial):
        yield from (("func", one.func), ("args", one.args), ("keywords", one.keywords))
    elif isinstance(one, MethodType):
        yield "self", one.__self__
    elif isinstance(one, FunctionType):
        yield from ((str(place), cell.cell_contents) for place, cell in enumerate(one.__closure__ or ()))
    elif isinstance(one, KernelWeight) or type(one).__module__.startswith(_RECORDS):
        yield from getattr(one, "__dict__", {}).items()
