"""DeepEP's low-latency calls, one to one, over an exchange. `dispatch.Buffer` delegates to them.

Differences from DeepEP, all of them extensions or without effect:
- an expert's rows are always ordered by source rank, then source token; DeepEP's order changes from run to run;
- any floating dtype, hidden size and number of choices, except in `strict` mode; FP8 scales of a last, short block;
- a token that names an expert twice is delivered to it once, and its answer counts twice;
- bad arguments are an error on every rank before anything is delivered, and the next call works;
- results are in a ring of two per shape: the third call of a kind overwrites the first one's results. DeepEP has the
  same limit ("you cannot hold more than 2 results");
- wait statistics are in nanoseconds, not clock cycles. A CPU wire waits for all peers at once, so each gets the
  time of the slowest.
See `dispatch.gpu.exchange` for the differences on a GPU, where the host does not wait.

Idea and interface: DeepEP 2.1, deep_ep/buffers/legacy.py.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from dispatch.faces import checks
from dispatch.faces.checks import CombineCall
from dispatch.faces.events import EventOverlap, finished
from dispatch.faces.rules import (
    Problems,
    counters_fit,
    existing,
    first_problem,
    forks_ask_nothing,
    name_choice,
)
from dispatch.low_latency.calls import (
    BlockCombine,
    BlockDispatch,
    HeldDispatch,
    LowLatencyExchange,
    LowLatencyShape,
    size_hint,
)

LowLatencyHandle = tuple[Tensor, Tensor, int, int, int]
Hook = Callable[[], None]


class HeldCalls:
    """Finds the call that a handle or a choice of `LowLatencyMode` belongs to. Only refusals are collective."""

    exchange: LowLatencyExchange
    strict: bool

    @cached_property
    def _world(self) -> checks.World:
        exchange = self.exchange
        return checks.World(
            rank=exchange.rank, num_ranks=exchange.world_size, strict=self.strict, device=exchange.device,
            dtypes=exchange.dtypes,
        )  # fmt: skip

    @cached_property
    def _choices(self) -> dict[tuple[int, ...], Tensor]:
        """Memory for int32 choices as int64, by shape."""
        return {}

    @cached_property
    def _combine_buffers(self) -> dict[tuple[Any, ...], Tensor]:
        return {}

    def _refuse_first(self, *lists: Problems) -> None:
        problem = first_problem(*lists)
        if problem:
            self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        """Refuse the call on every rank, then raise."""
        self.exchange.refuse(problem)
        raise ValueError(problem)

    def _held_of(self, handle: LowLatencyHandle) -> HeldDispatch:
        held = self._find_held(handle)
        return self._refuse(held) if isinstance(held, str) else held

    def _find_held(self, handle: LowLatencyHandle) -> HeldDispatch | str:
        """Return the dispatch of a handle, or a description of the handle's problem."""
        problem = first_problem(checks.low_latency_handle(handle))
        if problem:
            return problem
        held = self.exchange.held_of(handle[0])
        if held is None:
            return (
                "handle is not from any of this buffer's dispatches, or is a copy; pass the returned handle"
            )
        shape, given = held.shape, tuple(handle[2:])
        wanted = (shape.max_tokens, shape.hidden, shape.experts_per_rank * shape.world_size)
        if given != wanted:
            return f"handle ends in {given}; its dispatch had {wanted}. Pass the returned handle"
        return held

    def _checked_choices(self, topk_idx: Tensor, num_experts: int) -> Tensor:
        """Return a dispatch's choices as int64."""
        topk_idx = self._as_int64(topk_idx)
        bad = self.exchange.find_bad_choice(topk_idx, num_experts)
        return topk_idx if bad < 0 else self._refuse(name_choice(topk_idx, bad, existing(num_experts)))

    def _dispatched_choices(self, topk_idx: Tensor, held: HeldDispatch) -> Tensor:
        """Return a combine's choices as int64."""
        topk_idx = self._as_int64(topk_idx)
        bad = self.exchange.find_other_choice(topk_idx, held)
        if bad >= 0:
            sent = int(held.sent_TK.view(-1)[bad])
            self._refuse(name_choice(topk_idx, bad, f"-1, or {sent} as in the dispatch of this handle"))
        return topk_idx

    def _as_int64(self, topk_idx: Tensor) -> Tensor:
        if topk_idx.dtype == torch.int64:
            return topk_idx
        self.exchange.settle()  # an unfinished combine still reads its choices
        shape = tuple(topk_idx.shape)
        if shape not in self._choices:
            self._choices[shape] = torch.empty(shape, dtype=torch.int64, device=topk_idx.device)
        return self._choices[shape].copy_(topk_idx)

    def _combine_buffer(self, held: HeldDispatch) -> Tensor:
        shape = held.shape
        key = (shape.experts_per_rank, shape.rows_per_expert, shape.hidden, shape.dtype)
        if key not in self._combine_buffers:
            self._combine_buffers[key] = torch.zeros(key[:3], dtype=shape.dtype, device=self.exchange.device)
        return self._combine_buffers[key]

    def _filled_buffer(self, held: HeldDispatch, x: Tensor) -> Tensor:
        """Return the buffer that the caller filled with answers instead of x."""
        buffer = self._combine_buffer(held)
        if not isinstance(x, Tensor) or x.dtype != buffer.dtype:
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            self._refuse(
                f"x is {got} but zero_copy is True; the combine buffer of this handle holds {buffer.dtype}"
            )
        return buffer

    def _row_of(self, stats: Tensor | None) -> Tensor | None:
        """Return this rank's part of wait statistics [R] or [R, R]."""
        return stats if stats is None or stats.dim() == 1 else stats[self.exchange.rank]

    def _refuse_forks(self, method: str, forks: Mapping[str, Any]) -> None:
        """Raise TypeError here and PeerRefused on other ranks for arguments that V1 does not have."""
        problem = forks_ask_nothing(method, forks)
        if problem:
            self.exchange.refuse(problem)
            raise TypeError(problem)


class LowLatencyMode(HeldCalls):
    """DeepEP's low-latency calls, mixed into `Buffer`. All `low_latency_` calls and `clean_low_latency_buffer` are
    collective, in the same order on all ranks; the mask's methods are local.

    Attributes:
        exchange: Moves rows and answers; it masks lost ranks if `enable_shrink`.
        enable_shrink: Whether ranks may be masked.
        strict: Whether to apply the limits of DeepEP's hardware.
    """

    enable_shrink: bool

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return a bound of the bytes that low-latency calls move at once, for bfloat16. No size depends on it."""
        return size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **forks: Any,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Send each token to its chosen experts. Collective.

        With M = num_max_dispatch_tokens_per_rank, R ranks, L = num_experts / R:

        Args:
            x: [T, H], T <= M, contiguous; T may differ between ranks, M, H, K, dtype and num_experts may not.
            topk_idx: int64 or int32 [T, K], experts in [0, num_experts) or -1, contiguous.
            cumulative_local_expert_recv_stats: int32 [L]; the received counts are added.
            dispatch_wait_recv_cost_stats: int64 [R] or [R, R] (then this rank's row); waits in ns are added.
            use_fp8: Send FP8 values and scales. See `dispatch.fp8`, also for round_scale and use_ue8m0.
            async_finish: Return an event to wait for. The work is done when the call returns in any case.
            return_recv_hook: Only send; the hook receives. x may be overwritten before the hook runs.
            forks: Arguments of DeepEP's forks (use_nvfp4, x_global_scale, ...): a TypeError on every rank, unless
                None or False.

        Returns:
            recv_x: [L, R*M, H] in the dtype of x; or (float8_e4m3fn [L, R*M, H], float32 scales
                [L, R*M, ceil(H/128)], or int32 [L, R*M, ceil(H/512)] with use_ue8m0), scales column-major.
            recv_count: int32 [L]; the number of valid rows of each expert, the others are undefined.
            handle: (int32 source tokens [L, R*M], int64 ranges [L, R]: (begin << 32) | count, M, H, num_experts).
            event, and the hook or None. With a hook, the results are valid after it has run.

        Raises:
            ValueError: Bad arguments on this rank. PeerRefused: On another rank. The next call works.
            PeerLost, DispatchTimeout, RanksDisagree: The wire can no longer be used.
        """
        self._refuse_forks("low_latency_dispatch", forks)
        counts, waits, world = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, self._world
        max_tokens, hidden = num_max_dispatch_tokens_per_rank, x.shape[-1] if isinstance(x, Tensor) else 0
        self._refuse_first(
            checks.low_latency_dispatch(x, topk_idx, max_tokens, num_experts, counts, world),
            checks.low_latency_form(hidden, use_fp8, round_scale, use_ue8m0, world),
            checks.low_latency_end(
                "dispatch_wait_recv_cost_stats", waits, async_finish, return_recv_hook, world
            ),
        )
        shape = LowLatencyShape(
            world_size=world.num_ranks, experts_per_rank=num_experts // world.num_ranks, max_tokens=max_tokens,
            hidden=hidden, choices=topk_idx.shape[1], dtype=x.dtype, is_fp8=use_fp8, is_ue8m0=use_ue8m0,
        )  # fmt: skip
        topk_idx = self._checked_choices(topk_idx, num_experts)
        call = BlockDispatch(
            shape, x, topk_idx, round_scale, may_wait=return_recv_hook, stats_L=counts, waited_R=self._row_of(waits)
        )  # fmt: skip
        held, posted = self.exchange.post_dispatch(call)
        if not return_recv_hook:
            posted()
        handle = (held.source_token_LN, held.layout_range_LR, shape.max_tokens, shape.hidden, num_experts)
        recv_x = held.x_LNH if held.scales is None else (held.x_LNH, held.scales)
        return recv_x, held.count_L, handle, finished(async_finish), posted if return_recv_hook else None

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        **forks: Any,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Bring the answers back and sum them with their weights. Collective.

        Args:
            x: [L, R*M, H], the experts' answers in the order of recv_x, contiguous; any floating dtype of two bytes or more.
            topk_idx: [T, K] as dispatched; a choice that is -1 here adds nothing.
            topk_weights: float32 [T, K].
            handle: Handle of one of the last two dispatches of its shape.
            use_logfmt: Accepted, without effect: answers travel in their own dtype, which is more exact.
            zero_copy: Read the answers from `get_next_low_latency_combine_buffer` instead of x. They are still copied to
                the peers.
            async_finish, return_recv_hook: As in `low_latency_dispatch`. topk_idx and topk_weights must not change until
                the hook has run; x may.
            out: [T, H] in the dtype of x, contiguous; the result is written here.
            combine_wait_recv_cost_stats, forks: As in `low_latency_dispatch`.

        Returns:
            combined_x: `out`, or one of two results of this shape in turn: the sum over k = 0..K-1 of weight times
                answer, in float32 (float64 for float64) in that order, rounded once. Masked ranks add nothing.
            event, and the hook or None.

        Raises:
            As `low_latency_dispatch`.
        """
        self._refuse_forks("low_latency_combine", forks)
        held = self._held_of(handle)
        if zero_copy:
            x = self._filled_buffer(held, x)
        given, waits = CombineCall(x=x, topk_weights=topk_weights, biases=()), combine_wait_recv_cost_stats
        self._refuse_first(
            checks.low_latency_combine(given, topk_idx, out, held.shape, held.num_tokens, self._world),
            checks.low_latency_end(
                "combine_wait_recv_cost_stats", waits, async_finish, return_recv_hook, self._world
            ),
        )
        topk_idx = self._dispatched_choices(topk_idx, held)
        call = BlockCombine(
            held, x, topk_idx, topk_weights, may_wait=return_recv_hook, out_TH=out, waited_R=self._row_of(waits)
        )  # fmt: skip
        combined_x, posted = self.exchange.post_combine(call)
        if not return_recv_hook:
            posted()
        return combined_x, finished(async_finish), posted if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Return [L, R*M, H] for the answers of `zero_copy=True`. Local; one per shape and dtype.

        It has the dtype of the dispatched tokens. For another dtype of answers use `zero_copy=False`.

        Raises:
            ValueError: The handle is not from this buffer.
        """
        held = self._find_held(handle)
        if isinstance(held, str):
            raise ValueError(held)
        return self._combine_buffer(held)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Wait until all ranks have called this, on a GPU too. Collective. Messages are numbered: nothing needs cleaning.

        Raises:
            As `low_latency_dispatch`. With `enable_shrink`, a rank that does not call this is masked instead.
        """
        self.exchange.barrier()

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask or unmask a rank. This rank neither sends to a masked one nor waits for it. Local. Raises ValueError."""
        self._need_shrink()
        R = self.exchange.world_size
        if not 0 <= rank_to_mask < R:
            raise ValueError(f"rank_to_mask is {rank_to_mask}; it must be in [0, {R})")
        self.exchange.set_mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write the mask to int32 [R]: 1 for a masked rank. Local."""
        self._need_shrink()
        R = self.exchange.world_size
        problem = counters_fit("mask_status", mask_status, torch.int32, (R,), device=self.exchange.device)
        if problem or mask_status is None:
            raise ValueError(problem or f"mask_status is None; it must be torch.int32 [{R}]")
        self.exchange.write_mask(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask every rank. Local."""
        self._need_shrink()
        for rank in range(self.exchange.world_size):
            self.exchange.set_mask(rank, False)

    def _need_shrink(self) -> None:
        if not self.enable_shrink:
            raise ValueError("enable_shrink is False; open the buffer with enable_shrink=True to mask ranks")


class LowLatencyFace(LowLatencyMode):
    """Low-latency mode over an exchange, which the caller owns; see `LowLatencyMode`."""

    def __init__(
        self, exchange: LowLatencyExchange, *, enable_shrink: bool = False, strict: bool = False
    ) -> None:
        self.exchange, self.enable_shrink, self.strict = exchange, enable_shrink, strict
