"""Checks of every call of DeepEP's interfaces: lists of `rules`, in the order in which they are checked.

A list is a generator, and only its first problem is used. Low-latency calls can be captured in a CUDA graph, so their
lists check shapes and types, never contents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispatch.arguments import CPU, describe, dtype_problem
from dispatch.faces import handles
from dispatch.faces import rules as rule
from dispatch.faces.events import EventHandle
from dispatch.faces.handles import EPHandle
from dispatch.faces.rules import Problems, is_tensor
from dispatch.low_latency.calls import LowLatencyShape

MAX_LOCAL_EXPERTS = 1024
MAX_CHOICES = 32  # one lane of a warp per choice
LOW_LATENCY_CHOICES = 11  # limit of a low-latency dispatch
SCALE_BYTES = 4
FP8_MULTIPLE = 512

_INT32, _FLOAT32, _BOOL = (torch.int32,), (torch.float32,), (torch.bool,)
_CHOICE_TYPES = (torch.int64, torch.int32)
_WITHOUT_HANDLE = "without a handle it must be"
_AS_DISPATCHED = "as in the dispatch of this handle it must be"
_NO_COPIES = "low-latency mode makes no copies and needs it contiguous"


@dataclass(frozen=True, kw_only=True)
class World:
    """Properties of a buffer that rules use. `device` and `dtypes` (None: all) are those of low-latency calls."""

    rank: int
    num_ranks: int
    num_nodes: int = 1
    strict: bool
    device: torch.device = CPU
    dtypes: tuple[torch.dtype, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class DispatchArguments:
    """Arguments of a `Buffer` dispatch without a handle."""

    x: Tensor
    scales: Tensor | None
    num_tokens_per_rank: Tensor | None
    num_tokens_per_rdma_rank: Tensor | None
    is_token_in_rank: Tensor | None
    num_tokens_per_expert: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    expert_alignment: int
    num_worst_tokens: int


@dataclass(frozen=True, kw_only=True)
class DispatchCall:
    """Arguments of an `ElasticBuffer` dispatch, with defaults filled in."""

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
    """Arguments of a combine, with its biases as a tuple."""

    x: Any
    topk_weights: Any
    biases: tuple[Any, ...]


# Both interfaces.


def rows(x: Any, scales: Any, world: World) -> Problems:
    """Check rows of `dispatch`, or of `combine`, which has no scales."""
    yield rule.are_rows(x, other=", or a tuple of a tensor and its scales")
    yield rule.scales_fit(x, scales)
    if world.strict:
        yield from rule.strict_rows_fit(x, has_scales=scales is not None)


# The calls of `Buffer` in normal mode.


def layout(topk_idx: Any, num_experts: int, world: World) -> Problems:
    """Check `get_dispatch_layout`."""
    yield rule.experts_divide(num_experts, world.num_ranks)
    yield is_tensor("topk_idx", topk_idx, _CHOICE_TYPES, "num_tokens", "num_topk")
    yield rule.choices_exist(topk_idx, num_experts)
    if world.strict:
        yield rule.is_contiguous("topk_idx", topk_idx, rule.STRICT_CONTIGUOUS)


def streams(previous_event: Any, async_finish: bool, allocates: bool, config: Any, world: World) -> Problems:
    """Check the arguments of every call that have no effect on the CPU."""
    yield rule.is_config(config)
    if previous_event is not None and not hasattr(previous_event, "current_stream_wait"):
        yield f"previous_event is {type(previous_event).__name__}; it must be an EventOverlap or None"
    if world.strict and allocates and not (previous_event is not None and async_finish):
        yield "allocate_on_comm_stream is True; DeepEP needs previous_event and async_finish=True with it (strict=True)"


def normal_dispatch(call: DispatchArguments, world: World) -> Problems:
    """Check `dispatch` without a handle; x has been checked."""
    yield from _layout_given(call, world)
    yield from _choices_given(call)
    yield rule.is_positive("expert_alignment", call.expert_alignment)
    if call.num_worst_tokens < 0 or (call.num_worst_tokens > 0 and call.topk_idx is None):
        yield f"num_worst_tokens is {call.num_worst_tokens}; it must be 0, or positive with topk_idx given"
    if world.strict and call.num_worst_tokens > 0 and world.num_nodes > 1:
        yield f"num_worst_tokens is {call.num_worst_tokens}; DeepEP supports it within a node only (strict=True)"


def _layout_given(call: DispatchArguments, world: World) -> Problems:
    """Check the results of `get_dispatch_layout`."""
    mask, counts, per_expert = call.is_token_in_rank, call.num_tokens_per_rank, call.num_tokens_per_expert
    R, strict = world.num_ranks, world.strict
    yield is_tensor("is_token_in_rank", mask, _BOOL, call.x.shape[0], R, must=_WITHOUT_HANDLE)
    assert mask is not None, "a tensor"
    yield rule.is_beside("is_token_in_rank", mask, call.x)
    if strict:
        yield rule.is_contiguous("is_token_in_rank", mask, rule.STRICT_CONTIGUOUS)
    yield is_tensor("num_tokens_per_rank", counts, _INT32, R, must=_WITHOUT_HANDLE)
    assert counts is not None, "a tensor"
    if counts.tolist() != mask.sum(0).tolist():
        yield (
            f"num_tokens_per_rank is {counts.tolist()} but is_token_in_rank has {mask.sum(0).tolist()}; "
            "they must come from the same get_dispatch_layout"
        )
    if strict and world.num_nodes > 1 and call.num_tokens_per_rdma_rank is None:
        yield "num_tokens_per_rdma_rank is None; DeepEP needs it for several nodes (strict=True)"
    size = f"a multiple of {R} ranks"
    yield is_tensor("num_tokens_per_expert", per_expert, _INT32, size, must=_WITHOUT_HANDLE)
    assert per_expert is not None, "a tensor"
    if per_expert.numel() == 0 or per_expert.numel() % R != 0:
        yield f"num_tokens_per_expert is {describe(per_expert)}; it must have {size}"
    if strict:
        yield rule.strict_most(
            "num_tokens_per_expert has", per_expert.numel() // R, "experts per rank", MAX_LOCAL_EXPERTS
        )


def _choices_given(call: DispatchArguments) -> Problems:
    choices, weights = call.topk_idx, call.topk_weights
    if (choices is None) != (weights is None):
        missing, given = ("topk_weights", "topk_idx") if weights is None else ("topk_idx", "topk_weights")
        yield f"{missing} is None but {given} is not; pass both or neither"
    if choices is None:
        return
    assert call.num_tokens_per_expert is not None, "checked before"
    for name, tensor in (("topk_idx", choices), ("topk_weights", weights)):
        yield rule.is_beside(name, tensor, call.x)
    yield is_tensor("topk_idx", choices, _CHOICE_TYPES, "num_tokens", "num_topk")
    yield rule.choices_exist(choices, call.num_tokens_per_expert.numel())
    yield rule.choices_match(choices, call.x)
    yield is_tensor("topk_weights", weights, _FLOAT32, *choices.shape)


def normal_handle(handle: Any, world: World) -> Problems:
    """Check a handle that a caller of `Buffer` passed."""
    length, R = handles.INTRANODE if world.num_nodes == 1 else handles.INTERNODE, world.num_ranks
    if not isinstance(handle, Sequence) or len(handle) != length:
        got = f"{type(handle).__name__} of {len(handle)}" if isinstance(handle, Sequence) else repr(handle)
        yield f"handle is {got}; it must be the tuple of {length} that dispatch returned"
    matrix, sources, mask = handles.read(handle)
    yield is_tensor("handle's prefix matrix", matrix, _INT32, R, R)
    yield is_tensor("handle's is_token_in_rank", mask, _BOOL, "num_tokens", R)
    if length == handles.INTRANODE:
        yield is_tensor("handle's source rows", sources, _INT32, "num_rows")
    else:
        yield is_tensor("handle's source rows", sources, (torch.uint8,), "num_rows", 8)
        sources = sources.view(torch.int32)[:, 0]
    counts_RR = handles.counts_of(matrix)
    num_received, num_sources = int(counts_RR[:, world.rank].sum()), int((sources >= 0).sum())
    if num_received != num_sources or counts_RR[world.rank].tolist() != mask.sum(0).tolist():
        yield "handle's prefix matrix does not fit its other tensors; it was modified, or is another rank's"


def normal_cached(topk_idx: Any, topk_weights: Any, x: Tensor, handle: handles.Handle) -> Problems:
    """Check `dispatch` with a handle; x and the handle have been checked."""
    if topk_idx is not None or topk_weights is not None:
        yield "topk_idx and topk_weights must be None with a handle: a cached dispatch sends only x"
    num_tokens = handles.num_tokens(handle)
    if x.shape[0] != num_tokens:
        yield f"x has {x.shape[0]} tokens; the handle's dispatch had {num_tokens}"


def normal_combine(call: CombineCall, handle: handles.Handle) -> Problems:
    """Check `combine`; x and the handle have been checked."""
    num_rows = handles.num_rows(handle)
    yield rule.rows_are_the_handles(call.x, num_rows)
    if call.topk_weights is not None:
        yield is_tensor("topk_weights", call.topk_weights, _FLOAT32, num_rows, "num_topk")
        yield rule.is_beside("topk_weights", call.topk_weights, call.x)
    yield from rule.biases_fit(call.biases, call.x, handles.num_tokens(handle))


# The calls of `ElasticBuffer`.


def elastic_events(previous: Any, before_epilogue: Any, allocates: bool) -> Problems:
    """Check the events to wait for. This is DeepEP's contract, although nothing waits on the CPU."""
    for name, event in {
        "previous_event": previous,
        "previous_event_before_epilogue": before_epilogue,
    }.items():
        if event is not None and not isinstance(event, EventHandle):
            yield f"{name} is {type(event).__name__}; it must be an EventHandle, as capture() returns, or None"
    if previous is not None and not allocates:
        yield "previous_event is given but allocate_on_comm_stream is False; it must be True"


def elastic_handle(handle: Any) -> Problems:
    """Check a handle that a caller of `ElasticBuffer` passed."""
    if not isinstance(handle, EPHandle) or handle.routes is None:
        yield f"handle is {type(handle).__name__}; it must be the EPHandle that a dispatch returned"


def elastic_cached(
    handle: Any, call: DispatchCall, topk_idx: Any, do_cpu_sync: bool | None, given: Mapping[str, int | None]
) -> Problems:
    """Check the arguments that a handle determines, if there is one. `given`: values that the caller passed."""
    if handle is None:
        return
    yield from elastic_handle(handle)
    if topk_idx is not None:
        yield "topk_idx must be None with a handle: a cached dispatch uses the first one's choices"
    if do_cpu_sync:
        yield "do_cpu_sync is True; it must be None or False with a handle, which already holds the counts"
    for name, value in {**given, "do_expand": call.do_expand}.items():
        if value is not None and value != getattr(handle, name):
            yield f"{name} is {value}; the handle's dispatch had {getattr(handle, name)}"


def elastic_dispatch(call: DispatchCall, world: World) -> Problems:
    """Check `dispatch`. With a handle, its choices are the handle's."""
    yield from rows(call.x, call.scales, world)
    if call.scales is not None and call.scales.dim() != 2:
        yield f"x's scales are {describe(call.scales)}; they must be 2-dimensional"
    if world.strict and call.scales is not None and call.scales.element_size() != SCALE_BYTES:
        yield f"x's scales are {describe(call.scales)}; DeepEP supports {SCALE_BYTES} bytes each (strict=True)"
    yield rule.tokens_fit(call.x, call.max_tokens)
    yield rule.experts_divide(call.num_experts, world.num_ranks)
    num_experts = call.num_experts or 0
    yield rule.is_positive("expert_alignment", call.alignment)
    yield is_tensor("topk_idx", call.topk_idx, _CHOICE_TYPES, "num_tokens", "num_topk")
    yield rule.choices_exist(call.topk_idx, num_experts)
    yield rule.choices_differ(call.topk_idx)
    yield rule.choices_match(call.topk_idx, call.x)
    if world.strict:
        yield rule.strict_most("topk_idx has", call.topk_idx.shape[1], "choices", MAX_CHOICES)
    if call.topk_weights is not None:
        yield is_tensor("topk_weights", call.topk_weights, _FLOAT32, *call.topk_idx.shape)
    num_local, device = num_experts // world.num_ranks, call.x.device
    yield rule.counters_fit(
        "cumulative_local_expert_recv_stats", call.stats, torch.int32, (num_local,), device=device
    )
    if call.do_zero_padding and not call.do_expand:
        yield "do_zero_padding is True but do_expand is False; only expanded rows are padded"


def elastic_combine(call: CombineCall, handle: EPHandle, world: World) -> Problems:
    """Check `combine`; the handle has been checked."""
    yield from rows(call.x, None, world)
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    yield rule.rows_are_the_handles(call.x, num_rows, ", expanded" if handle.do_expand else ", unexpanded")
    num_tokens, num_choices = handle.topk_idx.shape
    if call.topk_weights is not None:
        shape = (num_rows,) if handle.do_expand else (num_rows, num_choices)
        yield is_tensor("topk_weights", call.topk_weights, _FLOAT32, *shape)
    yield from rule.biases_fit(call.biases, call.x, num_tokens)


# The low-latency calls of `Buffer`.


def low_latency_dispatch(
    x: Any, topk_idx: Any, max_tokens: int, num_experts: int, counts: Any, world: World
) -> Problems:
    """Check what a dispatch sends, and the counters to which it adds received rows."""
    yield rule.are_rows(x) if not isinstance(x, Tensor) or x.dim() != 2 else rule.is_on("x", x, world.device)
    yield rule.is_contiguous("x", x, _NO_COPIES)
    yield rule.has_wide_type(x)
    yield is_tensor("topk_idx", topk_idx, _CHOICE_TYPES, "num_tokens", "num_topk")
    yield rule.is_on("topk_idx", topk_idx, world.device)
    yield rule.is_contiguous("topk_idx", topk_idx, _NO_COPIES)
    yield rule.choices_match(topk_idx, x)
    if x.shape[1] < 1 or topk_idx.shape[1] < 1:
        yield f"x has hidden size {x.shape[1]} and topk_idx {topk_idx.shape[1]} choices; both must be at least 1"
    if max_tokens < 1 or x.shape[0] > max_tokens:
        yield (
            f"x has {x.shape[0]} tokens but num_max_dispatch_tokens_per_rank is {max_tokens}; it must be at least 1 "
            "and at least the number of tokens"
        )
    yield rule.experts_divide(num_experts, world.num_ranks)
    if world.strict:
        num_choices, R = topk_idx.shape[1], world.num_ranks
        yield from rule.strict_low_latency_fits(x, num_choices, LOW_LATENCY_CHOICES, max_tokens, R)
    yield None if world.dtypes is None else dtype_problem("x", x, world.dtypes)
    name, num_local = "cumulative_local_expert_recv_stats", num_experts // world.num_ranks
    yield rule.counters_fit(name, counts, torch.int32, (num_local,), device=world.device)


def low_latency_form(
    hidden: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool, world: World
) -> Problems:
    """Check the format in which rows travel."""
    if use_ue8m0 and not (use_fp8 and round_scale):
        yield (
            f"use_ue8m0 is True with use_fp8={use_fp8} and round_scale={round_scale}; it needs both: packed exponents "
            "can only represent powers of two"
        )
    if world.strict and use_fp8 and hidden % FP8_MULTIPLE != 0:
        yield f"x has hidden size {hidden}; DeepEP needs a multiple of {FP8_MULTIPLE} for FP8 (strict=True)"


def low_latency_end(
    name: str, waits: Any, async_finish: bool, return_recv_hook: bool, world: World
) -> Problems:
    """Check the wait statistics, and when the caller wants the result."""
    R = world.num_ranks
    yield rule.counters_fit(name, waits, torch.int64, (R,), (R, R), device=world.device)
    if async_finish and return_recv_hook:
        yield "async_finish and return_recv_hook are both True; wait for a result with an event or a hook, not both"


def low_latency_handle(handle: Any) -> Problems:
    """Check the form of a handle of a low-latency dispatch."""
    rule = "it must be what low_latency_dispatch returned: (src_info, layout_range, max_tokens, hidden, num_experts)"
    if not isinstance(handle, tuple | list) or len(handle) != 5:
        yield f"handle is {type(handle).__name__}; {rule}"
    if not isinstance(handle[0], Tensor) or not isinstance(handle[1], Tensor):
        yield f"handle begins with {type(handle[0]).__name__} and {type(handle[1]).__name__}; {rule}"


def low_latency_combine(
    call: CombineCall, topk_idx: Any, out: Any, shape: LowLatencyShape, num_tokens: int, world: World
) -> Problems:
    """Check what a combine sends, against the dispatch that it answers."""
    x, weights = call.x, call.topk_weights
    wanted = (shape.experts_per_rank, shape.rows_per_expert, shape.hidden)
    if not isinstance(x, Tensor) or tuple(x.shape) != wanted or rule.has_wide_type(x):
        yield f"x is {rule.show(x)}; it must be {list(wanted)} of a floating type of two bytes or more"
    tensors = {"x": x, "topk_idx": topk_idx, "topk_weights": weights}
    yield is_tensor("topk_idx", topk_idx, _CHOICE_TYPES, num_tokens, shape.choices, must=_AS_DISPATCHED)
    yield is_tensor("topk_weights", weights, _FLOAT32, num_tokens, shape.choices, must=_AS_DISPATCHED)
    if out is not None:
        tensors["out"] = out
        yield is_tensor("out", out, (x.dtype,), num_tokens, shape.hidden)
    for name, tensor in tensors.items():
        yield rule.is_on(name, tensor, world.device)
        yield rule.is_contiguous(name, tensor, _NO_COPIES)
    if world.strict:
        yield from rule.strict_low_latency_fits(
            x, shape.choices, MAX_CHOICES, shape.max_tokens, world.num_ranks
        )
    yield None if world.dtypes is None else dtype_problem("x", x, world.dtypes)
