"""Recurrences on CPU: token by token, so that no bit depends on how a prompt was cut or on what runs beside it.

A task is one head (or some channels) of one sequence: it reads the state before the sequence's first token of the
step, walks the tokens, and writes the state wherever the step wants one (`kvcache.step.StatePiece`). States are kept
with the dimension that vectors run along last. Sums over the other one are made in one fixed order.

Sources: causal convolution of Mamba (Gu and Dao, 2023); gated delta rule (Yang et al., 2024) and its form with a decay per
channel (Kimi Delta Attention, 2025); selective scan (Mamba) and state space duality (Mamba-2, Dao and Gu, 2024).

Legend: T rows of the batch, C channels, H heads, K key dim, V value dim, P head dim, N state dim, Z state slots, G groups.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from attention.recurrent import CONVOLUTION, DELTA, LIGHTNING, MAMBA, MAMBA2, Call, Recurrence
from dispatch.native import bits_of, float_of, floats, words
from dispatch.team import WORDS, Kernel, program_of, run
from kvcache.step import Step

RECURRENCES_VERSION = 2
# What the delta rule does: queries times K^-0.5; queries and keys of length one before; neither, and values are added whole.
SCALED, UNIT_LENGTH, ADDED = 0, 1, 2
CHANNELS = 256  # of a task of the convolution or of Mamba's scan
_VALUES_PER_NS = 4  # of state, of one thread, about
_PIECE_WORDS = 3


@njit(nogil=True, inline="always")
def _silu(value):  # type: ignore[no-untyped-def]
    return value / (np.float32(1.0) + np.float32(math.exp(-value)))


@njit(nogil=True, inline="always")
def _softplus(value):  # type: ignore[no-untyped-def]
    # As torch's, whose threshold is 20.
    return value if value > np.float32(20.0) else np.float32(math.log1p(math.exp(value)))


@njit(nogil=True, inline="always")
def _begin(state, slots, stride, offset, slot, count):  # type: ignore[no-untyped-def]
    # Take a part of a slot's state, or zeros.
    if slot < 0:
        state[:] = np.float32(0.0)
    else:
        state[:] = floats(slots + slot * stride + offset * 4, count)


def _convolve(at, tile):  # type: ignore[no-untyped-def]
    w = words(at, WORDS)
    x, x_stride, out, weight, bias, taps, channels, has_silu = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
    tails, stride, pieces, piece_starts, query_starts, sequences = (
        w[8],
        w[9],
        w[10],
        w[11],
        w[12],
        words(w[13], 1)[0],
    )
    parts = (channels + CHANNELS - 1) // CHANNELS
    if tile < 0:
        return sequences * parts
    sequence, first = tile // parts, tile % parts * CHANNELS
    here = min(CHANNELS, channels - first)
    row = words(query_starts + sequence * 8, 1)[0]
    bounds = words(piece_starts + sequence * 8, 2)
    tail = np.zeros((taps, here), np.float32)  # a ring: the inputs before, and the newest
    sums = np.empty(here, np.float32)
    newest = 0
    for index in range(bounds[0], bounds[1]):
        piece = words(pieces + index * 24, 3)
        if index == bounds[0]:
            for tap in range(taps - 1):
                _begin(tail[tap], tails, stride, tap * channels + first, piece[0], here)
            newest = taps - 1
        for _ in range(piece[2]):
            tail[newest] = floats(x + row * x_stride + first * 4, here)
            if bias != 0:
                sums[:] = floats(bias + first * 4, here)
            else:
                sums[:] = np.float32(0.0)
            for tap in range(taps):
                factors, inputs = (
                    floats(weight + (tap * channels + first) * 4, here),
                    tail[(newest + 1 + tap) % taps],
                )
                for channel in range(here):
                    sums[channel] += factors[channel] * inputs[channel]
            to = floats(out + (row * channels + first) * 4, here)
            if has_silu != 0:
                for channel in range(here):
                    to[channel] = _silu(sums[channel])
            else:
                to[:] = sums
            newest = (newest + 1) % taps
            row += 1
        if piece[1] >= 0:
            for tap in range(taps - 1):
                to = floats(tails + piece[1] * stride + (tap * channels + first) * 4, here)
                to[:] = tail[(newest + 1 + tap) % taps]
    return 0


def _delta(at, tile):  # type: ignore[no-untyped-def]
    w = words(at, WORDS)
    query, query_stride, key, key_stride, value, value_stride = w[0], w[1], w[2], w[3], w[4], w[5]
    decay, beta, out, key_heads, heads = w[6], w[7], w[8], w[9], w[10]
    key_dim, value_dim, decay_dim, mode = w[11], w[12], w[13], w[14]
    states, stride, pieces, piece_starts, query_starts, sequences = (
        w[15],
        w[16],
        w[17],
        w[18],
        w[19],
        words(w[20], 1)[0],
    )
    if tile < 0:
        return sequences * heads
    sequence, head = tile // heads, tile % heads
    key_head = head // (heads // key_heads)
    scale = np.float32(1.0 / math.sqrt(key_dim))
    row = words(query_starts + sequence * 8, 1)[0]
    bounds = words(piece_starts + sequence * 8, 2)
    size = key_dim * value_dim
    state = np.empty((key_dim, value_dim), np.float32)
    flat = state.reshape(size)
    q, k = np.empty(key_dim, np.float32), np.empty(key_dim, np.float32)
    seen, change = np.empty(value_dim, np.float32), np.empty(value_dim, np.float32)
    for index in range(bounds[0], bounds[1]):
        piece = words(pieces + index * 24, 3)
        if index == bounds[0]:
            _begin(flat, states, stride, head * size, piece[0], size)
        for _ in range(piece[2]):
            q[:] = floats(query + row * query_stride + key_head * key_dim * 4, key_dim)
            k[:] = floats(key + row * key_stride + key_head * key_dim * 4, key_dim)
            if mode == UNIT_LENGTH:
                of_query, of_key = np.float32(0.0), np.float32(0.0)
                for dim in range(key_dim):
                    of_query += q[dim] * q[dim]
                    of_key += k[dim] * k[dim]
                query_scale = np.float32(1.0 / math.sqrt(of_query + np.float32(1e-6))) * scale
                key_scale = np.float32(1.0 / math.sqrt(of_key + np.float32(1e-6)))
                for dim in range(key_dim):
                    q[dim] *= query_scale
                    k[dim] *= key_scale
            elif mode == SCALED:
                for dim in range(key_dim):
                    q[dim] *= scale
            v = floats(value + row * value_stride + head * value_dim * 4, value_dim)
            decays = floats(decay + (row * heads + head) * decay_dim * 4, decay_dim)
            factor = np.float32(math.exp(decays[0]))
            seen[:] = np.float32(0.0)
            for dim in range(key_dim):
                if decay_dim > 1:
                    factor = np.float32(math.exp(decays[dim]))
                line, of_key = state[dim], k[dim]
                for column in range(value_dim):
                    line[column] *= factor
                    seen[column] += line[column] * of_key
            if mode == ADDED:
                seen[:] = np.float32(0.0)
            rate = floats(beta + (row * heads + head) * 4, 1)[0]
            for column in range(value_dim):
                change[column] = (v[column] - seen[column]) * rate
            to = floats(out + (row * heads + head) * value_dim * 4, value_dim)
            to[:] = np.float32(0.0)
            for dim in range(key_dim):
                line, of_key, of_query = state[dim], k[dim], q[dim]
                for column in range(value_dim):
                    line[column] += of_key * change[column]
                    to[column] += line[column] * of_query
            row += 1
        if piece[1] >= 0:
            floats(states + piece[1] * stride + head * size * 4, size)[:] = flat
    return 0


def _scan_heads(at, tile):  # type: ignore[no-untyped-def]
    w = words(at, WORDS)
    x, x_stride, of_time, time_stride, b, b_stride, c, c_stride = (
        w[0],
        w[1],
        w[2],
        w[3],
        w[4],
        w[5],
        w[6],
        w[7],
    )
    a, d, bias, has_softplus, low, high, out = (
        w[8],
        w[9],
        w[10],
        w[11],
        float_of(w[12]),
        float_of(w[13]),
        w[14],
    )
    shape = words(w[15], 4)
    heads, head_dim, groups, state_dim = shape[0], shape[1], shape[2], shape[3]
    states, stride, pieces, piece_starts, query_starts, sequences = (
        w[16],
        w[17],
        w[18],
        w[19],
        w[20],
        words(w[21], 1)[0],
    )
    if tile < 0:
        return sequences * heads
    sequence, head = tile // heads, tile % heads
    group = head // (heads // groups)
    row = words(query_starts + sequence * 8, 1)[0]
    bounds = words(piece_starts + sequence * 8, 2)
    size = state_dim * head_dim
    state = np.empty((state_dim, head_dim), np.float32)
    flat = state.reshape(size)
    added = np.empty(head_dim, np.float32)
    rate = floats(a + head * 4, 1)[0]
    for index in range(bounds[0], bounds[1]):
        piece = words(pieces + index * 24, 3)
        if index == bounds[0]:
            _begin(flat, states, stride, head * size, piece[0], size)
        for _ in range(piece[2]):
            time = floats(of_time + row * time_stride + head * 4, 1)[0]
            if bias != 0:
                time += floats(bias + head * 4, 1)[0]
            if has_softplus != 0:
                time = _softplus(time)
            time = min(max(time, low), high)
            factor = np.float32(math.exp(rate * time))
            inputs = floats(x + row * x_stride + head * head_dim * 4, head_dim)
            to = floats(out + (row * heads + head) * head_dim * 4, head_dim)
            for dim in range(head_dim):
                added[dim] = inputs[dim] * time
            to[:] = np.float32(0.0)
            writes = floats(b + row * b_stride + group * state_dim * 4, state_dim)
            reads = floats(c + row * c_stride + group * state_dim * 4, state_dim)
            for place in range(state_dim):
                line, write, read = state[place], writes[place], reads[place]
                for dim in range(head_dim):
                    line[dim] = line[dim] * factor + added[dim] * write
                    to[dim] += line[dim] * read
            if d != 0:
                past = floats(d + head * 4, 1)[0]
                for dim in range(head_dim):
                    to[dim] += past * inputs[dim]
            row += 1
        if piece[1] >= 0:
            floats(states + piece[1] * stride + head * size * 4, size)[:] = flat
    return 0


def _scan_channels(at, tile):  # type: ignore[no-untyped-def]
    w = words(at, WORDS)
    x, x_stride, of_time, b, b_stride, c, c_stride = w[0], w[1], w[2], w[3], w[4], w[5], w[6]
    a, d, gate, gate_stride, bias, has_softplus, out = w[7], w[8], w[9], w[10], w[11], w[12], w[13]
    channels, state_dim = w[14], w[15]
    states, stride, pieces, piece_starts, query_starts, sequences = (
        w[16],
        w[17],
        w[18],
        w[19],
        w[20],
        words(w[21], 1)[0],
    )
    parts = (channels + CHANNELS - 1) // CHANNELS
    if tile < 0:
        return sequences * parts
    sequence, first = tile // parts, tile % parts * CHANNELS
    here = min(CHANNELS, channels - first)
    row = words(query_starts + sequence * 8, 1)[0]
    bounds = words(piece_starts + sequence * 8, 2)
    state = np.empty((state_dim, here), np.float32)
    time, added = np.empty(here, np.float32), np.empty(here, np.float32)
    for index in range(bounds[0], bounds[1]):
        piece = words(pieces + index * 24, 3)
        if index == bounds[0]:
            for place in range(state_dim):
                _begin(state[place], states, stride, place * channels + first, piece[0], here)
        for _ in range(piece[2]):
            inputs = floats(x + row * x_stride + first * 4, here)
            time[:] = floats(of_time + (row * channels + first) * 4, here)
            if bias != 0:
                biases = floats(bias + first * 4, here)
                for channel in range(here):
                    time[channel] += biases[channel]
            if has_softplus != 0:
                for channel in range(here):
                    time[channel] = _softplus(time[channel])
            for channel in range(here):
                added[channel] = time[channel] * inputs[channel]
            to = floats(out + (row * channels + first) * 4, here)
            to[:] = np.float32(0.0)
            writes, reads = floats(b + row * b_stride, state_dim), floats(c + row * c_stride, state_dim)
            for place in range(state_dim):
                line, write, read = state[place], writes[place], reads[place]
                rates = floats(a + (place * channels + first) * 4, here)
                for channel in range(here):
                    factor = np.float32(math.exp(rates[channel] * time[channel]))
                    line[channel] = line[channel] * factor + added[channel] * write
                    to[channel] += line[channel] * read
            if d != 0:
                past = floats(d + first * 4, here)
                for channel in range(here):
                    to[channel] += past[channel] * inputs[channel]
            if gate != 0:
                gates = floats(gate + row * gate_stride + first * 4, here)
                for channel in range(here):
                    to[channel] *= _silu(gates[channel])
            row += 1
        if piece[1] >= 0:
            for place in range(state_dim):
                to = floats(states + piece[1] * stride + (place * channels + first) * 4, here)
                to[:] = state[place]
    return 0


CONVOLVE = Kernel(_convolve, RECURRENCES_VERSION)
DELTA_RULE = Kernel(_delta, RECURRENCES_VERSION)
SCAN_HEADS = Kernel(_scan_heads, RECURRENCES_VERSION)
SCAN_CHANNELS = Kernel(_scan_channels, RECURRENCES_VERSION)
KERNELS = (CONVOLVE, DELTA_RULE, SCAN_HEADS, SCAN_CHANNELS)


def _of_step(slots: Tensor, step: Step) -> list[int]:
    """Words that all recurrences read: where states are, and the batch."""
    stride = slots.stride(0) * 4
    return [
        slots.data_ptr(), stride, step.piece_P3.data_ptr(), step.piece_start_S.data_ptr(), step.query_start_S.data_ptr(),
        step.facts[4:].data_ptr(),
    ]  # fmt: skip


def _rows(x: Tensor, width: int) -> Tensor:
    """Rows whose values lie side by side: [T, width], a view where that is possible."""
    rows = x.reshape(x.shape[0], width) if x.dim() > 2 else x
    return rows if rows.stride(1) == 1 and rows.dtype is torch.float32 else rows.float().contiguous()


class Side(NamedTuple):
    """Where one of queries, keys and values is: address, bytes from a row to the next, heads."""

    address: int
    stride: int
    heads: int


def convolve_row(
    x: int, x_stride: int, out: int, taps_KC: Tensor, bias_C: Tensor | None, tails: Tensor, step: Step, *, has_silu: bool
) -> list[int]:  # fmt: skip
    """One row of a program: see `convolve`.

    Args:
        x: address of rows of C float32, `x_stride` bytes from one to the next. out: of [T, C].
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
    """One row of a program: see `delta_rule`.

    Args:
        decay: address of [T, H, decay_dim] float32. rate: of [T, H].
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
    call: Call,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_options: Any,
) -> Tensor:
    """Convolve every sequence's channels with its own last inputs.

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
    call: Call,
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
        use_qk_l2norm_in_kernel: give queries and keys length one first.

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


def decaying_sum(call: Call, query: Tensor, key: Tensor, value: Tensor, slope_H: Tensor) -> Tensor:
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
    call: Call,
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
        [1, T, H, P], rows of padding zero; with `return_final_states` the states of all slots as well, [Z, H, N, P].
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
    call: Call,
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
        [1, C, T], a view of [T, C], rows of padding zero; with `return_last_state` the states of all slots as well,
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
