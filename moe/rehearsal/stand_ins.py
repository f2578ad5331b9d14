"""Functions that take the place of masks, attention, recurrences and indexes while a model is rehearsed on meta.

Each only writes to the rehearsal's notes, which the model was given as its cache, and returns tensors of the right shapes
(`attention.recurrences.mixers`, `attention.sparse.index`). Masks are read by evaluating `transformers`' mask functions on
selected pairs of tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attention.recurrences.mixers import ChannelScan, Convolution, DeltaRule, HeadScan, MixerCall, Recurrences
from attention.sparse.pools import ChosenMask, Pooling
from moe.families import UnsupportedModelError
from moe.rehearsal.notes import Notes, Sight


def sight_of(mask_function: Callable[..., Any], local_size: int) -> Sight:
    """Return which tokens a mask function of `transformers` shows.

    Args:
        mask_function: `(batch, head, query position, key position) -> visible`, on tensors.
        local_size: Window or chunk size that it may have, in tokens; 0 for none.
    """
    rows = sorted({0, 1, 63, local_size, local_size + 1, 2 * local_size + 3, 5000})
    edges = (0, 1, 2, local_size // 2, local_size - 1, local_size, local_size + 1, 4000)
    pairs = [(row, row - back) for row in rows for back in edges if row >= back]
    pairs += [(row, key) for row in rows for key in (0, row + 1)]
    query, key = torch.tensor(pairs).T
    with _NoPadding():
        seen = mask_function(0, 0, query, key)
    if not isinstance(seen, Tensor) or seen.device != query.device:
        return Sight(None)
    is_causal = key <= query
    wanted = {Sight(0): is_causal}
    if local_size:
        wanted[Sight(local_size)] = is_causal & (key > query - local_size)
        wanted[Sight(0, local_size)] = is_causal & (key // local_size == query // local_size)
    return next((sight for sight, pairs in wanted.items() if torch.equal(seen, pairs)), Sight(None))


class _NoPadding(TorchFunctionMode):
    """Read values per sequence that a mask function looks up on meta (the number of padding tokens) as 0."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__ and args[0].is_meta and args[0].dim() == 1:
            return torch.zeros((), dtype=args[0].dtype, device="cpu")
        return func(*args, **(kwargs or {}))


def make_mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **_options: Any) -> Sight:
    """Return the sight of a mask in place of its values."""
    with torch.device("cpu"):
        return sight_of(mask_function, local_size or 0)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Sight | ChosenMask | None = None,
    *,
    scaling: float,
    pages: Notes,
    **options: Any,
) -> tuple[Tensor, None]:
    """Stand in for attention."""
    if isinstance(attention_mask, ChosenMask):
        options["indices"] = attention_mask.indices
        attention_mask = Sight(0)
    pages.attend(module, query, key, value, attention_mask, options)
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


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
