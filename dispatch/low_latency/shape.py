"""The numbers that fix a low-latency call: from them follow every size, so that nothing depends on the tokens.

A dispatch message to a rank is a header, then one entry per row (its token and its K local experts), then the rows:
each token once per rank, however many of its experts live there (DeepEP sends it once per expert). A row is its values
and, in FP8, its float32 scales. A combine message is a header and one row of answers per (token, expert).
"""

from dataclasses import dataclass

import torch

from dispatch import fp8

HEADER_BYTES = 64
ALIGNMENT = 64
ROW_ALIGNMENT = 16
HINTED_CHOICES = (
    32  # the size hint is asked for before the number of choices is known: DeepEP's largest, in combine
)


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Round up."""
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True, kw_only=True)
class LowLatencyShape:
    """One call's shape, equal on all ranks.

    Attributes:
        world_size: R.
        experts_per_rank: L; expert e is local expert e % L of rank e // L.
        max_tokens: M, the most that a rank may bring.
        hidden: H.
        choices: K per token.
        dtype: of the tokens, floating.
        is_fp8: whether rows travel in FP8.
        is_ue8m0: whether scales are handed out as exponents; they travel as float32 all the same.
    """

    world_size: int
    experts_per_rank: int
    max_tokens: int
    hidden: int
    choices: int
    dtype: torch.dtype
    is_fp8: bool = False
    is_ue8m0: bool = False

    @property
    def rows_per_expert(self) -> int:
        """Rows that each local expert has room for."""
        return self.world_size * self.max_tokens

    @property
    def item_bytes(self) -> int:
        """Bytes of a travelling value."""
        return 1 if self.is_fp8 else self.dtype.itemsize

    @property
    def value_bytes(self) -> int:
        """Bytes of a row's values."""
        return self.hidden * self.item_bytes

    @property
    def num_scales(self) -> int:
        """float32 scales of a travelling row."""
        return fp8.num_blocks(self.hidden) if self.is_fp8 else 0

    @property
    def scales_at(self) -> int:
        """Where a row's scales begin."""
        return aligned(self.value_bytes, ROW_ALIGNMENT)

    @property
    def row_bytes(self) -> int:
        """Bytes of a travelling row. Plain rows are the caller's own, so they have no padding."""
        if not self.is_fp8:
            return self.value_bytes
        return aligned(self.scales_at + 4 * self.num_scales, ROW_ALIGNMENT)

    @property
    def answers_per_rank(self) -> int:
        """The most answers that one rank owes another: an expert answers a token once, even if chosen twice."""
        return self.max_tokens * min(self.choices, self.experts_per_rank)

    @property
    def dispatch_bytes(self) -> int:
        """The largest dispatch message."""
        entries = aligned(4 * self.max_tokens * (1 + self.choices))
        return HEADER_BYTES + entries + self.max_tokens * self.row_bytes

    @property
    def answer_bytes(self) -> int:
        """Bytes of an answer."""
        return self.hidden * self.dtype.itemsize

    @property
    def combine_bytes(self) -> int:
        """The largest combine message."""
        return HEADER_BYTES + self.answers_per_rank * self.answer_bytes


def size_hint(max_tokens: int, hidden: int, world_size: int, num_experts: int) -> int:
    """Return the bytes of all windows of two calls at once, both ways, for bfloat16: a bound, a multiple of 128.

    Nothing is allocated from such a budget here; callers of DeepEP ask for it and hand it to `Buffer`.
    """
    shape = LowLatencyShape(
        world_size=world_size,
        experts_per_rank=-(-num_experts // world_size),
        max_tokens=max_tokens,
        hidden=hidden,
        choices=HINTED_CHOICES,
        dtype=torch.bfloat16,
    )
    per_peer = aligned(shape.dispatch_bytes) + aligned(shape.combine_bytes)
    return aligned(2 * 2 * world_size * per_peer, 128)
