"""What is wrong with a call of `ElasticBuffer`: sentences that name the argument, the value and the rule.

As in `arguments`, checks yield sentences and only the first is asked for, so that a check may rely on those before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispatch.arguments import describe
from dispatch.faces.arguments import World, choices_problem, weights_problem, x_problem
from dispatch.faces.ep_handle import EPHandle
from dispatch.faces.events import EventHandle

MAX_TOPK = 32  # DeepEP: one lane of a warp per choice
_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class DispatchCall:
    """A dispatch with its defaults filled in."""

    x: Any
    scales: Any
    topk_idx: Any
    topk_weights: Any
    stats: Any
    num_experts: int | None
    max_tokens: int
    alignment: int
    num_sms: int
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool
    do_zero_padding: bool
    column_major_scales: bool


@dataclass(frozen=True, kw_only=True)
class CombineCall:
    """A combine with its biases as a tuple."""

    x: Any
    topk_weights: Any
    biases: tuple[Any, ...]


def dispatch_problem(call: DispatchCall, world: World) -> Iterator[str]:
    """Check a dispatch; with a handle, its choices are the handle's."""
    yield from x_problem(call.x, call.scales, world)
    yield from _scales_problem(call, world)
    T = call.x.shape[0]
    if call.max_tokens < 1:
        yield f"num_max_tokens_per_rank is {call.max_tokens}; give it here or to the buffer, at least 1"
    if call.max_tokens < T:
        yield f"x has {T} tokens; num_max_tokens_per_rank is {call.max_tokens}"
    E, R = call.num_experts, world.num_ranks
    if not isinstance(E, int) or E < 1 or E % R != 0:
        yield f"num_experts is {E}; it must be a positive multiple of the {R} ranks"
    if call.alignment < 1:
        yield f"expert_alignment is {call.alignment}; it must be at least 1"
    yield from choices_problem(call.topk_idx, E or 0)
    yield from _repeated_problem(call.topk_idx)
    if call.topk_idx.shape[0] != T:
        yield f"topk_idx has {call.topk_idx.shape[0]} tokens and x {T}; they must be equal"
    if world.strict and call.topk_idx.shape[1] > MAX_TOPK:
        yield f"topk_idx has {call.topk_idx.shape[1]} choices; DeepEP takes {MAX_TOPK} (strict=True)"
    if call.topk_weights is not None:
        yield from weights_problem(call.topk_weights, tuple(call.topk_idx.shape))
    yield from _stats_problem(call.stats, (E or 0) // R)
    if call.do_zero_padding and not call.do_expand:
        yield "do_zero_padding is True and do_expand False; only expanded rows are padded"


def cached_problem(call: DispatchCall, handle: Any, given: dict[str, Any]) -> Iterator[str]:
    """Check a dispatch with a handle; `given` is what the caller passed for what the handle decides."""
    yield from handle_problem(handle)
    if given.pop("topk_idx") is not None:
        yield "topk_idx must be None with a handle: a cached dispatch goes the way of the first"
    if given.pop("do_cpu_sync"):
        yield "do_cpu_sync is True; a cached dispatch has nothing to ask for, its counts are the handle's"
    for name, value in given.items():
        if value is not None and value != getattr(handle, name):
            yield f"{name} is {value}; the handle is of a dispatch with {getattr(handle, name)}"
    if call.do_expand != handle.do_expand:
        yield f"do_expand is {call.do_expand}; the handle is of a dispatch with {handle.do_expand}"


def handle_problem(handle: Any) -> Iterator[str]:
    """Check that a handle is one of ours."""
    if not isinstance(handle, EPHandle) or handle.routes is None:
        yield f"handle is {type(handle).__name__}; it must be the EPHandle that a dispatch returned"


def combine_problem(call: CombineCall, handle: EPHandle, world: World) -> Iterator[str]:
    """Check a combine; the handle has been checked."""
    x, K = call.x, handle.topk_idx.shape[1]
    yield from x_problem(x, None, world)
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    if x.shape[0] != num_rows:
        kind = "expanded" if handle.do_expand else "unexpanded"
        yield f"x has {x.shape[0]} rows; the handle is of a dispatch that returned {num_rows}, {kind}"
    if call.topk_weights is not None:
        yield from weights_problem(call.topk_weights, (num_rows,) if handle.do_expand else (num_rows, K))
    if len(call.biases) > 2:
        yield f"bias is a tuple of {len(call.biases)}; it must be a tensor or a tuple of two"
    wanted = (handle.topk_idx.shape[0], x.shape[1])
    for bias in call.biases:
        if not isinstance(bias, Tensor) or bias.dtype != x.dtype or tuple(bias.shape) != wanted:
            got = describe(bias) if isinstance(bias, Tensor) else repr(bias)
            yield f"bias is {got}; it must be {x.dtype} {list(wanted)}"


def event_problem(events: dict[str, Any], allocate_on_comm_stream: bool) -> Iterator[str]:
    """Check the events to wait for; DeepEP's contract, though nothing waits on the CPU."""
    for name, event in events.items():
        if event is not None and not isinstance(event, EventHandle):
            yield f"{name} is {type(event).__name__}; it must be an EventHandle, as capture() returns, or None"
    if events.get("previous_event") is not None and not allocate_on_comm_stream:
        yield "previous_event is given and allocate_on_comm_stream False; it must be True then"


def _scales_problem(call: DispatchCall, world: World) -> Iterator[str]:
    if call.scales is None:
        return
    if call.scales.dim() != 2:
        yield f"x's scales are {describe(call.scales)}; they must be 2-dimensional"
    if world.strict and call.scales.element_size() != _SCALE_BYTES:
        yield f"x's scales are {describe(call.scales)}; DeepEP takes {_SCALE_BYTES} bytes each (strict=True)"


def _stats_problem(stats: Any, num_local_experts: int) -> Iterator[str]:
    if stats is None:
        return
    is_right = (
        isinstance(stats, Tensor) and stats.dtype == torch.int32 and stats.shape == (num_local_experts,)
    )
    if not is_right:
        got = describe(stats) if isinstance(stats, Tensor) else repr(stats)
        yield f"cumulative_local_expert_recv_stats is {got}; it must be int32 [{num_local_experts}]"


def _repeated_problem(topk_idx: Tensor) -> Iterator[str]:
    """An expert computes a token once: worst-case shapes count on it, as DeepEP's do."""
    ordered = topk_idx.sort(dim=1).values
    is_repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if is_repeated.any():
        token = int(is_repeated.any(1).nonzero()[0])
        yield f"topk_idx[{token}] is {topk_idx[token].tolist()}; a token's experts must differ"
