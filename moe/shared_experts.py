"""Shared experts that are computed while their layer's rows travel between ranks.

`transformers`' blocks call the experts and a shared expert on the same rows, one after the other. The experts organ
sends the rows, computes the shared expert, and receives; when the block asks the shared expert itself, it hands out what
is there. One that the block asks first hands out memory that is filled a little later, which nobody looks at before
(`moe.shared_rehearsal` has seen to both). What is computed, from what and by which code is the block's own: bits stay.

One rank's rows do not travel, so there nothing is changed.

Legend: T rows, D hidden dim.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dispatch.meanwhile import Meanwhile, nothing
from moe.shared_rehearsal import Shared

_MOST_READY = 2  # a step may be cut in two, whose parts take turns


class _Answered(NamedTuple):
    rows: Tensor  # kept, so that no other rows can lie where they do
    answer: Tensor


class SharedExpert:
    """One module, whose calls are answered with what `compute` found. `close` undoes that."""

    def __init__(self, module: Any, found: Shared) -> None:
        """`found` must be what a rehearsal says of this module."""
        self._module, self._own, self._found = module, module.forward, found
        self._asked: list[_Answered] = []  # whose answer is yet to be filled in
        self._ready: dict[int, _Answered] = {}  # by address of their rows
        module.forward = self._promise if found.comes_first else self._hand_out

    def compute(self, hidden_TD: Tensor) -> None:
        """Answer the rows that the layer's experts are given now."""
        if not self._found.comes_first:
            rows = hidden_TD.view(self._found.shape)
            if len(self._ready) == _MOST_READY:
                self._ready.clear()  # of a step that was broken off
            self._ready[rows.data_ptr()] = _Answered(rows, self._own(rows))
            return
        for rows, answer in self._asked:
            answer.copy_(self._own(rows))
        self._asked.clear()

    def close(self) -> None:
        """Let the module answer for itself again."""
        self._module.forward = self._own

    def _promise(self, rows: Tensor) -> Tensor:
        answer = torch.empty_like(rows)
        self._asked.append(_Answered(rows, answer))
        return answer

    def _hand_out(self, rows: Tensor) -> Tensor:
        ready = self._ready.pop(rows.data_ptr(), None)
        if ready is None or ready.rows.shape != rows.shape:
            answer: Tensor = self._own(rows)
            return answer
        return ready.answer


def meanwhile_of(shared: Sequence[SharedExpert], hidden_TD: Tensor) -> Meanwhile:
    """Return what is to be computed while a layer's rows travel."""
    if not shared:
        return nothing

    def compute() -> None:
        for each in shared:
            each.compute(hidden_TD)

    return compute
