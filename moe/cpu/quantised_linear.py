"""Linear layers and grouped expert GEMMs on CPU over weights that stay FP8 or MXFP4 in memory.

The same tasks as `cpu_linear`'s and the same bits as its kernels give for the dequantised weight; the tiles are in
`attention.cpu_quantised_tiles`, which describes the panels. Kernels of their own, so that a model without quantised
weights compiles nothing of this.

Legend: T tokens (rows), K input features, N output features, P pairs (row, expert choice), S slots, B blocks of K.
"""

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from attention.cpu_quantised_tiles import MAX_BLOCK, rows_times_panel_fp8, rows_times_panel_mxfp4
from attention.cpu_tiles import LANES, serial_and_parallel
from moe.cpu.linear import ROW_BLOCK, pack, pays, unpack
from moe.load.quantised_weight import QuantisedWeight, inputs_per_code


def pack_codes(weight: QuantisedWeight) -> Tensor:
    """Lay out codes in panels: [..., panels, K, 16] float8_e4m3fn, or [..., panels, K / 2, 16] uint8."""
    return pack(weight.codes.view(torch.uint8)).view(weight.codes.dtype)


def pack_scales(weight: QuantisedWeight) -> Tensor:
    """Lay out scales: [..., panels, B] float32 for FP8, [..., panels, B, 16] uint8 for MXFP4.

    Raises:
        QuantisedWeightError: FP8 scales that change within 16 rows.
    """
    if weight.codes.dtype == torch.uint8:
        return pack(weight.scales)
    return weight.block_scales(LANES)


def unpack_quantised(codes: Tensor, scales: Tensor, n: int, block: int) -> QuantisedWeight:
    """Undo `pack_codes` and `pack_scales`, for N = n; a copy."""
    plain = unpack(codes.view(torch.uint8), n).view(codes.dtype)
    if codes.dtype == torch.uint8:
        return QuantisedWeight(codes=plain, scales=unpack(scales, n), block=block)
    rows = scales.repeat_interleave(LANES, dim=-2)[..., :n, :]
    return QuantisedWeight(codes=plain, scales=rows, block=block)


@njit(nogil=True, inline="always")
def _panel(x, x_stride, codes, scales, k, block, out, out_stride, rows, is_fp8):  # type: ignore[no-untyped-def]
    if is_fp8:
        rows_times_panel_fp8(x, x_stride, codes, scales, k, block, out, out_stride, rows)
    else:
        rows_times_panel_mxfp4(x, x_stride, codes, scales, k, block, out, out_stride, rows)


@njit(nogil=True, inline="always")
def _panel_bytes(k, block, is_fp8):  # type: ignore[no-untyped-def]
    # Of codes and of scales.
    blocks = (k + block - 1) // block
    return (k * LANES, blocks * 4) if is_fp8 else (k // 2 * LANES, blocks * LANES)


def _quantised(x, x_stride, codes, scales, k, block, panels, out, rows, is_fp8):  # type: ignore[no-untyped-def]
    code_bytes, scale_bytes = _panel_bytes(k, block, is_fp8)
    out_stride = panels * LANES * 4
    for start in range(0, rows, ROW_BLOCK):
        count = min(ROW_BLOCK, rows - start)
        for panel in prange(panels):
            _panel(
                x + start * x_stride,
                x_stride,
                codes + panel * code_bytes,
                scales + panel * scale_bytes,
                k,
                block,
                out + start * out_stride + panel * LANES * 4,
                out_stride,
                count,
                is_fp8,
            )


def _grouped_quantised(x, codes_S, scales_S, slot_offsets, k, block, panels, out, is_fp8, shares):  # type: ignore[no-untyped-def]
    # Tasks as in `cpu_linear`: a share of a slot's panels.
    num_slots = slot_offsets.shape[0] - 1
    code_bytes, scale_bytes = _panel_bytes(k, block, is_fp8)
    out_stride = panels * LANES * 4
    for task in prange(shares * num_slots):
        share, slot = task // num_slots, task % num_slots
        begin, rows = slot_offsets[slot], slot_offsets[slot + 1] - slot_offsets[slot]
        if rows > 0:
            for panel in range(share * panels // shares, (share + 1) * panels // shares):
                _panel(
                    x + begin * k * 4,
                    k * 4,
                    codes_S[slot] + panel * code_bytes,
                    scales_S[slot] + panel * scale_bytes,
                    k,
                    block,
                    out + begin * out_stride + panel * LANES * 4,
                    out_stride,
                    rows,
                    is_fp8,
                )


_serial, _parallel = serial_and_parallel(_quantised)
_grouped_serial, _grouped_parallel = serial_and_parallel(_grouped_quantised)


def quantised_linear(
    x_TK: Tensor, codes: Tensor, scales: Tensor, block: int, out_TN: Tensor, *, parallel: bool
) -> None:
    """Write `x @ weight.T` into `out`.

    Args:
        x_TK: [T, K] float32; rows may be strided, columns not.
        codes: from `pack_codes`. scales: from `pack_scales`. block: inputs under one scale.
        out_TN: [T, panels * 16] float32 contiguous.
        parallel: use all of this process's threads.
    """
    panels, k = codes.shape[0], x_TK.shape[1]
    assert codes.shape[1] * inputs_per_code(codes.dtype) == k and x_TK.stride(1) == 1
    assert block <= MAX_BLOCK and out_TN.stride(0) == panels * LANES
    kernel = _parallel if parallel and pays(x_TK.shape[0], panels * LANES * k, 1) else _serial
    kernel(
        x_TK.data_ptr(),
        x_TK.stride(0) * 4,
        codes.data_ptr(),
        scales.data_ptr(),
        k,
        block,
        panels,
        out_TN.data_ptr(),
        x_TK.shape[0],
        codes.dtype is torch.float8_e4m3fn,
    )


def grouped_quantised_linear(
    x_PK: Tensor,
    codes: Tensor,
    code_address_S: np.ndarray,
    scale_address_S: np.ndarray,
    slot_offsets: Tensor,
    *,
    block: int,
    parallel: bool,
) -> Tensor:
    """Apply every slot's weight to its own rows.

    Args:
        x_PK: [P, K] float32 contiguous, rows sorted by slot.
        codes: of any one slot, which tells shape and dtype.
        code_address_S, scale_address_S: [S] int64, where each slot's codes and scales are.
        slot_offsets: [S + 1] int64; rows [offsets[s], offsets[s + 1]) belong to slot s.
        block: inputs under one scale.
        parallel: use all of this process's threads.

    Returns:
        [P, panels * 16] float32, new.
    """
    panels, k, slots = codes.shape[0], x_PK.shape[1], len(code_address_S)
    assert codes.shape[1] * inputs_per_code(codes.dtype) == k and block <= MAX_BLOCK
    out_PN = torch.empty(x_PK.shape[0], panels * LANES)
    is_worth_it = parallel and pays(x_PK.shape[0], panels * LANES * k, slots)
    kernel = _grouped_parallel if is_worth_it else _grouped_serial
    kernel(
        x_PK.data_ptr(),
        code_address_S,
        scale_address_S,
        slot_offsets.numpy(),
        k,
        block,
        panels,
        out_PN.data_ptr(),
        codes.dtype is torch.float8_e4m3fn,
        numba.get_num_threads() if is_worth_it else 1,
    )
    return out_PN
