"""What is wrong with a low-latency call's arguments, as a sentence that names the argument, the value and the rule.

Shapes and types are looked at, never contents (those are looked at once, by the compiled passes), so that a check
costs microseconds and could be made while a CUDA graph is captured. DeepEP's hardware limits apply only in `strict`
mode; their source is csrc/legacy/buffer.hpp and csrc/kernels/legacy/internode_ll.cu of DeepEP 2.1.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dispatch.arguments import describe, dtype_problem, name_device
from dispatch.low_latency.calls import LowLatencyShape

STRICT_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
STRICT_FP8_MULTIPLE = 512
STRICT_DISPATCH_CHOICES = 11
STRICT_COMBINE_CHOICES = 32
STRICT_MAX_TOKENS = 511  # queue pairs are 1,024 deep and hold 2 * (M + 1)
STRICT_ROWS_MULTIPLE = 4  # TMA
_CHOICE_TYPES = (torch.int64, torch.int32)


def first(problems: Iterator[str]) -> str:
    """Return the first sentence, or nothing. Later checks rely on earlier ones."""
    return next(problems, "")


def dispatch_problems(
    x: Any,
    topk_idx: Any,
    max_tokens: int,
    num_experts: int,
    num_ranks: int,
    *,
    strict: bool,
    device: torch.device,
) -> Iterator[str]:
    """Check what a dispatch sends."""
    yield from _matrix_problems("x", x, device)
    if not x.is_floating_point() or x.element_size() == 1:
        yield f"x is {describe(x)}; it must be of a floating type of two bytes or more"
    yield from _matrix_problems("topk_idx", topk_idx, device)
    if topk_idx.dtype not in _CHOICE_TYPES:
        yield f"topk_idx is {describe(topk_idx)}; it must be int64 (or int32)"
    if topk_idx.shape[0] != x.shape[0]:
        yield f"topk_idx has {topk_idx.shape[0]} tokens and x {x.shape[0]}; they must be equal"
    if x.shape[1] < 1 or topk_idx.shape[1] < 1:
        yield f"x has hidden size {x.shape[1]} and topk_idx {topk_idx.shape[1]} choices; both must be at least 1"
    if max_tokens < 1 or x.shape[0] > max_tokens:
        yield (
            f"x has {x.shape[0]} tokens where num_max_dispatch_tokens_per_rank is {max_tokens}; it must be at least 1 "
            "and not below the tokens"
        )
    if num_experts < 1 or num_experts % num_ranks != 0:
        yield f"num_experts is {num_experts}; it must be a positive multiple of the {num_ranks} ranks"
    if strict:
        yield from _strict_problems(x, topk_idx.shape[1], STRICT_DISPATCH_CHOICES, max_tokens, num_ranks)


def format_problems(
    hidden: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool, *, strict: bool
) -> Iterator[str]:
    """Check in which form rows travel."""
    if use_ue8m0 and not (use_fp8 and round_scale):
        yield (
            f"use_ue8m0 is True with use_fp8={use_fp8} and round_scale={round_scale}; it needs both: exponents alone "
            "can only say powers of two"
        )
    if strict and use_fp8 and hidden % STRICT_FP8_MULTIPLE != 0:
        yield f"x has hidden size {hidden}; DeepEP needs a multiple of {STRICT_FP8_MULTIPLE} for FP8 (strict=True)"


def finish_problems(async_finish: bool, return_recv_hook: bool) -> Iterator[str]:
    """Check when the caller wants the result."""
    if async_finish and return_recv_hook:
        yield "async_finish and return_recv_hook are both True; a result is waited for by an event or by a hook"


def dtype_problems(x: Tensor, dtypes: tuple[torch.dtype, ...] | None) -> Iterator[str]:
    """Check that the exchange can move this type; it has been checked to be a floating one."""
    if dtypes is not None and (problem := dtype_problem("x", x, dtypes)):
        yield problem


def stats_problems(
    name: str, stats: Any, dtype: torch.dtype, *shapes: tuple[int, ...], device: torch.device
) -> Iterator[str]:
    """Check a tensor of statistics that the call adds to; None asks for none."""
    if stats is None:
        return
    wanted = " or ".join(str(list(shape)) for shape in shapes)
    if not isinstance(stats, Tensor):
        yield f"{name} is {type(stats).__name__}; it must be a {dtype} tensor {wanted}, or None"
    if stats.dtype != dtype or tuple(stats.shape) not in shapes or stats.device != device:
        yield f"{name} is {describe(stats)}; it must be {dtype} {wanted} on {name_device(device)}"
    if not stats.is_contiguous():
        yield f"{name} has strides {list(stats.stride())}; it must be contiguous"


def handle_problems(handle: Any) -> Iterator[str]:
    """Check that a handle is one of ours, as far as its form goes."""
    rule = "it must be what low_latency_dispatch returned: (src_info, layout_range, max_tokens, hidden, num_experts)"
    if not isinstance(handle, tuple | list) or len(handle) != 5:
        yield f"handle is {type(handle).__name__}; {rule}"
    if not isinstance(handle[0], Tensor) or not isinstance(handle[1], Tensor):
        yield f"handle begins with {type(handle[0]).__name__} and {type(handle[1]).__name__}; {rule}"


def combine_problems(
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    shape: LowLatencyShape,
    num_tokens: int,
    *,
    strict: bool,
    device: torch.device,
) -> Iterator[str]:
    """Check what a combine sends, against the dispatch that it answers."""
    wanted = (shape.experts_per_rank, shape.rows_per_expert, shape.hidden)
    if (
        not isinstance(x, Tensor)
        or tuple(x.shape) != wanted
        or not x.is_floating_point()
        or x.element_size() == 1
    ):
        got = describe(x) if isinstance(x, Tensor) else repr(x)
        yield f"x is {got}; it must be {list(wanted)} of a floating type of two bytes or more"
    yield from _placed_problems("x", x, device)
    for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        yield from _matrix_problems(name, tensor, device)
        if tuple(tensor.shape) != (num_tokens, shape.choices):
            yield f"{name} is {describe(tensor)}; the dispatch of this handle had {[num_tokens, shape.choices]}"
    if topk_idx.dtype not in _CHOICE_TYPES:
        yield f"topk_idx is {describe(topk_idx)}; it must be int64 (or int32)"
    if topk_weights.dtype != torch.float32:
        yield f"topk_weights is {describe(topk_weights)}; it must be float32"
    if strict:
        ranks = shape.world_size
        yield from _strict_problems(x, shape.choices, STRICT_COMBINE_CHOICES, shape.max_tokens, ranks)


def out_problems(
    out: Any, num_tokens: int, hidden: int, dtype: torch.dtype, *, device: torch.device
) -> Iterator[str]:
    """Check where the caller wants the result; None leaves that to us."""
    if out is None:
        return
    yield from _matrix_problems("out", out, device)
    if tuple(out.shape) != (num_tokens, hidden) or out.dtype != dtype:
        yield f"out is {describe(out)}; it must be {dtype} {[num_tokens, hidden]}, as x"


def _matrix_problems(name: str, tensor: Any, device: torch.device) -> Iterator[str]:
    if not isinstance(tensor, Tensor):
        yield f"{name} is {type(tensor).__name__}; it must be a tensor"
    if tensor.dim() != 2:
        yield f"{name} is {describe(tensor)}; it must have two dimensions"
    yield from _placed_problems(name, tensor, device)


def _placed_problems(name: str, tensor: Tensor, device: torch.device) -> Iterator[str]:
    if tensor.device != device:
        yield f"{name} is on {tensor.device}; this buffer's ranks are on {name_device(device)}"
    if not tensor.is_contiguous():
        yield f"{name} has strides {list(tensor.stride())}; low-latency mode copies nothing and needs it contiguous"


def _strict_problems(
    x: Tensor, choices: int, max_choices: int, max_tokens: int, num_ranks: int
) -> Iterator[str]:
    if x.dtype != torch.bfloat16:
        yield f"x is {x.dtype}; DeepEP takes bfloat16 (strict=True)"
    if x.shape[-1] not in STRICT_HIDDEN:
        yield f"x has hidden size {x.shape[-1]}; DeepEP has kernels for {list(STRICT_HIDDEN)} (strict=True)"
    if choices > max_choices:
        yield f"topk_idx has {choices} choices; DeepEP takes at most {max_choices} (strict=True)"
    if max_tokens > STRICT_MAX_TOKENS:
        yield (
            f"num_max_dispatch_tokens_per_rank is {max_tokens}; DeepEP takes at most {STRICT_MAX_TOKENS} (strict=True)"
        )
    if num_ranks * max_tokens % STRICT_ROWS_MULTIPLE != 0:
        yield (
            f"num_max_dispatch_tokens_per_rank is {max_tokens} on {num_ranks} ranks; DeepEP needs their product to be "
            f"a multiple of {STRICT_ROWS_MULTIPLE} (strict=True)"
        )
