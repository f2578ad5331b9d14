"""What DeepEP's low-latency calls stand on: a call's shape, the results that are held, and the seam to what moves rows.

The shape is the numbers from which every size follows, so that nothing depends on the tokens. On a GPU a dispatch message to
a rank is a header, then one entry per row (its token and its K local experts), then the rows: each token once per rank,
however many of its experts live there (DeepEP sends it once per expert); a row is its values and, in FP8, its float32
scales. A combine message is a header and one row of answers per (token, expert). On a CPU messages are `dispatch.cpu_kernels.message`'s.

Results and tables are allocated once per shape and handed out in turn. Two of each kind may be held; the third call
overwrites the first's. That is what makes a call free of allocation, and it is DeepEP's rule too. Large results cost no
memory until rows are written: pages come with first use.

A call is posted (its messages leave) and finished (its results are written), at once or, for a receive hook, later.
One call travels at a time; posting the next finishes the one before into that one's own results, which every rank does
in the same order, so nobody waits for a message that is not on its way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.errors import DispatchError

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


RESULTS_HELD = 2


class HeldDispatch:
    """One dispatch's results. An exchange adds what it needs to bring the answers home.

    Attributes:
        x_LNH: the rows, [L, R*M, H]; rows at and beyond an expert's count are undefined.
        scales: FP8 only, [L, R*M, blocks or words], column-major.
        count_L: int32. source_token_LN: int32. layout_range_LR: int64, (begin << 32) | count.
        sent_TK: int64 [M, K], the choices of this rank's tokens.
        num_tokens: of this rank.
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
    """Hands out the results of every shape in turn, the oldest first.

    Args:
        make: makes room for a dispatch of a shape on a device.
        device: where results lie.
    """

    def __init__(self, make: Callable[[LowLatencyShape, torch.device], Held], device: torch.device) -> None:
        self._make, self._device = make, device
        self._held: dict[LowLatencyShape, Iterator[Held]] = {}
        self._outputs: dict[tuple[int, int, torch.dtype], Iterator[Tensor]] = {}
        self._known: dict[int, Held] = {}  # by the address of their source tokens: handles carry it

    def next_held(self, shape: LowLatencyShape) -> Held:
        """Return room for a dispatch."""
        turns = self._held.get(shape)
        if turns is None:
            made = [self._make(shape, self._device) for _ in range(RESULTS_HELD)]
            self._known.update({held.source_token_LN.data_ptr(): held for held in made})
            turns = self._held[shape] = cycle(made)
        return next(turns)

    def held_of(self, source_token_LN: Tensor) -> Held | None:
        """Return the dispatch that this is of, if it is one of ours."""
        return self._known.get(source_token_LN.data_ptr())

    def next_output(self, shape: LowLatencyShape, dtype: torch.dtype, num_tokens: int) -> Tensor:
        """Return room for a combine's result, for callers who bring no `out`: [num_tokens, H]."""
        key = (shape.max_tokens, shape.hidden, dtype)
        turns = self._outputs.get(key)
        if turns is None:
            rooms = [torch.empty(*key[:2], dtype=dtype, device=self._device) for _ in range(RESULTS_HELD)]
            turns = self._outputs[key] = cycle(rooms)
        return next(turns)[:num_tokens]


class Posted:
    """A call whose messages are on their way.

    Calling it waits for the peers' and writes the results; again is harmless. What goes wrong while another call
    finishes this one is raised here, when its owner asks.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._error: DispatchError | None = None

    def settle(self) -> None:
        """Finish, and keep the error."""
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            finish()
        except DispatchError as error:
            self._error = error

    def __call__(self) -> None:
        """Finish, and raise what went wrong."""
        self.settle()
        if self._error is not None:
            raise self._error


class OneTravels:
    """One call travels at a time: what both kinds of exchange do about it."""

    _travelling: Posted | None = None

    def settle(self) -> None:
        """See `LowLatencyExchange`."""
        if self._travelling is not None:
            self._travelling.settle()
            self._travelling = None

    def _travel(self, finish: Callable[[], None]) -> Posted:
        """Return a call whose messages have left, and which `finish` ends."""
        self._travelling = Posted(finish)
        return self._travelling


class LowLatencyExchange(Protocol):
    """One rank's end. Posting, finishing, refusing and the barrier are collective, in the same order on all ranks;
    arguments are checked by the caller.

    Attributes:
        rank, world_size: within the group.
        device: where tokens and results lie.
        dtypes: floating types that it can move; None for all.
    """

    rank: int
    world_size: int
    device: torch.device
    dtypes: tuple[torch.dtype, ...] | None

    def settle(self) -> None:
        """Finish the call that travels, if one does: for whoever uses the wire otherwise. Collective."""
        ...

    def refuse(self, text: str) -> None:
        """Stand in for one call whose arguments are bad. Collective; the caller raises."""
        ...

    def held_of(self, source_token_LN: Tensor) -> HeldDispatch | None:
        """Return the dispatch that handed this out. Local."""
        ...

    def find_bad_choice(self, topk_TK: Tensor, num_experts: int) -> int:
        """Return the flat index of the first choice outside [-1, num_experts), or -1. Local.

        -1 also where looking would wait for a device: such a choice is then no choice.
        """
        ...

    def find_other_choice(self, topk_TK: Tensor, held: HeldDispatch) -> int:
        """Likewise for the first choice that is neither -1 nor what `held` dispatched."""
        ...

    def post_dispatch(
        self,
        shape: LowLatencyShape,
        x_TH: Tensor,
        topk_TK: Tensor,
        *,
        round_scale: bool,
        may_wait: bool,
        stats_L: Tensor | None = None,
        waited_R: Tensor | None = None,
    ) -> tuple[HeldDispatch, Posted]:
        """Send this rank's rows.

        Args:
            x_TH: [T <= M, H] of the shape's dtype, contiguous.
            topk_TK: int64 [T, K] in [-1, R*L), contiguous.
            round_scale: see `fp8`.
            may_wait: the result is asked for later: what x_TH holds by then does not matter.
            stats_L: int32, to add the received counts to.
            waited_R: int64, to add the nanoseconds to that were waited.

        Returns:
            Where the results will be, and what writes them.
        """
        ...

    def post_combine(
        self,
        held: HeldDispatch,
        y_LNH: Tensor,
        topk_TK: Tensor,
        weights_TK: Tensor,
        *,
        may_wait: bool,
        out_TH: Tensor | None = None,
        waited_R: Tensor | None = None,
    ) -> tuple[Tensor, Posted]:
        """Send this rank's answers.

        Args:
            held: of the dispatch that is answered.
            y_LNH: floating [L, N, H], contiguous; rows beyond the counts are not read.
            topk_TK: int64 [T, K], what was dispatched, or -1 to leave an answer out; contiguous.
            weights_TK: float32 [T, K], contiguous.
            may_wait: as in `post_dispatch`, for y_LNH.
            out_TH: [T, H] in the dtype of y_LNH, contiguous.

        Returns:
            Where the sums will be, and what writes them.
        """
        ...

    def barrier(self) -> None:
        """Meet every rank that is not masked; where lost ranks are masked, mask those that do not come."""
        ...

    def set_mask(self, rank: int, is_masked: bool) -> None:
        """Do without a rank, or with it again. Local, but for settling."""
        ...

    def write_mask(self, status_R: Tensor) -> None:
        """Write 1 for every masked rank to int32 [R], 0 for others. Local."""
        ...

    def close(self) -> None:
        """Release what it has opened itself. Local; may be called twice."""
        ...
