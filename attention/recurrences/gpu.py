"""Recurrences on GPUs, as functions for mixers: twins of those for the CPU. The kernels are in `attention.recurrences.gpu_kernels`.

The launches of a step that only decodes depend only on its padded size, so a CUDA graph can replay them.

Legend: P rows of the step, padding included, others as in `attention.recurrences.mixers`.
"""

import torch
import triton
from torch import Tensor

from attention.recurrences.gpu_chunks import walk_chunks
from attention.recurrences.gpu_kernels import convolve_rows, pass_time, walk_channels, walk_tokens
from attention.recurrences.mixers import (
    ADDED,
    UNIT_LENGTH,
    ChannelScan,
    Convolution,
    DeltaRule,
    HeadScan,
    MixerCall,
    Recurrences,
    floats_of,
    taps_of,
)

_CHANNELS = 128  # channels per program
_STATE_VALUES = 4096  # values of a program's part of a state: 32 registers in each of its threads
_WARPS, _CHUNK_WARPS = 4, 8
_LEAST_SIDE = 16  # smallest side of matrices to multiply


def _rows(x: Tensor) -> Tensor:
    """Return rows with contiguous values: [P, ...] as [P, width], a view if possible."""
    rows = x.reshape(x.shape[0], -1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _columns(dim: int, width: int) -> int:
    """Return the number of columns of a program if the state has `dim` rows."""
    most = max(16, _STATE_VALUES // int(triton.next_power_of_2(dim)))
    return min(most, int(triton.next_power_of_2(width)))


def convolve(call: MixerCall, convolution: Convolution) -> Tensor:
    """Run a convolution. The output is a view of [P, C]."""
    step, tails = call.pages.step.on_device, call.pages.tails[call.layer]
    C, taps = convolution.weight.shape
    weight_KC, bias_C = taps_of(call, convolution)
    x_PC = _rows(convolution.x[0].t())
    out_PC = x_PC.new_empty(x_PC.shape)
    tile = min(_CHANNELS, triton.next_power_of_2(C))
    convolve_rows[(len(x_PC), triton.cdiv(C, tile))](
        x_PC, weight_KC, bias_C, tails, step.state_before_P, step.state_after_P, step.row_before_P, out_PC, x_PC.stride(0),
        TAPS=taps, C=C, TILE=tile, HAS_BIAS=bias_C is not None, HAS_SILU=convolution.has_silu, num_warps=_WARPS,
    )  # fmt: skip
    return out_PC.t()[None]


def delta_rule(call: MixerCall, rule: DeltaRule, skip_H: Tensor | None = None) -> Tensor:
    """Run a delta rule and add `skip_H` times the values to its output (see `walk_chunks`). Rows of padding are zero."""
    at, states = call.pages.step.on_device, call.pages.states[call.layer]
    H, K, V = rule.state
    q, k, v = (_rows(rows[0]) for rows in (rule.query, rule.key, rule.value))
    decay, rate = rule.decay[0].float().contiguous(), rule.rate[0].float().contiguous()
    out_PHV = rule.value.new_zeros(rule.value.shape[1:])
    strides = q.stride(0), k.stride(0), v.stride(0), 1.0 if rule.mode == ADDED else K**-0.5
    constants = {
        "KEY_HEADS": rule.key.shape[2], "H": H, "K": K, "V": V, "DECAY_DIM": 1 if decay.dim() == 2 else K,
        "HAS_UNIT_LENGTH": rule.mode == UNIT_LENGTH, "IS_ADDED": rule.mode == ADDED, "HAS_SKIP": skip_H is not None,
    }  # fmt: skip
    if num_walked := len(at.walk_start_W) - 1:
        tile = _columns(K, V)
        walk_tokens[(num_walked, H, triton.cdiv(V, tile))](
            q, k, v, decay, rate, skip_H, states, at.state_before_P, at.state_after_P, at.walk_start_W, out_PHV, *strides,
            K_PAD=triton.next_power_of_2(K), TILE=tile, num_warps=_WARPS, **constants,
        )  # fmt: skip
    if num_in_chunks := len(at.chunk_start_C) - 1:
        walk_chunks[(num_in_chunks, H, triton.cdiv(V, _LEAST_SIDE))](
            q, k, v, decay, rate, skip_H, states, at.state_before_P, at.state_after_P, at.position_P, at.chunk_start_C,
            out_PHV, *strides, K_PAD=max(_LEAST_SIDE, triton.next_power_of_2(K)), TILE=_LEAST_SIDE, num_warps=_CHUNK_WARPS,
            num_stages=1, PRECISION="tf32x3" if v.dtype == torch.float32 else "tf32", **constants,
        )  # fmt: skip
    return out_PHV[None]


def scan_heads(call: MixerCall, scan: HeadScan) -> Tensor:
    """Run Mamba-2's scan. Rows of padding are zero."""
    rate_H, skip_H, bias_H = floats_of(scan.rate_H, scan.skip_H, scan.bias_H)
    time_PH = _rows(scan.dt[0])
    P, H = time_PH.shape
    passed_PH, decay_PH = time_PH.new_empty(2, P, H, dtype=torch.float32)
    pass_time[(P,)](
        time_PH, rate_H, bias_H, passed_PH, decay_PH, time_PH.stride(0), *map(float, scan.limits), H=H,
        H_PAD=triton.next_power_of_2(H), HAS_BIAS=bias_H is not None, HAS_SOFTPLUS=scan.has_softplus, num_warps=_WARPS,
    )  # fmt: skip
    return delta_rule(
        call, DeltaRule(scan.read, scan.write, scan.x, decay_PH[None], passed_PH[None], ADDED), skip_H
    )


def scan_channels(call: MixerCall, scan: ChannelScan) -> Tensor:
    """Run Mamba's selective scan. The output is a view of [P, C], rows of padding zero."""
    step, states = call.pages.step.on_device, call.pages.states[call.layer]
    channels, N = scan.rate_CN.shape
    x, time, b, c = (_rows(rows[0].t()) for rows in (scan.x, scan.dt, scan.write, scan.read))
    gates = None if scan.gate is None else _rows(scan.gate[0].t())
    rates, skips, biases = floats_of(scan.rate_CN, scan.skip_C, scan.bias_C)
    out_PC = x.new_zeros(x.shape)
    tile = min(_columns(N, channels), _CHANNELS)
    for start_S in (step.walk_start_W, step.chunk_start_C):  # prompts are walked row by row as well
        if num_sequences := len(start_S) - 1:
            walk_channels[(num_sequences, triton.cdiv(channels, tile))](
                x, time, b, c, gates, rates, skips, biases, states, step.state_before_P, step.state_after_P, start_S, out_PC,
                x.stride(0), time.stride(0), b.stride(0), c.stride(0), 0 if gates is None else gates.stride(0), C=channels,
                N=N, N_PAD=triton.next_power_of_2(N), TILE=tile, HAS_SKIP=skips is not None, HAS_BIAS=biases is not None,
                HAS_SOFTPLUS=scan.has_softplus, HAS_GATES=gates is not None, num_warps=_WARPS,
            )  # fmt: skip
    return out_PC.t()[None]


RECURRENCES: Recurrences = {
    Convolution: convolve,
    DeltaRule: delta_rule,
    HeadScan: scan_heads,
    ChannelScan: scan_channels,
}
