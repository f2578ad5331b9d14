"""Recurrences on CPU, as functions for mixers and as rows of programs. The kernels are in `attention.recurrences.cpu_kernels`.

Legend: T rows of the batch, C channels, H heads, K key dim, V value dim, P head dim, N state dim, Z state slots, G groups.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.recurrences.cpu_kernels import (
    ADDED,
    CONVOLVE,
    DELTA_RULE,
    SCALED,
    SCAN_CHANNELS,
    SCAN_HEADS,
    UNIT_LENGTH,
)
from attention.recurrences.mixers import CONVOLUTION, DELTA, LIGHTNING, MAMBA, MAMBA2, MixerCall, Recurrence
from dispatch.native import bits_of
from dispatch.team import program_of, run
from kvcache.step import Step

_VALUES_PER_NS = 4  # approximate rate of one thread, in values of the state


def _of_step(slots: Tensor, step: Step) -> list[int]:
    """Return the words that all recurrences read: the location of the states, and the batch."""
    stride = slots.stride(0) * 4
    return [
        slots.data_ptr(), stride, step.piece_P3.data_ptr(), step.piece_start_S.data_ptr(), step.query_start_S.data_ptr(),
        step.facts[4:].data_ptr(),
    ]  # fmt: skip


def _rows(x: Tensor, width: int) -> Tensor:
    """Return rows with contiguous values: [T, width], a view if possible."""
    rows = x.reshape(x.shape[0], width) if x.dim() > 2 else x
    return rows if rows.stride(1) == 1 and rows.dtype is torch.float32 else rows.float().contiguous()


class Side(NamedTuple):
    """Location of queries, keys or values: address, bytes from one row to the next, number of heads."""

    address: int
    stride: int
    heads: int


def convolve_row(
    x: int, x_stride: int, out: int, taps_KC: Tensor, bias_C: Tensor | None, tails: Tensor, step: Step, *, has_silu: bool
) -> list[int]:  # fmt: skip
    """Return one row of a program that runs `convolve`.

    Args:
        x: Address of rows of C float32, `x_stride` bytes from one to the next. out: address of [T, C] float32.
        taps_KC: [taps, C] float32.
    """
    taps, channels = taps_KC.shape
    bias = 0 if bias_C is None else bias_C.data_ptr()
    return CONVOLVE.row(
        x, x_stride, out, taps_KC.data_ptr(), bias, taps, channels, int(has_silu), *_of_step(tails, step)
    )


def delta_row(
    query: Side, key: Side, value: Side, decay: int, rate: int, states: Tensor, out: int, step: Step, *, decay_dim: int,
    mode: int,
) -> list[int]:  # fmt: skip
    """Return one row of a program that runs `delta_rule`.

    Args:
        decay: Address of [T, H, decay_dim] float32. rate: address of [T, H].
        states: [Z, H, K, V]. out: address of [T, H, V].
        mode: SCALED, UNIT_LENGTH or ADDED.
    """
    _, heads, key_dim, value_dim = states.shape
    assert value.heads == heads, f"values of {value.heads} heads, states of {heads}"
    return DELTA_RULE.row(
        query.address, query.stride, key.address, key.stride, value.address, value.stride, decay, rate, out, key.heads,
        heads, key_dim, value_dim, decay_dim, mode, *_of_step(states, step),
    )  # fmt: skip


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
        hidden_states: [1, C, T]. weight: [C, taps]. bias: [C].
        activation: silu, swish or None.

    Returns:
        [1, C, T], a view of [T, C]; rows of padding are zero.
    """
    step, tails = call.pages.step, call.pages.tails[call.layer]
    channels, taps = weight.shape
    if "taps" not in call.kept:
        call.kept["taps"] = weight.float().t().contiguous()
        call.kept["bias"] = None if bias is None else bias.float().contiguous()
    weight_KC, bias_C = call.kept["taps"], call.kept["bias"]
    x_TC = _rows(hidden_states[0].t(), channels)
    out_TC = torch.zeros(x_TC.shape[0], channels)
    row = convolve_row(
        x_TC.data_ptr(), x_TC.stride(0) * 4, out_TC.data_ptr(), weight_KC, bias_C, tails, step,
        has_silu=activation is not None,
    )  # fmt: skip
    run(program_of([row]), step.team, step.num_tokens * channels * taps)
    return out_TC.t()[None]


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
        query, key: [1, T, key heads, K]. value: [1, T, H, V].
        g: [1, T, H], or [1, T, H, K]. beta: [1, T, H].
        use_qk_l2norm_in_kernel: Normalise queries and keys to length one first.

    Returns:
        [1, T, H, V], rows of padding zero; and the states of all slots, [Z, H, K, V].
    """
    step, states = call.pages.step, call.pages.states[call.layer]
    tokens, key_dim = key.shape[1], key.shape[3]
    heads, value_dim = value.shape[2:]
    q, k, v = (_rows(rows[0], rows.shape[2] * rows.shape[3]) for rows in (query, key, value))
    decay_dim = 1 if g.dim() == 3 else key_dim
    decay, rate = _rows(g[0], heads * decay_dim).contiguous(), beta[0].float().contiguous()
    out_THV = torch.zeros(tokens, heads, value_dim)
    sides = [Side(rows.data_ptr(), rows.stride(0) * 4, rows.shape[1] // dim)
             for rows, dim in ((q, key_dim), (k, key_dim), (v, value_dim))]  # fmt: skip
    row = delta_row(
        sides[0], sides[1], sides[2], decay.data_ptr(), rate.data_ptr(), states, out_THV.data_ptr(), step,
        decay_dim=decay_dim, mode=UNIT_LENGTH if use_qk_l2norm_in_kernel else SCALED,
    )  # fmt: skip
    run(program_of([row]), step.team, step.num_tokens * heads * key_dim * value_dim // _VALUES_PER_NS)
    return out_THV[None], states


def decaying_sum(call: MixerCall, query: Tensor, key: Tensor, value: Tensor, slope_H: Tensor) -> Tensor:
    """Run lightning attention's recurrence: S = exp(-slope) S + k v; out = q S.

    Args:
        query, key: [1, T, H, K]. value: [1, T, H, V].

    Returns:
        [1, T, H, V], rows of padding zero.
    """
    step, states = call.pages.step, call.pages.states[call.layer]
    tokens, heads, key_dim = key.shape[1:]
    value_dim = value.shape[3]
    sides = [_rows(rows[0], heads * rows.shape[3]).contiguous() for rows in (query, key, value)]
    decay = (-slope_H.float()).expand(tokens, heads).contiguous()
    rate, out_THV = torch.ones(tokens, heads), torch.zeros(tokens, heads, value_dim)
    query_side, key_side, value_side = (Side(rows.data_ptr(), rows.stride(0) * 4, heads) for rows in sides)
    row = delta_row(
        query_side, key_side, value_side, decay.data_ptr(), rate.data_ptr(), states, out_THV.data_ptr(), step,
        decay_dim=1, mode=ADDED,
    )  # fmt: skip
    run(program_of([row]), step.team, step.num_tokens * heads * key_dim * value_dim // _VALUES_PER_NS)
    return out_THV[None]


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
        hidden_states: [1, T, H, P]. dt: [1, T, H]. A, D, dt_bias: [H]. B, C: [1, T, G, N].

    Returns:
        [1, T, H, P], rows of padding zero; with `return_final_states` also the states of all slots, [Z, H, N, P].
    """
    step, states = call.pages.step, call.pages.states[call.layer]
    tokens, heads, head_dim = hidden_states.shape[1:]
    groups, state_dim = B.shape[2:]
    x, b, c = (_rows(rows[0], rows.shape[2] * rows.shape[3]) for rows in (hidden_states, B, C))
    time = _rows(dt[0], heads)
    vectors = [None if each is None else each.float().contiguous() for each in (A, D, dt_bias)]
    shape = torch.tensor([heads, head_dim, groups, state_dim])
    out_THP = torch.zeros(tokens, heads, head_dim)
    row = SCAN_HEADS.row(
        x.data_ptr(), x.stride(0) * 4, time.data_ptr(), time.stride(0) * 4, b.data_ptr(), b.stride(0) * 4, c.data_ptr(),
        c.stride(0) * 4, *(0 if each is None else each.data_ptr() for each in vectors), int(dt_softplus),
        bits_of(dt_limit[0]), bits_of(dt_limit[1]), out_THP.data_ptr(), shape.data_ptr(), *_of_step(states, step),
    )  # fmt: skip
    run(program_of([row]), step.team, step.num_tokens * heads * head_dim * state_dim // _VALUES_PER_NS)
    return (out_THP[None], states) if return_final_states else out_THP[None]


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
        hidden_states, dt, z: [1, C, T]. A: [C, N]. B, C: [1, N, T]. D, delta_bias: [C].

    Returns:
        [1, C, T], a view of [T, C], rows of padding zero; with `return_last_state` also the states of all slots,
        [Z, N, C].
    """
    step, states = call.pages.step, call.pages.states[call.layer]
    channels, state_dim = A.shape
    if "rates" not in call.kept:
        call.kept["rates"] = A.float().t().contiguous()
    x, b, c = _rows(hidden_states[0].t(), channels), _rows(B[0].t(), state_dim), _rows(C[0].t(), state_dim)
    time = dt[0].t().float().contiguous()
    gate = None if z is None else _rows(z[0].t(), channels)
    skip, bias = (None if each is None else each.float().contiguous() for each in (D, delta_bias))
    out_TC = torch.zeros(x.shape[0], channels)
    row = SCAN_CHANNELS.row(
        x.data_ptr(), x.stride(0) * 4, time.data_ptr(), b.data_ptr(), b.stride(0) * 4, c.data_ptr(), c.stride(0) * 4,
        call.kept["rates"].data_ptr(), 0 if skip is None else skip.data_ptr(),
        *((0, 0) if gate is None else (gate.data_ptr(), gate.stride(0) * 4)), 0 if bias is None else bias.data_ptr(),
        int(delta_softplus), out_TC.data_ptr(), channels, state_dim, *_of_step(states, step),
    )  # fmt: skip
    run(program_of([row]), step.team, step.num_tokens * channels * state_dim)
    out = out_TC.t()[None]
    return (out, states) if return_last_state else out


RECURRENCES: dict[str, Recurrence] = {
    CONVOLUTION: convolve,
    DELTA: delta_rule,
    LIGHTNING: decaying_sum,
    MAMBA2: scan_heads,
    MAMBA: scan_channels,
}
