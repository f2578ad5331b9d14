"""What sampling on a GPU needs to know of a step's requests: made on the host, sent in one copy.

Rules, structures and penalties are worked out here from the same code as on the CPU, as sets of ids and small changes of
single logits; only what concerns the whole row is left to the device. Random numbers are the CPU's (`scheduler.sampling.sampler`).
That costs microseconds per plain row, while the device still works on the logits; a structure costs a pass over V.
A rule that would leave nothing to sample gives way as on the CPU, judged by the sets alone: logits that are -inf of their
own count as allowed here.

Legend: R rows, M rows with a mask, W words of 32 bits, E edits of single logits, V vocabulary.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scheduler.policy.sequence import Sequence
from scheduler.sampling.gpu.sending import send
from scheduler.sampling.sampler import LEAST_PENALTY, LEAST_TEMPERATURE, uniform_at

GREEDY = -1.0  # in place of an inverse temperature


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How each row is sampled, on its device."""

    inverse_temperature_R: Tensor  # float32; GREEDY where nothing is drawn
    least_weight_R: Tensor  # float32, min-p: of the likeliest token's
    top_k_R: Tensor  # int32; 0: all
    top_p_R: Tensor  # float64; 1 and more: all
    uniform_R: Tensor  # float64 in [0, 1)
    penalty_R: Tensor  # float32, of repetition
    mask_row_R: Tensor  # int32, which of the masks is the row's; -1: none
    masks_MW: Tensor  # int32, a bit per token, the lowest first; 1: allowed
    edit_row_E: Tensor  # int32
    edit_id_E: Tensor  # int32; a row's are different
    bias_E: Tensor  # float32, added first
    is_seen_E: Tensor  # int8: whether the repetition penalty applies
    subtracted_E: Tensor  # float32, frequency and presence, last
    draws: bool  # whether any row is not greedy
    masked_rows: tuple[int, ...]

    @property
    def changes(self) -> bool:
        """Whether any logit is changed before a token is chosen."""
        return bool(self.masked_rows) or self.edit_id_E.numel() > 0


@dataclass(frozen=True)
class _Edits:
    """Changes of one row's logits, by id."""

    ids: np.ndarray
    biases: np.ndarray
    seen: np.ndarray
    subtracted: np.ndarray

    @classmethod
    def of(cls, sequence: Sequence, biased_V: np.ndarray | None) -> "_Edits":
        params = sequence.request.params
        repeated = np.empty(0, np.int64)
        generated, counts = repeated, repeated
        if params.repetition_penalty != 1.0:
            repeated = np.unique(np.array(sequence.token_ids, np.int64))
        if params.presence_penalty or params.frequency_penalty:
            outputs = np.array(sequence.token_ids[sequence.num_prompt_tokens :], np.int64)
            generated, counts = np.unique(outputs, return_counts=True)
        biased = np.empty(0, np.int64) if biased_V is None else _biased(biased_V)
        ids = np.unique(np.concatenate((repeated, generated, biased)))
        edits = cls(ids, *(np.zeros(ids.size, kind) for kind in (np.float32, np.int8, np.float32)))
        edits.seen[np.searchsorted(ids, repeated)] = 1
        penalties = params.presence_penalty + params.frequency_penalty * counts
        edits.subtracted[np.searchsorted(ids, generated)] = penalties.astype(np.float32)
        if biased_V is not None:
            edits.biases[np.searchsorted(ids, biased)] = biased_V[biased]
        return edits


_NO_EDITS = _Edits(*(np.empty(0, kind) for kind in (np.int64, np.float32, np.int8, np.float32)))


def _is_penalised(sequence: Sequence) -> bool:
    params = sequence.request.params
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _biased(biased_V: np.ndarray) -> np.ndarray:
    return np.flatnonzero((biased_V != 0) & np.isfinite(biased_V))


def plan_draws(sequences: Rows[Sequence], vocabulary: int, device: torch.device) -> Draws:
    """Say how a step's rows are sampled; nothing waits for the device.

    Args:
        sequences: R, as they stand before this token.
        vocabulary: V, the width of the logits.
    """
    arrays = _row_arrays(sequences)
    masks: list[np.ndarray] = []
    edits: list[_Edits] = []
    mask_rows = np.full(len(sequences), -1, np.int32)
    for row, sequence in enumerate(sequences):
        ruled_V = _ruled(sequence, vocabulary)
        if ruled_V is not None and np.isneginf(ruled_V).any():
            mask_rows[row] = len(masks)
            masks.append(_words(ruled_V))
        edits.append(
            _NO_EDITS if ruled_V is None and not _is_penalised(sequence) else _Edits.of(sequence, ruled_V)
        )
    arrays["mask_row_R"] = mask_rows
    arrays["masks_MW"] = np.stack(masks) if masks else np.empty((0, 0), np.int32)
    arrays["edit_row_E"] = np.repeat(np.arange(len(edits)), [each.ids.size for each in edits]).astype(
        np.int32
    )
    names = {"edit_id_E": "ids", "bias_E": "biases", "is_seen_E": "seen", "subtracted_E": "subtracted"}
    for name, own in names.items():
        arrays[name] = np.concatenate([getattr(each, own) for each in edits])
    arrays["edit_id_E"] = arrays["edit_id_E"].astype(np.int32)
    return Draws(
        **send(arrays, device),
        draws=bool((arrays["inverse_temperature_R"] != GREEDY).any()),
        masked_rows=tuple(np.flatnonzero(mask_rows >= 0).tolist()),
    )


def _row_arrays(sequences: Rows[Sequence]) -> dict[str, np.ndarray]:
    params = [sequence.request.params for sequence in sequences]
    temperatures = [
        GREEDY if each.temperature == 0 else 1.0 / max(each.temperature, LEAST_TEMPERATURE) for each in params
    ]
    uniforms = [
        0.0 if each.temperature == 0 else uniform_at(each.seed, sequence.num_output_tokens)
        for each, sequence in zip(params, sequences, strict=True)
    ]
    return {
        "inverse_temperature_R": np.array(temperatures, np.float32),
        "least_weight_R": np.array([max(each.min_p, 0.0) for each in params], np.float32),
        "top_k_R": np.array([max(each.top_k or 0, 0) for each in params], np.int32),
        "top_p_R": np.array([each.top_p for each in params], np.float64),
        "uniform_R": np.array(uniforms, np.float64),
        "penalty_R": np.array([max(each.repetition_penalty, LEAST_PENALTY) for each in params], np.float32),
    }


def _ruled(sequence: Sequence, vocabulary: int) -> np.ndarray | None:
    """What the structure and the rules make of logits that are 0: -inf where forbidden, a bias, or 0; None: nothing."""
    rules, matcher = sequence.rules, sequence.matcher
    is_ruled = rules is not None and rules.apply_at(sequence.num_output_tokens)
    if matcher is None and not is_ruled:
        return None
    ruled_V = np.zeros(vocabulary, np.float32)
    if matcher is not None:
        matcher.mask(ruled_V)
    if rules is not None and is_ruled:
        rules.apply(ruled_V, sequence.token_ids, sequence.num_output_tokens)
    return ruled_V


def _words(ruled_V: np.ndarray) -> np.ndarray:
    bits = np.packbits(~np.isneginf(ruled_V), bitorder="little")
    return np.pad(bits, (0, -bits.size % 4)).view(np.int32)
