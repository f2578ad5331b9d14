"""Basis of DeepEP's low-latency calls: a call's shape, the held results, and the interface of exchanges.

Every size follows from the numbers in the shape, so nothing depends on the tokens. On a GPU a dispatch message to a rank
is a header, then one entry per row (its token and its K local experts), then the rows: each token once per rank,
even if several of its experts are there (DeepEP sends it once per expert). A row is its values and, in FP8, its float32
scales. A combine message is a header and one row of answers per (token, expert). CPUs use `dispatch.cpu_kernels.message`.

Results and tables are allocated once per shape and returned in turn. Two of each kind may be held; the third call
overwrites the first one's. So calls allocate nothing; DeepEP has the same rule. Large results take no
memory until rows are written: pages are allocated on first use.

A call is posted (its messages are sent) and finished (its results are written), at once or, with a receive hook, later.
Only one call is in transit at a time: posting the next one finishes it into its own results. Every rank does this
in the same order, so no rank waits for a message that has not been sent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.errors import DispatchError

HEADER_BYTES = 64
ALIGNMENT = 64
ROW_ALIGNMENT = 16
# The size hint is needed before the number of choices is known: DeepEP's largest, in combine.
HINTED_CHOICES = 32


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Round up to a multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True, kw_only=True)
class LowLatencyShape:
    """Shape of a call, equal on all ranks.

    Attributes:
        world_size: R.
        experts_per_rank: L; expert e is local expert e % L of rank e // L.
        max_tokens: M, the largest number of tokens per rank.
        hidden: H.
        choices: K per token.
        dtype: Floating type of the tokens.
        is_fp8: Whether rows travel in FP8.
        is_ue8m0: Whether scales are returned as exponents; they travel as float32 in any case.
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
        """Room per local expert, in rows."""
        return self.world_size * self.max_tokens

    @property
    def item_bytes(self) -> int:
        """Bytes of a value on the wire."""
        return 1 if self.is_fp8 else self.dtype.itemsize

    @property
    def value_bytes(self) -> int:
        """Bytes of a row's values."""
        return self.hidden * self.item_bytes

    @property
    def num_scales(self) -> int:
        """Number of float32 scales of a row on the wire."""
        return fp8.num_blocks(self.hidden) if self.is_fp8 else 0

    @property
    def scales_at(self) -> int:
        """Offset of a row's scales."""
        return aligned(self.value_bytes, ROW_ALIGNMENT)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire. Plain rows are the caller's own, so they have no padding."""
        if not self.is_fp8:
            return self.value_bytes
        return aligned(self.scales_at + 4 * self.num_scales, ROW_ALIGNMENT)

    @property
    def answers_per_rank(self) -> int:
        """Most answers that one rank owes another: an expert answers a token once, even if chosen twice."""
        return self.max_tokens * min(self.choices, self.experts_per_rank)

    @property
    def dispatch_bytes(self) -> int:
        """Size of the largest dispatch message."""
        entries = aligned(4 * self.max_tokens * (1 + self.choices))
        return HEADER_BYTES + entries + self.max_tokens * self.row_bytes

    @property
    def answer_bytes(self) -> int:
        """Bytes of an answer."""
        return self.hidden * self.dtype.itemsize

    @property
    def combine_bytes(self) -> int:
        """Size of the largest combine message."""
        return HEADER_BYTES + self.answers_per_rank * self.answer_bytes


def size_hint(max_tokens: int, hidden: int, world_size: int, num_experts: int) -> int:
    """Return a bound of the bytes of all windows of two calls, in both directions, for bfloat16; a multiple of 128.

    Nothing is allocated from this budget. Callers of DeepEP request the size and pass it to `Buffer`.
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


RESULTS_HELD = 2


class HeldDispatch:
    """One dispatch's results. Exchanges add the state that they need to bring the answers back.

    Attributes:
        x_LNH: The rows, [L, R*M, H]; rows at and beyond an expert's count are undefined.
        scales: FP8 only, [L, R*M, blocks or words], column-major.
        count_L: int32. source_token_LN: int32. layout_range_LR: int64, (begin << 32) | count.
        sent_TK: int64 [M, K], the choices of this rank's tokens.
        num_tokens: Number of this rank's tokens.
    """

    def __init__(self, shape: LowLatencyShape, device: torch.device) -> None:
        self.shape = shape
        L, N, R = shape.experts_per_rank, shape.rows_per_expert, shape.world_size
        dtype = torch.float8_e4m3fn if shape.is_fp8 else shape.dtype
        self.x_LNH = torch.empty(L, N, shape.hidden, dtype=dtype, device=device)
        self.scales: Tensor | None = None
        if shape.is_fp8:
            width = fp8.num_words(shape.hidden) if shape.is_ue8m0 else shape.num_scales
            kind = torch.int32 if shape.is_ue8m0 else torch.float32
            self.scales = torch.empty(L, width, N, dtype=kind, device=device).transpose(1, 2)
        self.count_L = torch.zeros(L, dtype=torch.int32, device=device)
        self.source_token_LN = torch.zeros(L, N, dtype=torch.int32, device=device)
        self.layout_range_LR = torch.zeros(L, R, dtype=torch.int64, device=device)
        self.sent_TK = torch.zeros(shape.max_tokens, shape.choices, dtype=torch.int64, device=device)
        self.num_tokens = 0


Held = TypeVar("Held", bound=HeldDispatch)


class Results(Generic[Held]):
    """Returns the results of every shape in turn, the oldest first.

    Args:
        make: Allocates memory for a dispatch of a shape on a device.
        device: Device of the results.
    """

    def __init__(self, make: Callable[[LowLatencyShape, torch.device], Held], device: torch.device) -> None:
        self._make, self._device = make, device
        self._held: dict[LowLatencyShape, Iterator[Held]] = {}
        self._outputs: dict[tuple[int, int, torch.dtype], Iterator[Tensor]] = {}
        self._known: dict[int, Held] = {}  # by the address of their source tokens, which handles carry

    def next_held(self, shape: LowLatencyShape) -> Held:
        """Return memory for a dispatch."""
        turns = self._held.get(shape)
        if turns is None:
            made = [self._make(shape, self._device) for _ in range(RESULTS_HELD)]
            self._known.update({held.source_token_LN.data_ptr(): held for held in made})
            turns = self._held[shape] = cycle(made)
        return next(turns)

    def held_of(self, source_token_LN: Tensor) -> Held | None:
        """Return the dispatch with these source tokens, or None if they are not from here."""
        return self._known.get(source_token_LN.data_ptr())

    def next_output(self, shape: LowLatencyShape, dtype: torch.dtype, num_tokens: int) -> Tensor:
        """Return memory [num_tokens, H] for a combine without `out`."""
        key = (shape.max_tokens, shape.hidden, dtype)
        turns = self._outputs.get(key)
        if turns is None:
            rooms = [torch.empty(*key[:2], dtype=dtype, device=self._device) for _ in range(RESULTS_HELD)]
            turns = self._outputs[key] = cycle(rooms)
        return next(turns)[:num_tokens]


class BlockDispatch(NamedTuple):
    """A dispatch of this rank's rows into the blocks of their experts.

    Attributes:
        x_TH: [T <= M, H] of the shape's dtype, contiguous.
        topk_TK: int64 [T, K] in [-1, R*L), contiguous.
        round_scale: See `fp8`.
        may_wait: Whether the result is read later; x_TH may change before that.
        stats_L: int32; the received counts are added.
        waited_R: int64; the waits in nanoseconds are added.
    """

    shape: LowLatencyShape
    x_TH: Tensor
    topk_TK: Tensor
    round_scale: bool
    may_wait: bool
    stats_L: Tensor | None = None
    waited_R: Tensor | None = None


class BlockCombine(NamedTuple):
    """A combine of this rank's answers.

    Attributes:
        held: The dispatch that is answered.
        y_LNH: Floating [L, N, H], contiguous; rows beyond the counts are not read.
        topk_TK: int64 [T, K], contiguous: the dispatched choices, or -1 to leave an answer out.
        weights_TK: float32 [T, K], contiguous.
        may_wait, waited_R: As in `BlockDispatch`, for y_LNH.
        out_TH: [T, H] in the dtype of y_LNH, contiguous.
    """

    held: HeldDispatch
    y_LNH: Tensor
    topk_TK: Tensor
    weights_TK: Tensor
    may_wait: bool
    out_TH: Tensor | None = None
    waited_R: Tensor | None = None


class Posted:
    """A call that has sent its messages.

    Calling it waits for the peers' messages and writes the results; calling it again does nothing. If another call
    finishes this one, an error of this call is kept and raised when its owner calls it.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._error: DispatchError | None = None

    def settle(self) -> None:
        """Finish the call and keep its error."""
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            finish()
        except DispatchError as error:
            self._error = error

    def __call__(self) -> None:
        """Finish the call and raise its error."""
        self.settle()
        if self._error is not None:
            raise self._error


class OneTravels:
    """Common part of both kinds of exchange: at most one call is in transit."""

    _travelling: Posted | None = None

    def settle(self) -> None:
        if self._travelling is not None:
            self._travelling.settle()
            self._travelling = None

    def _travel(self, finish: Callable[[], None]) -> Posted:
        """Return a call that has sent its messages and that `finish` completes."""
        self._travelling = Posted(finish)
        return self._travelling


class LowLatencyExchange(Protocol):
    """One rank's end. Posting, finishing, refusing and the barrier are collective, in the same order on all ranks.
    The caller checks the arguments.

    Attributes:
        rank, world_size: This rank and the number of ranks of the group.
        device: Device of tokens and results.
        dtypes: Supported floating types; None for all.
    """

    rank: int
    world_size: int
    device: torch.device
    dtypes: tuple[torch.dtype, ...] | None

    def settle(self) -> None:
        """Finish the call in transit, if there is one. Call it before other use of the wire. Collective."""

    def refuse(self, text: str) -> None:
        """Refuse one call because its arguments are bad. Collective; the caller raises the error."""

    def held_of(self, source_token_LN: Tensor) -> HeldDispatch | None:
        """Return the dispatch with these source tokens. Local."""

    def find_bad_choice(self, topk_TK: Tensor, num_experts: int) -> int:
        """Return the flat index of the first choice outside [-1, num_experts), or -1. Local.

        Also returns -1 if the check would wait for a device. Such a choice then counts as no choice.
        """

    def find_other_choice(self, topk_TK: Tensor, held: HeldDispatch) -> int:
        """Return the flat index of the first choice that is neither -1 nor the dispatched one, or -1. Local."""

    def post_dispatch(self, call: BlockDispatch) -> tuple[HeldDispatch, Posted]:
        """Send this rank's rows. Return the results, and the call that fills them."""

    def post_combine(self, call: BlockCombine) -> tuple[Tensor, Posted]:
        """Send this rank's answers. Return the sums, and the call that fills them."""

    def barrier(self) -> None:
        """Wait for every rank that is not masked. If lost ranks are masked, mask those that do not call this."""

    def set_mask(self, rank: int, is_masked: bool) -> None:
        """Mask or unmask a rank. Local, except that it settles the call in transit."""

    def write_mask(self, status_R: Tensor) -> None:
        """Write the mask to int32 [R]: 1 for masked ranks, 0 for others. Local."""

    def close(self) -> None:
        """Release the resources that it opened. Local; may be called twice."""
