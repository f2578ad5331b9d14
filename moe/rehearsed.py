"""Functions that take the place of recurrences and indexes while a model is rehearsed on meta; they only record.

Each writes to the rehearsal's notes, which the model was given as its cache, and returns tensors of the right shapes
(`attention.recurrences.mixers`, `attention.sparse.index`).
"""

from typing import Any

import torch
from torch import Tensor

from attention.recurrences.mixers import (
    ChannelScan,
    Convolution,
    DeltaRule,
    HeadScan,
    MixerCall,
    Recurrences,
)
from attention.sparse.pools import Pooling
from moe.families import UnsupportedModelError


def _convolve(call: MixerCall, convolution: Convolution) -> Tensor:
    _refuse_unknown(call, convolution.unknown)
    call.pages.convolve(call.layer, convolution.x, convolution.weight.shape[1])
    return torch.empty_like(convolution.x)


def _run(call: MixerCall, recurrence: DeltaRule | HeadScan | ChannelScan) -> Tensor:
    _refuse_unknown(call, recurrence.unknown)
    call.pages.states[call.layer] = recurrence.x.new_empty(recurrence.state, dtype=torch.float32)
    return torch.empty_like(recurrence.x)


RECURRENCES: Recurrences = {Convolution: _convolve, DeltaRule: _run, HeadScan: _run, ChannelScan: _run}


def choose(
    notes: Any, _layer: int, query_TID: Tensor, _weight_TI: Tensor, _scale: float, count: int
) -> Tensor:
    """Stand in for `sparse_index.Choose`; `notes` are the rehearsal's."""
    chosen: Tensor = notes.choose(query_TID, count)
    return chosen


def choose_pools(
    notes: Any, _layer: int, query_TID: Tensor, _weight_TI: Tensor, _scale: float, pooling: Pooling
) -> Tensor:
    """Stand in for `pooled_index.ChoosePools`; `notes` are the rehearsal's."""
    chosen: Tensor = notes.choose(query_TID, pooling.num_tokens)
    return chosen


def _refuse_unknown(call: MixerCall, unknown: frozenset[str]) -> None:
    if unknown:
        raise UnsupportedModelError(
            f"{call.pages.model_type}: the recurrence of layer {call.layer} needs {', '.join(sorted(unknown))}, which the "
            f"kernels do not support"
        )
