"""Rules for arguments of DeepEP's interfaces, each defined once. `checks` lists the rules of every call.

A rule checks one argument, or two that must fit. It returns a sentence with the argument, its value and the
requirement, or None. `strict` mode also refuses what WideEP supports but DeepEP's hardware does not, for code that must
run there. Its limits are those of csrc/legacy and csrc/kernels of DeepEP 2.1.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dispatch.arguments import describe, name_device
from dispatch.faces.config import Config

Problem = str | None
Problems = Iterator[Problem]

MAX_TOKENS = 511  # for low-latency calls: queue pairs are 1,024 deep and hold 2 * (M + 1)
VECTOR_BYTES = 16  # unit in which rows are copied
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
ROWS_MULTIPLE = 4  # TMA
STRICT_CONTIGUOUS = "DeepEP needs it contiguous (strict=True)"


def first_problem(*lists: Problems) -> Problem:
    """Return the first problem, or None. Later rules are not run, so a rule may rely on those before it."""
    return next((problem for rules in lists for problem in rules if problem), None)


def is_tensor(
    name: str, value: Any, dtypes: Sequence[torch.dtype], *shape: int | str, must: str = "it must be"
) -> Problem:
    """Require a tensor of one of the types and of a shape. A word in the shape allows any size."""
    has_shape = isinstance(value, Tensor) and len(shape) == value.dim()
    if (
        has_shape
        and value.dtype in dtypes
        and all(isinstance(want, str) or want == size for want, size in zip(shape, value.shape, strict=True))
    ):
        return None
    return f"{name} is {show(value)}; {must} {' or '.join(map(str, dtypes))} [{', '.join(map(str, shape))}]"


def is_beside(name: str, value: Any, x: Tensor) -> Problem:
    """Require a tensor to be on the device of x."""
    if not isinstance(value, Tensor) or value.device == x.device:
        return None
    return f"{name} is {describe(value)}; it must be on {x.device}, as x"


def is_on(name: str, value: Tensor, device: torch.device) -> Problem:
    """Require a tensor to be on the device of low-latency calls."""
    if value.device == device:
        return None
    return f"{name} is on {value.device}; this buffer's ranks use {name_device(device)}"


def is_contiguous(name: str, value: Tensor, why: str) -> Problem:
    """Require a contiguous tensor."""
    return None if value.is_contiguous() else f"{name} has strides {list(value.stride())}; {why}"


def is_positive(name: str, value: int) -> Problem:
    """Require a number of 1 or more."""
    return None if value >= 1 else f"{name} is {value}; it must be at least 1"


def experts_divide(num_experts: Any, num_ranks: int) -> Problem:
    """Require the same number of experts on every rank."""
    if isinstance(num_experts, int) and num_experts >= 1 and num_experts % num_ranks == 0:
        return None
    return f"num_experts is {num_experts}; it must be a positive multiple of the {num_ranks} ranks"


def are_rows(x: Any, *, other: str = "") -> Problem:
    """Require a matrix with data. `other` names further types that are allowed."""
    if not isinstance(x, Tensor):
        return f"x is {type(x).__name__}; it must be a tensor{other}"
    if x.dim() != 2 or x.device.type == "meta":
        return f"x is {describe(x)}; it must be [num_tokens, hidden]"
    return None


def scales_fit(x: Tensor, scales: Any) -> Problem:
    """Require scales to come with values of one byte, with one row of scales per row of values."""
    if scales is None:
        return (
            None
            if x.is_floating_point()
            else f"x is {describe(x)}; without scales it must be of a floating type"
        )
    if x.element_size() != 1:
        return f"x is {describe(x)}; with scales it must be of a type of one byte, such as float8_e4m3fn"
    if not isinstance(scales, Tensor) or scales.dtype not in (torch.float32, torch.int32):
        return f"x's scales are {show(scales)}; they must be float32, or int32 with four exponents each"
    if scales.dim() not in (1, 2) or scales.shape[0] != x.shape[0] or scales.device != x.device:
        return (
            f"x's scales are {describe(scales)}; they must have one row for each of x's {x.shape[0]} tokens"
        )
    return None


def has_wide_type(x: Tensor) -> Problem:
    """Require a floating type that low-latency rows may have."""
    if x.is_floating_point() and x.element_size() > 1:
        return None
    return f"x is {describe(x)}; it must be of a floating type of two bytes or more"


def choices_exist(topk_idx: Tensor, num_experts: int) -> Problem:
    """Require every choice to be an existing expert or -1."""
    bad = ((topk_idx < -1) | (topk_idx >= num_experts)).flatten().nonzero()
    return name_choice(topk_idx, int(bad[0]), existing(num_experts)) if bad.numel() else None


def existing(num_experts: int) -> str:
    """Describe the allowed choices."""
    return f"-1 or in [0, {num_experts})"


def name_choice(topk_idx: Tensor, index: int, allowed: str) -> str:
    """Describe a choice that is not allowed. `index` is its flat index in `topk_idx`."""
    token, choice = divmod(index, topk_idx.shape[1])
    return f"topk_idx[{token}, {choice}] is {int(topk_idx[token, choice])}; it must be {allowed}"


def choices_differ(topk_idx: Tensor) -> Problem:
    """Require the experts of a token to differ: worst-case shapes depend on it, as in DeepEP."""
    ordered = topk_idx.sort(dim=1).values
    is_repeated = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if not is_repeated.any():
        return None
    token = int(is_repeated.nonzero()[0])
    return f"topk_idx[{token}] is {topk_idx[token].tolist()}; a token's experts must differ"


def choices_match(topk_idx: Tensor, x: Tensor) -> Problem:
    """Require a row of choices for each token."""
    if topk_idx.shape[0] == x.shape[0]:
        return None
    return f"topk_idx has {topk_idx.shape[0]} tokens and x {x.shape[0]}; they must be equal"


def tokens_fit(x: Tensor, max_tokens: int) -> Problem:
    """Require no more tokens than the ranks agreed on."""
    if 1 <= max_tokens >= x.shape[0]:
        return None
    return f"x has {x.shape[0]} tokens; num_max_tokens_per_rank is {max_tokens}, it must be at least 1 and at least that number"


def rows_are_the_handles(x: Tensor, num_rows: int, kind: str = "") -> Problem:
    """Require as many rows as the dispatch returned."""
    if x.shape[0] == num_rows:
        return None
    return f"x has {x.shape[0]} rows; the handle's dispatch returned {num_rows}{kind}"


def biases_fit(biases: tuple[Any, ...], x: Tensor, num_tokens: int) -> Problems:
    """Require at most two biases in the shape of the result."""
    if len(biases) > 2:
        yield f"bias is a tuple of {len(biases)}; it must be a tensor or a tuple of two"
    for bias in biases:
        yield is_tensor("bias", bias, (x.dtype,), num_tokens, x.shape[1])
        yield is_beside("bias", bias, x)


def counters_fit(
    name: str, value: Any, dtype: torch.dtype, *shapes: tuple[int, ...], device: torch.device
) -> Problem:
    """Require None, or a tensor for statistics that a call adds to."""
    if value is None:
        return None
    is_right = isinstance(value, Tensor) and value.dtype == dtype and tuple(value.shape) in shapes
    if not is_right or value.device != device:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        return f"{name} is {show(value)}; it must be {dtype} {wanted} on {name_device(device)}, or None"
    return is_contiguous(name, value, "it must be contiguous")


def is_config(config: Any) -> Problem:
    """Require a config or None. A config has no effect."""
    if config is None or isinstance(config, Config):
        return None
    return (
        f"config is {type(config).__module__}.{type(config).__name__}; it must be a dispatch.Config or None"
    )


def forks_ask_nothing(method: str, forks: Mapping[str, Any]) -> Problem:
    """Require arguments that only DeepEP's forks have to be None or False."""
    asked = sorted(name for name, value in forks.items() if value is not None and value is not False)
    if not asked:
        return None
    return f"{method} got {', '.join(asked)}; DeepEP's V1 interface has no such argument: remove it"


def strict_rows_fit(x: Tensor, *, has_scales: bool = False) -> Problems:
    """Require rows that DeepEP's normal kernels support."""
    if not has_scales and x.dtype != torch.bfloat16:
        yield f"x is {x.dtype}; DeepEP supports bfloat16, or float8_e4m3fn with scales (strict=True)"
    yield is_contiguous("x", x, STRICT_CONTIGUOUS)
    row = x.shape[1] * x.element_size()
    if row % VECTOR_BYTES != 0:
        yield f"x has rows of {row} bytes; DeepEP needs a multiple of {VECTOR_BYTES} (strict=True)"


def strict_low_latency_fits(
    x: Tensor, num_choices: int, most_choices: int, max_tokens: int, num_ranks: int
) -> Problems:
    """Require rows that DeepEP's low-latency kernels support."""
    if x.dtype != torch.bfloat16:
        yield f"x is {x.dtype}; DeepEP supports bfloat16 (strict=True)"
    if x.shape[-1] not in LOW_LATENCY_HIDDEN:
        yield f"x has hidden size {x.shape[-1]}; DeepEP has kernels for {list(LOW_LATENCY_HIDDEN)} (strict=True)"
    yield strict_most("topk_idx has", num_choices, "choices", most_choices)
    yield strict_most("num_max_dispatch_tokens_per_rank is", max_tokens, "", MAX_TOKENS)
    if num_ranks * max_tokens % ROWS_MULTIPLE != 0:
        yield (
            f"num_max_dispatch_tokens_per_rank is {max_tokens} on {num_ranks} ranks; DeepEP needs their product to be "
            f"a multiple of {ROWS_MULTIPLE} (strict=True)"
        )


def strict_most(subject: str, value: int, unit: str, limit: int) -> Problem:
    """Require a value of at most DeepEP's limit."""
    if value <= limit:
        return None
    return f"{' '.join([subject, str(value), unit]).strip()}; DeepEP supports at most {limit} (strict=True)"


def show(value: Any) -> str:
    """Return a value as text for a message."""
    return describe(value) if isinstance(value, Tensor) else repr(value)
