"""Samples a step's rows on a GPU for the runner, which sees what `scheduler.sampling.sample` gives it on the CPU.

The host waits once, for the ids. Rows whose logprobs are asked for are copied to the host before anything changes them.

Legend: R rows, V vocabulary, L rows with logprobs.
"""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from scheduler.gpu.draws import plan_draws
from scheduler.gpu.sampling import SamplingScratch, choose_tokens
from scheduler.logprobs import RowLogprobs
from scheduler.request import Logprobs
from scheduler.sampling import Sampled
from scheduler.sequence import Sequence


class DeviceSampler:
    """Sampling with memory of its own, for one step at a time."""

    def __init__(self, max_rows: int, vocabulary: int, device: torch.device) -> None:
        """Reserve memory for steps that sample so many rows at most."""
        self._scratch = SamplingScratch(max_rows, vocabulary, device)

    def sample(self, logits_RV: Tensor, sequences: Rows[Sequence]) -> Sampled:
        """Choose a token per row.

        Args:
            logits_RV: [R, V] float32 contiguous, on the device; may be changed in place.
            sequences: R, as they stand before this token.
        """
        if not sequences:
            return Sampled([], [])
        rows = [row for row, each in enumerate(sequences) if each.request.params.num_logprobs is not None]
        raw_LV = _copied(logits_RV, rows)
        draws = plan_draws(sequences, logits_RV.shape[1], logits_RV.device)
        token_ids: list[int] = choose_tokens(
            logits_RV, draws, self._scratch
        ).tolist()  # waits; the copies are done
        logprobs: list[Logprobs | None] = [None] * len(sequences)
        for row, logits_V in zip(rows, raw_LV.numpy(), strict=True):
            params = sequences[row].request.params
            logprobs[row] = RowLogprobs(logits_V).of(
                token_ids[row], params.num_logprobs or 0, ids=params.logprob_token_ids
            )
        return Sampled(token_ids, logprobs)


def _copied(logits_RV: Tensor, rows: list[int]) -> Tensor:
    """Start copying rows to the host: [L, V]; they are there when the stream has come so far."""
    is_cuda = logits_RV.is_cuda
    raw_LV = torch.empty(len(rows), logits_RV.shape[1], dtype=logits_RV.dtype, pin_memory=is_cuda)
    for place, row in enumerate(rows):
        raw_LV[place].copy_(logits_RV[row], non_blocking=True)
    return raw_LV
