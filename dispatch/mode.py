"""Whether one dispatch has an agreed room. All ranks of a call must say the same; results have the same bits in both.

Normal: any number of tokens; memory grows with what comes. Low latency: no rank brings more than an agreed number of
tokens, and room for so many from every rank is there from the first call on: nothing grows, and on a GPU sizes and places
never change, so that the call can be replayed (DeepEP's two modes, chosen per call).

Knows no wire. Rejected: a third mode in which every rank gets all tokens, which was never faster (docs/LOG.md).
"""

from typing import NamedTuple

SMALLEST_CAPACITY = 8  # tokens; smaller messages cost no less


class Mode(NamedTuple):
    """`capacity`: the most tokens that any rank dispatches in this call; 0 is normal mode, without a limit."""

    capacity: int = 0

    def __str__(self) -> str:
        """Name it in messages."""
        return f"low-latency mode for {self.capacity} tokens" if self.capacity else "normal mode"


NORMAL = Mode()


def low_latency(capacity: int) -> Mode:
    """Return low-latency mode for at most `capacity` tokens per rank.

    Raises:
        ValueError: less than one.
    """
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}; low-latency mode needs room for at least 1 token")
    return Mode(capacity)


def fitting_capacity(num_tokens: int) -> int:
    """Return the capacity for at most `num_tokens` per rank: a power of two, so that few shapes occur."""
    capacity = SMALLEST_CAPACITY
    while capacity < num_tokens:
        capacity *= 2
    return capacity
