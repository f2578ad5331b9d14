"""Run one planned batch: fill the step, call the model, sample. Knows no policy and no requests' lives."""

import torch

from kvcache.paged_cache import PagedCache
from kvcache.step import Span, Step
from moe.model import Model
from scheduler.policy import Batch
from scheduler.sampling import Sampled, sample


class Runner:
    """A rank's model, its cache and the step they share."""

    def __init__(self, model: Model, cache: PagedCache) -> None:
        """Take the model and a cache whose blocks the scheduler's pool counts."""
        self._model, self._cache = model, cache
        self._token_T = torch.zeros_like(model.step.position_T)

    @property
    def step(self) -> Step:
        """The step that the model reads."""
        return self._model.step

    @torch.inference_mode()
    def run(self, batch: Batch, agreed_tokens: int = 0) -> Sampled:
        """Run a batch, or padded rows if it is empty; collective over the model's group.

        Args:
            batch: what to run.
            agreed_tokens: see `lockstep.Agreement`; equal on all ranks.

        Returns:
            One token per item that samples, in order.
        """
        spans, tokens, rows, row = [], [], [], 0
        for sequence, start, length, samples in batch.items:
            spans.append(
                Span(start, length, sequence.block_ids[: -(-(start + length) // self.step.block_tokens)])
            )
            tokens += sequence.token_ids[start : start + length]
            row += length
            if samples:
                rows.append(row - 1)
        self.step.fill(spans)
        self.step.agreed_tokens = agreed_tokens
        self._token_T[:row] = torch.tensor(tokens, dtype=torch.int64)
        self._token_T[row : self.step.num_padded] = 0
        token_T = self._token_T[: self.step.num_padded]
        logits_RV = self._model.forward(token_T, self._cache, torch.tensor(rows, dtype=torch.int64))
        return sample(logits_RV, [item.sequence for item in batch.items if item.samples])
