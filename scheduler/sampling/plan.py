"""The sampling plan of a step on a GPU: what the host computes during the step and sends in one copy.

Rules, structures and penalties use the CPU's code and become bit masks and edits of single logits. Random numbers are
the CPU's too. This takes microseconds per plain row. A structure takes a loop through the vocabulary.

Legend: as `scheduler.sampling.device_sampler`.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scheduler.policy.sequence import TokenContext
from scheduler.sampling.draw import LEAST_TEMPERATURE, uniform_at
from scheduler.sampling.sampler import LEAST_PENALTY

MOST_ROWS = 16  # rows that torch sorts or measures at once; each takes about 40 bytes x vocabulary
SMALL_TOP_K = 1024  # up to this, the kernels need no sums over the vocabulary
_ALIGNMENT = 16  # bytes; enough for every type and for vector loads


class Draw(NamedTuple):
    """Rows that are drawn in the same way."""

    rows: tuple[int, ...]
    is_filtered: bool  # top-k, min-p or top-p may exclude tokens


class LogprobQuery(NamedTuple):
    """A request for one row's logprobs."""

    place: int  # index of the row's logits
    token: int  # index of the row's own token
    num_top: int  # number of most likely tokens to return
    ids: Rows[int] = ()  # return these instead of the most likely


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """How a step's rows are sampled. Tensors are on the device; those with a D list the rows of all draws in turn."""

    draws: tuple[Draw, ...]  # those without filters come first
    has_open_rows: bool  # whether a filtered row has no small top-k
    row_D: Tensor  # int64
    draw_of_row_R: Tensor  # int32, the place of each row in the D's, or -1
    inverse_temperature_D: Tensor  # float32
    least_weight_D: Tensor  # float32, min-p: share of the top's weight
    top_k_D: Tensor  # int64, at least 1
    top_p_D: Tensor  # float64
    uniform_D: Tensor  # float64 in [0, 1)
    masked_rows: tuple[int, ...]
    masked_row_M: Tensor  # int64
    mask_MW: Tensor  # int32, a bit per token, lowest first; 1: allowed
    edited_E: Tensor  # int64, distinct places in the flat logits
    bias_E: Tensor  # float32, added first
    penalty_E: Tensor  # float32, of repetition; 1 has no effect
    subtracted_E: Tensor  # float32, frequency and presence, last
    asked: tuple[LogprobQuery, ...]
    kept_row_K: Tensor  # int64, rows for which the model's own logits are needed later
    kept_rows: tuple[int, ...]  # the same on the host; empty if no logit changes before tokens are chosen


def make_plan(contexts: Rows[TokenContext], vocabulary: int, device: torch.device) -> SamplingPlan:
    """Plan the sampling of a step's rows. Does not wait for the device.

    Args:
        contexts: R contexts, with everything known before this token.
        vocabulary: V, the width of the logits.
    """
    masks: dict[int, np.ndarray] = {}
    edits: dict[int, _Edits] = {}
    for row, context in enumerate(contexts):
        ruled_V = _ruled(context, vocabulary)
        if ruled_V is not None and np.isneginf(ruled_V).any():
            masks[row] = _words(ruled_V)
        if ruled_V is not None or _is_penalised(context):
            edits[row] = _Edits.of(context, ruled_V)
    draws = _draws(contexts)
    drawn = [row for draw in draws for row in draw.rows]
    draw_of_row_R = np.full(len(contexts), -1, np.int32)
    draw_of_row_R[drawn] = np.arange(len(drawn))
    asking = [row for row, each in enumerate(contexts) if each.request.params.num_logprobs is not None]
    is_changed = bool(masks) or any(each.ids.size for each in edits.values())
    kept_rows = tuple(sorted({*asking, *masks})) if is_changed else ()
    place_of = {row: place for place, row in enumerate(kept_rows or range(len(contexts)))}
    arrays = {
        **_drawn_arrays([contexts[row] for row in drawn], vocabulary),
        "row_D": np.array(drawn, np.int64),
        "draw_of_row_R": draw_of_row_R,
        "masked_row_M": np.array(list(masks), np.int64),
        "mask_MW": np.stack(list(masks.values())) if masks else np.empty((0, 0), np.int32),
        "kept_row_K": np.array(kept_rows, np.int64),
    }
    of_edits = [_NO_EDITS, *(each.at_row(row, vocabulary) for row, each in edits.items())]
    for name, own in (("edited_E", "ids"), ("bias_E", "biases"), ("penalty_E", "penalties"), ("subtracted_E", "subtracted")):  # fmt: skip
        arrays[name] = np.concatenate([getattr(each, own) for each in of_edits])
    asked = [(row, contexts[row].request.params) for row in asking]
    return SamplingPlan(
        **send(arrays, device),
        draws=draws,
        has_open_rows=any(
            not 0 < contexts[row].request.params.top_k <= SMALL_TOP_K
            for draw in draws
            for row in draw.rows
            if draw.is_filtered
        ),
        masked_rows=tuple(masks),
        kept_rows=kept_rows,
        asked=tuple(
            LogprobQuery(place_of[row], row, each.num_logprobs or 0, each.logprob_token_ids)
            for row, each in asked
        ),
    )


def _draws(contexts: Rows[TokenContext]) -> tuple[Draw, ...]:
    kinds: dict[bool, list[int]] = {False: [], True: []}
    for row, context in enumerate(contexts):
        params = context.request.params
        if params.temperature != 0:
            is_filtered = bool(params.top_k) or params.min_p > 0.0 or params.top_p < 1.0
            kinds[is_filtered].append(row)
    return tuple(
        Draw(tuple(rows[begin : begin + MOST_ROWS]), is_filtered)
        for is_filtered, rows in kinds.items()
        for begin in range(0, len(rows), MOST_ROWS)
    )


def _drawn_arrays(contexts: Rows[TokenContext], vocabulary: int) -> dict[str, np.ndarray]:
    params = [context.request.params for context in contexts]
    uniforms = [
        uniform_at(each.seed, context.num_output_tokens)
        for each, context in zip(params, contexts, strict=True)
    ]
    inverses = [1.0 / max(each.temperature, LEAST_TEMPERATURE) for each in params]
    return {
        "inverse_temperature_D": np.array(inverses, np.float32),
        "least_weight_D": np.array([max(each.min_p, 0.0) for each in params], np.float32),
        "top_k_D": np.array([each.top_k or vocabulary for each in params], np.int64),
        "top_p_D": np.array([each.top_p for each in params], np.float64),
        "uniform_D": np.array(uniforms, np.float64),
    }


@dataclass(frozen=True)
class _Edits:
    """Changes of one row's logits, by id."""

    ids: np.ndarray  # int64
    biases: np.ndarray
    penalties: np.ndarray
    subtracted: np.ndarray

    @classmethod
    def of(cls, context: TokenContext, biased_V: np.ndarray | None) -> "_Edits":
        params = context.request.params
        repeated = np.empty(0, np.int64)
        generated, counts = repeated, repeated
        if params.repetition_penalty != 1.0:
            repeated = np.unique(np.array(context.token_ids, np.int64))
        if params.presence_penalty or params.frequency_penalty:
            outputs = np.array(context.token_ids[context.num_prompt_tokens :], np.int64)
            generated, counts = np.unique(outputs, return_counts=True)
        biased = np.empty(0, np.int64)
        if biased_V is not None:
            biased = np.flatnonzero((biased_V != 0) & np.isfinite(biased_V))
        ids = np.unique(np.concatenate((repeated, generated, biased)))
        edits = cls(ids, *(np.full(ids.size, value, np.float32) for value in (0.0, 1.0, 0.0)))
        edits.penalties[np.searchsorted(ids, repeated)] = max(params.repetition_penalty, LEAST_PENALTY)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        edits.subtracted[np.searchsorted(ids, generated)] = penalties.astype(np.float32)
        if biased_V is not None:
            edits.biases[np.searchsorted(ids, biased)] = biased_V[biased]
        return edits

    def at_row(self, row: int, vocabulary: int) -> "_Edits":
        """Return these edits by place in the flat logits."""
        return replace(self, ids=self.ids + row * vocabulary)


_NO_EDITS = _Edits(np.empty(0, np.int64), *(np.empty(0, np.float32) for _ in range(3)))


def _is_penalised(context: TokenContext) -> bool:
    params = context.request.params
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _ruled(context: TokenContext, vocabulary: int) -> np.ndarray | None:
    """Apply structure and rules to zero logits: -inf if forbidden, a bias, or 0. Returns None if there are no rules."""
    rules = context.rules
    is_ruled = rules is not None and rules.apply_at(context.num_output_tokens)
    if not context.has_structure and not is_ruled:
        return None
    ruled_V = np.zeros(vocabulary, np.float32)
    if context.has_structure:
        context.mask(ruled_V)
    if rules is not None and is_ruled:
        rules.apply(ruled_V, context.token_ids, context.num_output_tokens)
    return ruled_V


def _words(ruled_V: np.ndarray) -> np.ndarray:
    bits = np.packbits(~np.isneginf(ruled_V), bitorder="little")
    return np.pad(bits, (0, -bits.size % 4)).view(np.int32)


def send(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Copy arrays to a device at once, without waiting. Returns views of one buffer, by the same names.

    For a GPU the copy starts from pinned memory, which torch's allocator keeps until the copy is done.
    """
    ends = np.cumsum([-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in arrays.values()])
    starts = [0, *ends[:-1].tolist()]
    packed = np.zeros(int(ends[-1]), np.uint8)
    for start, array in zip(starts, arrays.values(), strict=True):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    staged = torch.empty(len(packed), dtype=torch.uint8, pin_memory=device.type == "cuda")
    buffer = staged.copy_(torch.from_numpy(packed)).to(device, non_blocking=True)
    return {
        name: buffer[start : start + array.nbytes].view(_type_of(array)).view(array.shape)
        for start, (name, array) in zip(starts, arrays.items(), strict=True)
    }


def _type_of(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
