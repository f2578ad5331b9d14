"""Recurrences on GPUs, as functions for mixers: twins of those for the CPU. The kernels are in `attention.recurrences.gpu_kernels`.

The launches of a step that only decodes depend only on its padded size, so a CUDA graph can replay them.

Legend: P rows of the step, padding included, C channels, H heads, K key dim, V value dim, D head dim, N state dim, Z state
slots, G groups.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from attention.recurrences.gpu_chunks import walk_chunks
from attention.recurrences.gpu_kernels import convolve_rows, pass_time, walk_channels, walk_tokens
from attention.recurrences.mixers import CONVOLUTION, DELTA, LIGHTNING, MAMBA, MAMBA2, MixerCall, Recurrence

_CHANNELS = 128  # channels per program
_STATE_VALUES = 4096  # values of a program's part of a state: 32 registers in each of its threads
_WARPS, _CHUNK_WARPS = 4, 8
_LEAST_SIDE = 16  # smallest side of matrices to multiply


def _rows(x: Tensor) -> Tensor:
    """Return rows with contiguous values: [P, ...] as [P, width], a view if possible."""
    rows = x.reshape(x.shape[0], -1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _floats(*vectors: Tensor | None) -> list[Tensor | None]:
    return [None if each is None else each.float().contiguous() for each in vectors]


def _columns(dim: int, width: int) -> int:
    """Return the number of columns of a program if the state has `dim` rows."""
    most = max(16, _STATE_VALUES // int(triton.next_power_of_2(dim)))
    return min(most, int(triton.next_power_of_2(width)))


def convolve(
    call: MixerCall,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_options: Any,
) -> Tensor:
    """Convolve every sequence's channels with the last inputs of that sequence.

    Args:
        hidden_states: [1, C, P]. weight: [C, taps]. bias: [C].
        activation: silu, swish or None.

    Returns:
        [1, C, P], a view of [P, C]; rows of padding are finite.
    """
    step, tails = call.pages.step.on_device, call.pages.tails[call.layer]
    C, taps = weight.shape
    if "taps" not in call.kept:
        call.kept["taps"], call.kept["bias"] = _floats(weight.t(), bias)
    x_PC = _rows(hidden_states[0].t())
    out_PC = x_PC.new_empty(x_PC.shape)
    tile = min(_CHANNELS, triton.next_power_of_2(C))
    convolve_rows[(len(x_PC), triton.cdiv(C, tile))](
        x_PC, call.kept["taps"], call.kept["bias"], tails, step.state_before_P, step.state_after_P, step.row_before_P,
        out_PC, x_PC.stride(0), TAPS=taps, C=C, TILE=tile, HAS_BIAS=bias is not None, HAS_SILU=activation is not None,
        num_warps=_WARPS,
    )  # fmt: skip
    return out_PC.t()[None]


def delta_rule(
    call: MixerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_options: Any,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule: S = exp(g) S; S += k (beta (v - k S)); out = q S.

    Args:
        query, key: [1, P, key heads, K]. value: [1, P, H, V].
        g: [1, P, H], or [1, P, H, K]. beta: [1, P, H].
        use_qk_l2norm_in_kernel: Normalise queries and keys to length one first.

    Returns:
        [1, P, H, V], rows of padding zero; and the states of all slots, [Z, H, K, V].
    """
    out = _walk(
        call, query, key, value, g[0].float().contiguous(), beta[0].float().contiguous(), scale=key.shape[3] ** -0.5,
        has_unit_length=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, call.pages.states[call.layer]


def decaying_sum(call: MixerCall, query: Tensor, key: Tensor, value: Tensor, slope_H: Tensor) -> Tensor:
    """Run lightning attention's recurrence: S = exp(-slope) S + k v; out = q S.

    Args:
        query, key: [1, P, H, K]. value: [1, P, H, V].

    Returns:
        [1, P, H, V], rows of padding zero.
    """
    decay_PH = (-slope_H.float()).expand(key.shape[1:3]).contiguous()
    return _walk(call, query, key, value, decay_PH, torch.ones_like(decay_PH), scale=1.0, is_added=True)


def _walk(
    call: MixerCall, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, *, scale: float,
    has_unit_length: bool = False, is_added: bool = False, skip_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run `decay` [P, H] or [P, H, K], `rate` [P, H] and `skip_H` through the kernels (see `walk_chunks`)."""
    at, states = call.pages.step.on_device, call.pages.states[call.layer]
    key_heads, (_, H, K, V) = key.shape[2], states.shape
    q, k, v = (_rows(rows[0]) for rows in (query, key, value))
    out_PHV = value.new_zeros(value.shape[1:])
    strides = q.stride(0), k.stride(0), v.stride(0), scale
    constants = {
        "KEY_HEADS": key_heads, "H": H, "K": K, "V": V, "DECAY_DIM": 1 if decay.dim() == 2 else K,
        "HAS_UNIT_LENGTH": has_unit_length, "IS_ADDED": is_added, "HAS_SKIP": skip_H is not None,
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


def scan_heads(
    call: MixerCall,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **_options: Any,
) -> Any:
    """Run Mamba-2's scan: S = exp(dt A) S + dt x B; out = S C + D x.

    Args:
        hidden_states: [1, P, H, D]. dt: [1, P, H]. A, D, dt_bias: [H]. B, C: [1, P, G, N].

    Returns:
        [1, P, H, D], rows of padding zero; with `return_final_states` also the states of all slots, [Z, H, N, D].
    """
    rates, skips, biases = _floats(A, D, dt_bias)
    time_PH = _rows(dt[0])
    P, H = time_PH.shape
    passed_PH, decay_PH = time_PH.new_empty(2, P, H, dtype=torch.float32)
    pass_time[(P,)](
        time_PH, rates, biases, passed_PH, decay_PH, time_PH.stride(0), *map(float, dt_limit), H=H,
        H_PAD=triton.next_power_of_2(H), HAS_BIAS=dt_bias is not None, HAS_SOFTPLUS=dt_softplus, num_warps=_WARPS,
    )  # fmt: skip
    out = _walk(call, C, B, hidden_states, decay_PH, passed_PH, scale=1.0, is_added=True, skip_H=skips)
    return (out, call.pages.states[call.layer]) if return_final_states else out


def scan_channels(
    call: MixerCall,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_options: Any,
) -> Any:
    """Run Mamba's selective scan: S = exp(dt A) S + dt B x; out = (S C + D x) silu(z).

    Args:
        hidden_states, dt, z: [1, C, P]. A: [C, N]. B, C: [1, N, P]. D, delta_bias: [C].

    Returns:
        [1, C, P], a view of [P, C], rows of padding zero; with `return_last_state` also the states of all slots,
        [Z, N, C].
    """
    step, states = call.pages.step.on_device, call.pages.states[call.layer]
    channels, N = A.shape
    x, time, b, c = (_rows(rows[0].t()) for rows in (hidden_states, dt, B, C))
    gates = None if z is None else _rows(z[0].t())
    rates, skips, biases = _floats(A, D, delta_bias)
    out_PC = x.new_zeros(x.shape)
    tile = min(_columns(N, channels), _CHANNELS)
    for start_S in (step.walk_start_W, step.chunk_start_C):  # prompts are walked row by row as well
        if num_sequences := len(start_S) - 1:
            walk_channels[(num_sequences, triton.cdiv(channels, tile))](
                x, time, b, c, gates, rates, skips, biases, states, step.state_before_P, step.state_after_P, start_S, out_PC,
                x.stride(0), time.stride(0), b.stride(0), c.stride(0), 0 if gates is None else gates.stride(0), C=channels,
                N=N, N_PAD=triton.next_power_of_2(N), TILE=tile, HAS_SKIP=D is not None, HAS_BIAS=delta_bias is not None,
                HAS_SOFTPLUS=delta_softplus, HAS_GATES=gates is not None, num_warps=_WARPS,
            )  # fmt: skip
    out = out_PC.t()[None]
    return (out, states) if return_last_state else out


RECURRENCES: dict[str, Recurrence] = {
    CONVOLUTION: convolve,
    DELTA: delta_rule,
    LIGHTNING: decaying_sum,
    MAMBA2: scan_heads,
    MAMBA: scan_channels,
}
