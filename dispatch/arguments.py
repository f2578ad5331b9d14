"""Check the arguments of calls. A check returns a sentence with the argument, its value and the rule, or None.

Checks run in every layer, so each reads a tensor only a few times. All of them run before anything is sent. The caller
refuses a bad call on every rank (`Wire.refuse`), because ranks with good arguments wait for this rank's messages.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dispatch.dispatched import DispatchHandle
from dispatch.mode import Mode

CPU = torch.device("cpu")


def dispatch_problem(x_TH: Tensor, slots_TK: Tensor, mode: Mode, device: torch.device = CPU) -> str | None:
    """Check a dispatch, except the values of `slots_TK`, which are checked once while they are counted."""
    x_shape, slots_shape = x_TH.shape, slots_TK.shape
    if x_TH.ndim != 2 or not x_TH.dtype.is_floating_point or x_TH.device != device:
        return (
            f"x_TH is {describe(x_TH)}; it must be a 2-dimensional floating tensor on {name_device(device)}"
        )
    if slots_TK.ndim != 2 or slots_TK.dtype != torch.int64 or slots_TK.device != device:
        where = name_device(device)
        return f"slots_TK is {describe(slots_TK)}; it must be a 2-dimensional int64 tensor on {where}"
    (T, H), (num_tokens, K) = x_shape, slots_shape
    if num_tokens != T:
        return f"slots_TK has {num_tokens} tokens and x_TH {T}; they must be equal"
    if H < 1 or K < 1:
        return f"H is {H} and K is {K}; both must be at least 1"
    if mode.capacity:
        return _low_latency_problem(x_TH, slots_TK, mode.capacity)
    return f"the mode's capacity is {mode.capacity}; it must be 0 or more" if mode.capacity < 0 else None


def dtype_problem(name: str, tensor: Tensor, dtypes: Iterable[torch.dtype]) -> str | None:
    """Check that the device has kernels for a tensor's type."""
    dtypes = list(dtypes)
    if tensor.dtype in dtypes:
        return None
    return f"{name} is {describe(tensor)}; the kernels of this device support {', '.join(map(str, dtypes))}"


def _low_latency_problem(x_TH: Tensor, slots_TK: Tensor, capacity: int) -> str | None:
    if capacity < 0 or x_TH.shape[0] > capacity:
        return f"x_TH has {x_TH.shape[0]} tokens; low-latency mode allows at most {capacity} here"
    for name, tensor in (("x_TH", x_TH), ("slots_TK", slots_TK)):
        if not tensor.is_contiguous():
            strides = list(tensor.stride())
            return f"{name} has strides {strides}; low-latency mode makes no copies, so it must be contiguous"
    return None


def slot_problem(slots_TK: Tensor, index: int, num_ranks: int, slots_per_rank: int) -> str:
    """Describe the slot that is out of range. `index` is its flat index in `slots_TK`."""
    token, choice = divmod(index, slots_TK.shape[1])
    num_slots = num_ranks * slots_per_rank
    return (
        f"slots_TK[{token}, {choice}] is {int(slots_TK[token, choice])}; it must be -1 or in [0, {num_slots}) "
        f"({num_ranks} ranks with {slots_per_rank} slots each)"
    )


def answers_problem(
    y_PH: Tensor,
    weights_TK: Tensor,
    out_TH: Tensor | None,
    handle: DispatchHandle,
    *,
    last_call: int,
    device: torch.device = CPU,
) -> str | None:
    """Check a combine against its dispatch, which must be the last one."""
    if handle.call != last_call:
        return "dispatched is not from the last dispatch; its buffers have been overwritten"
    pairs_shape, tokens_shape = (handle.num_pairs, handle.hidden), (handle.num_tokens, handle.num_choices)
    dtype = handle.dtype
    if y_PH.shape != pairs_shape or y_PH.dtype != dtype or y_PH.device != device:
        return f"y_PH is {describe(y_PH)}; it must be {dtype} {list(pairs_shape)} on {name_device(device)}"
    if weights_TK.shape != tokens_shape or not weights_TK.dtype.is_floating_point:
        return f"weights_TK is {describe(weights_TK)}; it must be a floating tensor {list(tokens_shape)}"
    if weights_TK.device != device:
        return f"weights_TK is {describe(weights_TK)}; it must be on {name_device(device)}"
    if out_TH is None:
        return None
    out_shape = (tokens_shape[0], pairs_shape[1])
    if out_TH.shape != out_shape or out_TH.dtype != dtype or out_TH.device != device:
        return f"out is {describe(out_TH)}; it must be {dtype} {list(out_shape)} on {name_device(device)}"
    return (
        None if out_TH.is_contiguous() else f"out has strides {list(out_TH.stride())}; it must be contiguous"
    )


def describe(tensor: Tensor) -> str:
    """Return a tensor's type, shape and device as text."""
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def name_device(device: torch.device) -> str:
    """Return a device's name as text."""
    return "the CPU" if device.type == "cpu" else str(device)
