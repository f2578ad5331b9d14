"""Functions that take the place of recurrences and indexes while a model is rehearsed on meta; they only record.

Each has the signature of the function that it replaces (`attention.recurrences.mixers`, `attention.sparse.index`), writes
to the rehearsal's notes, which the model was given as its cache, and returns tensors of the right shapes.
"""

from typing import Any

import torch
from torch import Tensor

from attention.recurrences import mixers
from attention.sparse.pools import Pooling
from moe.families import UnsupportedModelError

# Options of recurrences for chunking and return values; our kernels choose these themselves.
WITHOUT_EFFECT_ON_STATES = frozenset(
    {
        "chunk_size",
        "initial_state",
        "initial_states",
        "output_final_state",
        "use_associative_scan",
        "use_mambapy",
    }
)


def _convolve(
    call: mixers.MixerCall,
    inputs: Tensor,
    weight: Tensor,
    bias: Any = None,
    activation: Any = None,
    **options: Any,
) -> Tensor:
    _refuse_options(call, options)
    if activation not in (None, "silu", "swish"):
        _refuse_options(call, {f"activation={activation}": True})
    call.pages.convolve(call.layer, inputs, weight.shape[1])
    return torch.empty_like(inputs)


def _run_delta(
    call: mixers.MixerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    _refuse_options(call, options)
    made = value.new_empty(*value.shape[2:3], key.shape[3], value.shape[3], dtype=torch.float32)
    call.pages.recurrent[call.layer] = made
    return torch.empty_like(value), made


def _scan_heads(
    call: mixers.MixerCall,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: Any = (),
    return_final_states: bool = False,
    **options: Any,
) -> Any:
    _refuse_options(call, options)
    made = x.new_empty(x.shape[2], B.shape[3], x.shape[3], dtype=torch.float32)
    call.pages.recurrent[call.layer] = made
    return (torch.empty_like(x), made) if return_final_states else torch.empty_like(x)


def _scan_channels(
    call: mixers.MixerCall,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> Any:
    _refuse_options(call, options)
    made = x.new_empty(*A.t().shape, dtype=torch.float32)
    call.pages.recurrent[call.layer] = made
    return (torch.empty_like(x), made) if return_last_state else torch.empty_like(x)


def _sum_decaying(
    call: mixers.MixerCall, query: Tensor, key: Tensor, value: Tensor, _slope: Tensor
) -> Tensor:
    call.pages.recurrent[call.layer] = value.new_empty(*value.shape[2:3], key.shape[3], value.shape[3])
    return torch.empty_like(value)


RECURRENCES: dict[str, mixers.Recurrence] = {
    mixers.CONVOLUTION: _convolve,
    mixers.DELTA: _run_delta,
    mixers.LIGHTNING: _sum_decaying,
    mixers.MAMBA2: _scan_heads,
    mixers.MAMBA: _scan_channels,
}


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


def _refuse_options(call: mixers.MixerCall, options: dict[str, Any]) -> None:
    asked = {name for name, option in options.items() if option is not None}
    unknown = sorted(asked - WITHOUT_EFFECT_ON_STATES)
    if unknown:
        raise UnsupportedModelError(
            f"{call.pages.model_type}: the recurrence of layer {call.layer} needs {', '.join(unknown)}, which the kernels "
            f"do not support"
        )
