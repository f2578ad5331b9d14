"""A planned batch as the model's step sees it: spans on blocks, tokens, and the rows whose logits are wanted."""

from kvcache.step import Inputs, Span, Step
from scheduler.policy.scheduler import Batch


def fill_step(step: Step, batch: Batch, agreed_tokens: int) -> Inputs:
    """Put a batch into a step; the rows whose logits are wanted are those that are sampled from.

    Args:
        agreed_tokens: see `lockstep.Agreement`.
    """
    spans: list[Span] = []
    tokens: list[int] = []
    rows: list[int] = []
    row = 0
    for sequence, start, length, samples in batch.items:
        spans.append(Span(start, length, sequence.block_ids))
        tokens += sequence.token_ids[start : start + length]
        row += length
        if samples:
            rows.append(row - 1)
    step.fill(spans, batch.num_tokens - batch.num_prefill_tokens, agreed_tokens=agreed_tokens)
    return step.inputs(tokens, rows)
