"""Mode of one dispatch: with or without an agreed capacity. Equal on all ranks; results have the same bits in both.

Normal: any number of tokens; memory grows as needed. Low latency: each rank sends at most an agreed number of tokens,
and the memory for that number from every rank is allocated by the first call. It never grows. On a GPU sizes and
addresses never change, so the call can be replayed (DeepEP's two modes, chosen per call).

Does not depend on the wire. Rejected: a third mode that sends all tokens to every rank, never faster (docs/LOG.md).
"""

from typing import NamedTuple

SMALLEST_CAPACITY = 8  # tokens; smaller messages cost no less
# Most tokens of a low-latency step with prompts, on GPUs. A rank then keeps R * 1,024 rows and 1,024 answers per choice, twice:
# 2 * (34 + 34) MB for 8 ranks and 8 choices of 2,048 channels in bfloat16.
_MOST_PROMPT_TOKENS = 1024


class Mode(NamedTuple):
    """`capacity`: most tokens that any rank dispatches in this call; 0 is normal mode, without a limit."""

    capacity: int = 0

    def __str__(self) -> str:
        return f"low-latency mode for {self.capacity} tokens" if self.capacity else "normal mode"


NORMAL = Mode()


def low_latency(capacity: int) -> Mode:
    """Return low-latency mode for at most `capacity` tokens per rank.

    Raises:
        ValueError: `capacity` is less than 1.
    """
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}; low-latency mode needs room for at least 1 token")
    return Mode(capacity)


def fitting_capacity(num_tokens: int) -> int:
    """Return the capacity for at most `num_tokens` per rank: a power of two, which limits the number of shapes."""
    capacity = SMALLEST_CAPACITY
    while capacity < num_tokens:
        capacity *= 2
    return capacity


def prompt_capacity(max_tokens: int) -> int:
    """Return the capacity of low-latency steps with prompts on GPUs. A step has at most `max_tokens` tokens."""
    return min(_MOST_PROMPT_TOKENS, fitting_capacity(max_tokens))
