"""Linear layers and grouped expert GEMMs on CPU: one parallel region each, and bits that depend on the row alone.

A weight [N, K] is packed once, at load, into panels `[ceil(N / 16), K, 16]` (`pack`); the tiles that read them
are in `attention.cpu_tiles`. bfloat16 weights stay bfloat16 in memory and are widened in registers: half the
bytes per decoded token and, since activations are float32, the very bits that float32 weights would give.
This file knows pointers and shapes, not modules; `moe.cpu.packed_weight` puts it under `torch.nn.functional.linear`.

Legend: T tokens (rows), K input features, N output features, P pairs (row, expert choice), S slots.
"""

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from attention.cpu_tiles import (
    LANES,
    rows_times_panel_bf16,
    rows_times_panel_f32,
    serial_and_parallel,
    silu_times,
)

PARALLEL_NS = 200_000  # less than this of one thread's work is not shared: a sleeping thread wakes in 50 us
SILU_PARALLEL = 1 << 17  # values; likewise
ROW_BLOCK = 96  # rows per task: with K = 1024 they are 384 KiB of activations, which stay in L2


def pack(weight_NK: Tensor) -> Tensor:
    """Lay out a weight in panels.

    Args:
        weight_NK: [..., N, K], float32 or bfloat16, any strides.

    Returns:
        [..., ceil(N / 16), K, 16] of the same dtype, contiguous; the columns past N are zero.
    """
    *lead, n, k = weight_NK.shape
    panels = -(-n // LANES)
    if n % LANES:
        padded = weight_NK.new_zeros(*lead, panels * LANES, k)
        padded[..., :n, :] = weight_NK
        weight_NK = padded
    return weight_NK.reshape(*lead, panels, LANES, k).transpose(-1, -2).contiguous()


def unpack(packed: Tensor, n: int) -> Tensor:
    """Undo `pack`: [..., ceil(n / 16), K, 16] to [..., n, K], a copy."""
    *lead, panels, k, lanes = packed.shape
    return packed.transpose(-1, -2).reshape(*lead, panels * lanes, k)[..., :n, :].contiguous()


@njit(nogil=True, inline="always")
def _panel(x, x_stride, w, k, out, out_stride, rows, bf16):  # type: ignore[no-untyped-def]
    if bf16:
        rows_times_panel_bf16(x, x_stride, w, 2 * LANES, k, out, out_stride, rows)
    else:
        rows_times_panel_f32(x, x_stride, w, 4 * LANES, k, out, out_stride, rows)


def _linear(x, x_stride, w, k, panels, out, out_stride, rows, bf16):  # type: ignore[no-untyped-def]
    panel_bytes = k * LANES * (2 if bf16 else 4)
    for start in range(0, rows, ROW_BLOCK):
        count = min(ROW_BLOCK, rows - start)
        for panel in prange(panels):
            _panel(
                x + start * x_stride,
                x_stride,
                w + panel * panel_bytes,
                k,
                out + start * out_stride + panel * LANES * 4,
                out_stride,
                count,
                bf16,
            )


def _grouped(x, w_S, slot_offsets, k, panels, out, bf16, shares):  # type: ignore[no-untyped-def]
    # A task is one share of a slot's panels: contiguous memory, and every thread gets the same part of each slot.
    num_slots = slot_offsets.shape[0] - 1
    panel_bytes = k * LANES * (2 if bf16 else 4)
    out_stride = panels * LANES * 4
    for task in prange(shares * num_slots):
        share, slot = task // num_slots, task % num_slots
        begin, rows = slot_offsets[slot], slot_offsets[slot + 1] - slot_offsets[slot]
        if rows > 0:
            for panel in range(share * panels // shares, (share + 1) * panels // shares):
                weights = w_S[slot] + panel * panel_bytes
                result = out + begin * out_stride + panel * LANES * 4
                _panel(x + begin * k * 4, k * 4, weights, k, result, out_stride, rows, bf16)


def _silu_and_mul(gate_up, out, rows, dim):  # type: ignore[no-untyped-def]
    for row in prange(rows):
        for lane in range(0, dim, LANES):
            gate = gate_up + (row * 2 * dim + lane) * 4
            silu_times(gate, gate + dim * 4, out + (row * dim + lane) * 4)


_linear_serial, _linear_parallel = serial_and_parallel(_linear)
_grouped_serial, _grouped_parallel = serial_and_parallel(_grouped)
_silu_serial, _silu_parallel = serial_and_parallel(_silu_and_mul)


def pays(rows: int, weights: int, groups: int) -> bool:
    """Whether waking the other threads pays: for some 200 us of work on one, at 4 weights or 35 products a ns."""
    touched = weights * min(rows, groups)
    return max(touched / 4, rows * weights / 35) > PARALLEL_NS


def linear(x_TK: Tensor, packed: Tensor, out_TN: Tensor, *, parallel: bool) -> None:
    """Write `x @ weight.T` into `out`.

    Args:
        x_TK: [T, K] float32; rows may be strided, columns not.
        packed: [panels, K, 16] from `pack`.
        out_TN: [T, panels * 16] float32 contiguous, T or more rows.
        parallel: use all of this process's threads.
    """
    panels, k, _ = packed.shape
    assert x_TK.shape[1] == k and x_TK.stride(1) == 1 and out_TN.stride(0) == panels * LANES
    is_worth_it = parallel and pays(x_TK.shape[0], packed.numel(), 1)
    kernel = _linear_parallel if is_worth_it else _linear_serial
    kernel(
        x_TK.data_ptr(),
        x_TK.stride(0) * 4,
        packed.data_ptr(),
        k,
        panels,
        out_TN.data_ptr(),
        panels * LANES * 4,
        x_TK.shape[0],
        packed.dtype is torch.bfloat16,
    )


def grouped_linear(
    x_PK: Tensor, like: Tensor, address_S: np.ndarray, slot_offsets: Tensor, *, parallel: bool
) -> Tensor:
    """Apply every slot's weight to its own rows.

    Args:
        x_PK: [P, K] float32 contiguous, rows sorted by slot.
        like: [panels, K, 16] from `pack`, of any one slot, which tells shape and dtype.
        address_S: [S] int64, where each slot's panels are.
        slot_offsets: [S + 1] int64; rows [offsets[s], offsets[s + 1]) belong to slot s.
        parallel: use all of this process's threads.

    Returns:
        [P, panels * 16] float32, new.
    """
    panels, k, _ = like.shape
    out_PN = torch.empty(x_PK.shape[0], panels * LANES)
    is_worth_it = parallel and pays(x_PK.shape[0], like.numel(), len(address_S))
    kernel = _grouped_parallel if is_worth_it else _grouped_serial
    kernel(
        x_PK.data_ptr(),
        address_S,
        slot_offsets.numpy(),
        k,
        panels,
        out_PN.data_ptr(),
        like.dtype is torch.bfloat16,
        numba.get_num_threads() if is_worth_it else 1,
    )
    return out_PN


def silu_and_mul(gate_up_PN: Tensor, *, parallel: bool) -> Tensor:
    """Return `silu(gate) * up` for [P, 2 * I] = [gate | up] float32 contiguous, I a multiple of 16."""
    rows, double = gate_up_PN.shape
    out_PI = torch.empty(rows, double // 2)
    kernel = _silu_parallel if parallel and out_PI.numel() >= SILU_PARALLEL else _silu_serial
    kernel(gate_up_PN.data_ptr(), out_PI.data_ptr(), rows, double // 2)
    return out_PI
