"""Low-latency calls that say what is wrong with their arguments, on every rank, before anything is sent.

What `LowLatencyFace` stands on: sentences come from `arguments`; here are the lookups that need the exchange (which
dispatch a handle is of, what its choices were) and the refusal.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from dispatch.low_latency import arguments
from dispatch.low_latency.exchange import LowLatencyExchange
from dispatch.low_latency.ring import DispatchSlot
from dispatch.low_latency.shape import LowLatencyShape

Handle = tuple[Tensor, Tensor, int, int, int]


class CheckedCalls:
    """Looks at arguments for `LowLatencyFace`. Only what refuses is collective."""

    def __init__(self, exchange: LowLatencyExchange, *, strict: bool) -> None:
        self.exchange, self.strict = exchange, strict
        self._choices: dict[tuple[int, ...], Tensor] = {}  # int32 choices as int64, by shape
        self._combine_buffers: dict[tuple[Any, ...], Tensor] = {}

    def _refuse_first(self, *checks: Iterator[str]) -> None:
        problem = next((problem for check in checks for problem in check), "")
        if problem:
            self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        """Tell every rank, then raise."""
        self.exchange.refuse(problem)
        raise ValueError(problem)

    def _count_problems(self, name: str, stats: Tensor | None, num_local: int) -> Iterator[str]:
        return arguments.stats_problems(name, stats, torch.int32, (num_local,), device=self.exchange.device)

    def _wait_problems(self, name: str, stats: Tensor | None) -> Iterator[str]:
        R = self.exchange.world_size
        return arguments.stats_problems(name, stats, torch.int64, (R,), (R, R), device=self.exchange.device)

    def _checked_shape(
        self, x: Tensor, topk_idx: Tensor, max_tokens: int, num_experts: int, form: tuple[bool, bool, bool]
    ) -> LowLatencyShape:
        """Check what a dispatch sends, and in which form; return its shape.

        Args:
            form: use_fp8, round_scale, use_ue8m0.
        """
        R, strict = self.exchange.world_size, self.strict
        self._refuse_first(
            arguments.dispatch_problems(
                x, topk_idx, max_tokens, num_experts, R, strict=strict, device=self.exchange.device
            ),
            arguments.dtype_problems(x, self.exchange.dtypes),
        )
        self._refuse_first(arguments.format_problems(x.shape[1], *form, strict=strict))
        return LowLatencyShape(
            world_size=R,
            experts_per_rank=num_experts // R,
            max_tokens=max_tokens,
            hidden=x.shape[1],
            choices=topk_idx.shape[1],
            dtype=x.dtype,
            is_fp8=form[0],
            is_ue8m0=form[2],
        )

    def _check_answers(
        self, slot: DispatchSlot, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, out: Tensor | None
    ) -> None:
        """Check what a combine sends."""
        shape, device = slot.shape, self.exchange.device
        self._refuse_first(
            arguments.combine_problems(
                x, topk_idx, topk_weights, shape, slot.num_tokens, strict=self.strict, device=device
            ),
            arguments.dtype_problems(x, self.exchange.dtypes),
        )
        self._refuse_first(arguments.out_problems(out, slot.num_tokens, shape.hidden, x.dtype, device=device))

    def _slot_of(self, handle: Handle) -> DispatchSlot:
        problem, slot = self._find_slot(handle)
        if slot is None:
            self._refuse(problem)
        return slot

    def _find_slot(self, handle: Handle) -> tuple[str, DispatchSlot | None]:
        """Return the dispatch that a handle is of, or what is wrong with it."""
        problem = arguments.first(arguments.handle_problems(handle))
        if problem:
            return problem, None
        slot = self.exchange.slot_of(handle[0])
        if slot is None:
            return (
                "handle is of none of this buffer's dispatches, or a copy of it; pass what was returned",
                None,
            )
        shape = slot.shape
        wanted = (shape.max_tokens, shape.hidden, shape.experts_per_rank * shape.world_size)
        if tuple(handle[2:]) != wanted:
            given = tuple(handle[2:])
            return f"handle ends in {given}; its dispatch had {wanted}, pass what was returned", None
        return "", slot

    def _checked_choices(self, topk_idx: Tensor, num_experts: int) -> Tensor:
        """Return a dispatch's choices as int64."""
        topk_idx = self._as_int64(topk_idx)
        bad = self.exchange.find_bad_choice(topk_idx, num_experts)
        if bad >= 0:
            token, choice = divmod(bad, topk_idx.shape[1])
            seen = int(topk_idx[token, choice])
            self._refuse(f"topk_idx[{token}, {choice}] is {seen}; it must be -1 or in [0, {num_experts})")
        return topk_idx

    def _dispatched_choices(self, topk_idx: Tensor, slot: DispatchSlot) -> Tensor:
        """Return a combine's choices as int64."""
        topk_idx = self._as_int64(topk_idx)
        bad = self.exchange.find_other_choice(topk_idx, slot)
        if bad >= 0:
            token, choice = divmod(bad, topk_idx.shape[1])
            seen, sent = int(topk_idx[token, choice]), int(slot.sent_TK[token, choice])
            self._refuse(
                f"topk_idx[{token}, {choice}] is {seen} where the dispatch of this handle had {sent}; it must be that "
                "or -1"
            )
        return topk_idx

    def _as_int64(self, topk_idx: Tensor) -> Tensor:
        if topk_idx.dtype == torch.int64:
            return topk_idx
        self.exchange.settle()  # a combine that travels reads its choices when it is finished
        shape = tuple(topk_idx.shape)
        if shape not in self._choices:
            self._choices[shape] = torch.empty(shape, dtype=torch.int64, device=topk_idx.device)
        return self._choices[shape].copy_(topk_idx)

    def _combine_buffer(self, slot: DispatchSlot) -> Tensor:
        shape = slot.shape
        key = (shape.experts_per_rank, shape.rows_per_expert, shape.hidden, shape.dtype)
        if key not in self._combine_buffers:
            self._combine_buffers[key] = torch.zeros(key[:3], dtype=shape.dtype, device=self.exchange.device)
        return self._combine_buffers[key]

    def _filled_buffer(self, slot: DispatchSlot, x: Tensor) -> Tensor:
        """Return what the caller wrote its answers to instead of x."""
        buffer = self._combine_buffer(slot)
        if not isinstance(x, Tensor) or x.dtype != buffer.dtype:
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            self._refuse(
                f"x is {got} and zero_copy True; the combine buffer of this handle holds {buffer.dtype}"
            )
        return buffer
