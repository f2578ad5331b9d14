"""Limits of a scheduler: their check at start, and the requests that exceed them."""

from typing import NamedTuple

from kvcache.blocks import BlockPool
from scheduler.policy.request import Request


class SchedulerLimits(NamedTuple):
    """What one rank runs at once.

    Attributes:
        rotary_limit: Length in tokens above which the model computes all tokens of a sequence differently, if any.
            A sequence that grows past it starts again.
        keeps_images_whole: Whether no chunk of a prompt may end within an image.
        repeats_decodes: As in `EngineConfig`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    rotary_limit: int | None = None
    keeps_images_whole: bool = False
    repeats_decodes: bool = False

    def is_long(self, num_tokens: int) -> bool:
        """Return whether the model computes a sequence of this length in its way for long ones."""
        return self.rotary_limit is not None and num_tokens > self.rotary_limit


class SchedulerLimitsError(ValueError):
    """Limits under which the service could not serve every request that it accepts."""


def check_limits(pool: BlockPool, limits: SchedulerLimits) -> None:
    """Raise if some accepted request could never run under these limits.

    Raises:
        SchedulerLimitsError: The message names the limit, the value seen and the values allowed.
    """
    max_num_seqs, max_num_batched_tokens, max_model_len, *_ = limits
    if max_num_seqs < 1:
        raise SchedulerLimitsError(f"max_num_seqs is {max_num_seqs}; it must be at least 1")
    if max_num_batched_tokens < max_num_seqs:
        raise SchedulerLimitsError(
            f"max_num_batched_tokens is {max_num_batched_tokens}; it must be at least max_num_seqs "
            f"({max_num_seqs}), so that every running request gets its token in every step"
        )
    if max_model_len < 2:
        raise SchedulerLimitsError(
            f"max_model_len is {max_model_len}; it must be at least 2: one prompt token, one generated"
        )
    num_needed = pool.blocks_for(max_model_len)
    if num_needed > pool.num_blocks:
        raise SchedulerLimitsError(
            f"max_model_len is {max_model_len} tokens, which need {num_needed} KV blocks of {pool.block_tokens}; "
            f"the pool has {pool.num_blocks}: give the KV cache more memory, or set max_model_len to at most "
            f"{pool.num_blocks * pool.block_tokens}"
        )


def why_unservable(request: Request, limits: SchedulerLimits) -> str | None:
    """Return why a request can never run, or None if it can."""
    num_tokens, max_model_len = len(request.prompt_ids), limits.max_model_len
    if num_tokens == 0:
        return "the prompt has no tokens; give at least one"
    if num_tokens > max_model_len:
        return f"the prompt has {num_tokens} tokens; max_model_len is {max_model_len}; shorten the prompt"
    longest = max((image.length for image in request.images), default=0)
    if limits.keeps_images_whole and longest > limits.max_num_batched_tokens:
        return (
            f"an image has {longest} tokens, which one step must run; a step has at most "
            f"{limits.max_num_batched_tokens} (--max-num-batched-tokens)"
        )
    return None
