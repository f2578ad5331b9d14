"""What is wrong with a call's arguments: sentences that name the argument, the value and the rule.

The checks yield sentences and are asked for the first one only, so that a check may rely on those before it. What
DeepEP's hardware cannot do and ours can is refused only in `strict` mode: code that must run there is then told here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispatch.arguments import describe
from dispatch.faces import handles
from dispatch.faces.config import MAX_LOCAL_EXPERTS, VECTOR_BYTES, Config
from dispatch.faces.events import EventHandle
from dispatch.faces.handles import EPHandle

_SCALE_TYPES = (torch.float32, torch.int32)
_CHOICE_TYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, kw_only=True)
class World:
    """What checks must know of a buffer."""

    num_ranks: int
    num_nodes: int
    strict: bool


@dataclass(frozen=True, kw_only=True)
class DispatchArguments:
    """A dispatch without a handle."""

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


def first_problem(*checks: Iterator[str]) -> str:
    """Return the first sentence of the first check that has one, or nothing. Later checks may rely on earlier."""
    return next((problem for check in checks for problem in check), "")


def fork_problem(method: str, forks: Mapping[str, Any]) -> Iterator[str]:
    """Refuse arguments that only forks of DeepEP know, unless they ask for nothing (None or False)."""
    asked = sorted(name for name, value in forks.items() if value is not None and value is not False)
    if asked:
        yield f"{method} got {', '.join(asked)}; DeepEP's V1 interface has no such argument, leave it out"


def x_problem(x: Any, scales: Any, world: World) -> Iterator[str]:
    """Check the rows to send and the scales beside them."""
    if not isinstance(x, Tensor):
        yield f"x is {type(x).__name__}; it must be a tensor, or a tuple of a tensor and its scales"
    if x.dim() != 2 or x.device.type == "meta":
        yield f"x is {describe(x)}; it must be [num_tokens, hidden]"
    if scales is None and not x.is_floating_point():
        yield f"x is {describe(x)}; without scales it must be of a floating type"
    if scales is not None:
        yield from _scales_problem(x, scales)
    if world.strict:
        yield from _strict_x_problem(x, scales)


def _scales_problem(x: Tensor, scales: Any) -> Iterator[str]:
    if x.element_size() != 1:
        yield f"x is {describe(x)}; with scales it must be of a type of one byte, such as float8_e4m3fn"
    if not isinstance(scales, Tensor) or scales.dtype not in _SCALE_TYPES:
        got = describe(scales) if isinstance(scales, Tensor) else repr(scales)
        yield f"x's scales are {got}; they must be float32, or int32 with four exponents each"
    if scales.dim() not in (1, 2) or scales.shape[0] != x.shape[0] or scales.device != x.device:
        yield f"x's scales are {describe(scales)}; they must have one row for each of x's {x.shape[0]} tokens"


def _strict_x_problem(x: Tensor, scales: Tensor | None) -> Iterator[str]:
    if scales is None and x.dtype != torch.bfloat16:
        yield f"x is {x.dtype}; DeepEP takes bfloat16, or float8_e4m3fn with scales (strict=True)"
    if not x.is_contiguous():
        yield f"x has strides {list(x.stride())}; DeepEP needs it contiguous (strict=True)"
    if x.shape[1] * x.element_size() % VECTOR_BYTES != 0:
        row = x.shape[1] * x.element_size()
        yield f"x has rows of {row} bytes; DeepEP needs a multiple of {VECTOR_BYTES} (strict=True)"


def layout_problem(topk_idx: Any, num_experts: int, world: World) -> Iterator[str]:
    """Check the arguments of `get_dispatch_layout`."""
    if num_experts < 1 or num_experts % world.num_ranks != 0:
        yield f"num_experts is {num_experts}; it must be a positive multiple of the {world.num_ranks} ranks"
    yield from choices_problem(topk_idx, num_experts)
    if world.strict and not topk_idx.is_contiguous():
        yield f"topk_idx has strides {list(topk_idx.stride())}; DeepEP needs it contiguous (strict=True)"


def choices_problem(topk_idx: Any, num_experts: int) -> Iterator[str]:
    """Check the choices: type, shape and range."""
    if not isinstance(topk_idx, Tensor) or topk_idx.dim() != 2 or topk_idx.dtype not in _CHOICE_TYPES:
        got = describe(topk_idx) if isinstance(topk_idx, Tensor) else repr(topk_idx)
        yield f"topk_idx is {got}; it must be int64 [num_tokens, num_topk]"
    bad = ((topk_idx < -1) | (topk_idx >= num_experts)).nonzero()
    if bad.numel():
        token, choice = bad[0].tolist()
        value = int(topk_idx[token, choice])
        yield f"topk_idx[{token}, {choice}] is {value}; it must be -1 or in [0, {num_experts})"


def dispatch_problem(call: DispatchArguments, world: World) -> Iterator[str]:
    """Check all of a dispatch without a handle, but x itself."""
    yield from _mask_problem(call, world)
    yield from _count_problem(call, world)
    yield from _topk_problem(call)
    if call.expert_alignment < 1:
        yield f"expert_alignment is {call.expert_alignment}; it must be at least 1"
    if call.num_worst_tokens < 0 or (call.num_worst_tokens > 0 and call.topk_idx is None):
        yield f"num_worst_tokens is {call.num_worst_tokens}; it must be 0, or positive with topk_idx given"
    if world.strict and call.num_worst_tokens > 0 and world.num_nodes > 1:
        yield f"num_worst_tokens is {call.num_worst_tokens}; DeepEP has it within a node only (strict=True)"


def _mask_problem(call: DispatchArguments, world: World) -> Iterator[str]:
    mask, wanted = call.is_token_in_rank, [call.x.shape[0], world.num_ranks]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or list(mask.shape) != wanted:
        got = describe(mask) if isinstance(mask, Tensor) else repr(mask)
        yield f"is_token_in_rank is {got}; without a handle it must be bool {wanted}, see get_dispatch_layout"
    assert mask is not None
    yield from _place_problem("is_token_in_rank", mask, call.x)
    if world.strict and not mask.is_contiguous():
        yield f"is_token_in_rank has strides {list(mask.stride())}; DeepEP needs it contiguous (strict=True)"
    counts = call.num_tokens_per_rank
    if not isinstance(counts, Tensor) or counts.dtype != torch.int32 or counts.shape != (world.num_ranks,):
        got = describe(counts) if isinstance(counts, Tensor) else repr(counts)
        yield f"num_tokens_per_rank is {got}; without a handle it must be int32 [{world.num_ranks}]"
    assert counts is not None
    if counts.tolist() != mask.sum(0).tolist():
        yield (
            f"num_tokens_per_rank is {counts.tolist()} where is_token_in_rank has {mask.sum(0).tolist()}; "
            "they must come from the same get_dispatch_layout"
        )
    if world.strict and world.num_nodes > 1 and call.num_tokens_per_rdma_rank is None:
        yield "num_tokens_per_rdma_rank is None; DeepEP needs it where there are several nodes (strict=True)"


def _count_problem(call: DispatchArguments, world: World) -> Iterator[str]:
    counts, R = call.num_tokens_per_expert, world.num_ranks
    is_right = isinstance(counts, Tensor) and counts.dtype == torch.int32 and counts.dim() == 1
    if not is_right or counts is None or counts.numel() == 0 or counts.numel() % R != 0:
        got = describe(counts) if isinstance(counts, Tensor) else repr(counts)
        yield f"num_tokens_per_expert is {got}; without a handle it must be int32 [a multiple of {R} ranks]"
    assert counts is not None
    if world.strict and counts.numel() // R > MAX_LOCAL_EXPERTS:
        local = counts.numel() // R
        yield f"num_tokens_per_expert has {local} experts per rank; DeepEP takes {MAX_LOCAL_EXPERTS} (strict=True)"


def _topk_problem(call: DispatchArguments) -> Iterator[str]:
    choices, weights = call.topk_idx, call.topk_weights
    if (choices is None) != (weights is None):
        missing, given = ("topk_weights", "topk_idx") if weights is None else ("topk_idx", "topk_weights")
        yield f"{missing} is None and {given} is not; give both or neither"
    if choices is None:
        return
    assert call.num_tokens_per_expert is not None and weights is not None, "checked before"
    for name, tensor in (("topk_idx", choices), ("topk_weights", weights)):
        yield from _place_problem(name, tensor, call.x)
    yield from choices_problem(choices, call.num_tokens_per_expert.numel())
    if choices.shape[0] != call.x.shape[0]:
        yield f"topk_idx has {choices.shape[0]} tokens and x {call.x.shape[0]}; they must be equal"
    yield from weights_problem(weights, tuple(choices.shape))


def _place_problem(name: str, tensor: Any, x: Tensor) -> Iterator[str]:
    if isinstance(tensor, Tensor) and tensor.device != x.device:
        yield f"{name} is {describe(tensor)}; it must be on {x.device}, as x"


def weights_problem(weights: Any, shape: tuple[int, ...]) -> Iterator[str]:
    """Check weights that must have `shape`."""
    if not isinstance(weights, Tensor) or weights.dtype != torch.float32 or tuple(weights.shape) != shape:
        got = describe(weights) if isinstance(weights, Tensor) else repr(weights)
        yield f"topk_weights is {got}; it must be float32 {list(shape)}"


def cached_problem(topk_idx: Any, topk_weights: Any, x: Tensor, handle: handles.Handle) -> Iterator[str]:
    """Check what is special about a dispatch with a handle; x and the handle have been checked."""
    if topk_idx is not None or topk_weights is not None:
        yield "topk_idx and topk_weights must be None with a handle: a cached dispatch sends x alone"
    num_tokens = handles.num_tokens(handle)
    if x.shape[0] != num_tokens:
        yield f"x has {x.shape[0]} tokens; the handle is of a dispatch of {num_tokens}"


def combine_problem(
    x: Tensor, handle: handles.Handle, topk_weights: Any, biases: tuple[Any, ...]
) -> Iterator[str]:
    """Check a combine; x and the handle have been checked."""
    num_rows = handles.num_rows(handle)
    if x.shape[0] != num_rows:
        yield f"x has {x.shape[0]} rows; the handle is of a dispatch that returned {num_rows}"
    if topk_weights is not None:
        is_matrix = isinstance(topk_weights, Tensor) and topk_weights.dim() == 2
        yield from weights_problem(topk_weights, (num_rows, topk_weights.shape[1] if is_matrix else 0))
        yield from _place_problem("topk_weights", topk_weights, x)
    if len(biases) > 2:
        yield f"bias is a tuple of {len(biases)}; it must be a tensor or a tuple of two"
    wanted = (handles.num_tokens(handle), x.shape[1])
    for bias in biases:
        if not isinstance(bias, Tensor) or bias.dtype != x.dtype or tuple(bias.shape) != wanted:
            got = describe(bias) if isinstance(bias, Tensor) else repr(bias)
            yield f"bias is {got}; it must be {x.dtype} {list(wanted)}"
        yield from _place_problem("bias", bias, x)


def config_problem(config: Any) -> Iterator[str]:
    """Check a config, which has no effect."""
    if config is not None and not isinstance(config, Config):
        yield f"config is {type(config).__module__}.{type(config).__name__}; it must be a dispatch.Config or None"


def stream_problem(
    previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool, world: World
) -> Iterator[str]:
    """Check the arguments about streams, which change nothing on the CPU."""
    if previous_event is not None and not hasattr(previous_event, "current_stream_wait"):
        yield f"previous_event is {type(previous_event).__name__}; it must be an EventOverlap or None"
    if world.strict and allocate_on_comm_stream and not (previous_event is not None and async_finish):
        yield "allocate_on_comm_stream is True; DeepEP needs previous_event and async_finish=True with it (strict=True)"


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


def elastic_dispatch_problem(call: DispatchCall, world: World) -> Iterator[str]:
    """Check a dispatch; with a handle, its choices are the handle's."""
    yield from x_problem(call.x, call.scales, world)
    yield from _elastic_scales_problem(call, world)
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


def elastic_cached_problem(call: DispatchCall, handle: Any, given: dict[str, Any]) -> Iterator[str]:
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


def elastic_combine_problem(call: CombineCall, handle: EPHandle, world: World) -> Iterator[str]:
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


def _elastic_scales_problem(call: DispatchCall, world: World) -> Iterator[str]:
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
