"""CPU kernels of recurrences: they run token by token, so no bit depends on how a prompt was cut or on other rows.

A task is one head (or some channels) of one sequence. It reads the state before the sequence's first token of the step,
walks the tokens, and writes the state wherever the step needs one (`kvcache.step.StatePiece`). States are stored with the
vectorised dimension last. Sums over the other dimension are computed in one fixed order.

Sources: causal convolution of Mamba (Gu and Dao, 2023); gated delta rule (Yang et al., 2024) and its form with a decay per
channel (Kimi Delta Attention, 2025); selective scan (Mamba) and state space duality (Mamba-2, Dao and Gu, 2024).

Legend: T rows of the batch, C channels, H heads, K key dim, V value dim, P head dim, N state dim, Z state slots, G groups.
"""

import math

import numpy as np
from numba import njit

from attention.recurrences.mixers import ADDED, SCALED, UNIT_LENGTH
from dispatch.compiled.native import float_of, floats, words
from dispatch.compiled.team import Kernel

RECURRENCES_VERSION = 2
CHANNELS = 256  # channels per task of the convolution or of Mamba's scan


@njit(nogil=True, inline="always")
def _silu(value):  # type: ignore[no-untyped-def]
    return value / (np.float32(1.0) + np.float32(math.exp(-value)))


@njit(nogil=True, inline="always")
def _softplus(value):  # type: ignore[no-untyped-def]
    # Like torch's, with its threshold of 20.
    return value if value > np.float32(20.0) else np.float32(math.log1p(math.exp(value)))


@njit(nogil=True, inline="always")
def _begin(state, slots, stride, offset, slot, count):  # type: ignore[no-untyped-def]
    # Load a part of a slot's state, or zeros.
    if slot < 0:
        state[:] = np.float32(0.0)
    else:
        state[:] = floats(slots + slot * stride + offset * 4, count)


def _convolve(  # type: ignore[no-untyped-def]
    tile, x, x_stride, out, weight, bias, taps, channels, has_silu, tails, stride, pieces, piece_starts,
    query_starts, sequences_at,
):  # fmt: skip
    sequences = words(sequences_at, 1)[0]
    parts = (channels + CHANNELS - 1) // CHANNELS
    if tile < 0:
        return sequences * parts
    sequence, first = tile // parts, tile % parts * CHANNELS
    here = min(CHANNELS, channels - first)
    row = words(query_starts + sequence * 8, 1)[0]
    bounds = words(piece_starts + sequence * 8, 2)
    tail = np.zeros((taps, here), np.float32)  # a ring of the preceding inputs and the newest
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


def _delta(  # type: ignore[no-untyped-def]
    tile, query, query_stride, key, key_stride, value, value_stride, decay, beta, out, key_heads, heads, key_dim,
    value_dim, decay_dim, mode, states, stride, pieces, piece_starts, query_starts, sequences_at,
):  # fmt: skip
    sequences = words(sequences_at, 1)[0]
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


def _scan_heads(  # type: ignore[no-untyped-def]
    tile, x, x_stride, of_time, time_stride, b, b_stride, c, c_stride, a, d, bias, has_softplus, low_bits,
    high_bits, out, shape_at, states, stride, pieces, piece_starts, query_starts, sequences_at,
):  # fmt: skip
    low, high = float_of(low_bits), float_of(high_bits)
    shape = words(shape_at, 4)
    heads, head_dim, groups, state_dim = shape[0], shape[1], shape[2], shape[3]
    sequences = words(sequences_at, 1)[0]
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


def _scan_channels(  # type: ignore[no-untyped-def]
    tile, x, x_stride, of_time, b, b_stride, c, c_stride, a, d, gate, gate_stride, bias, has_softplus, out,
    channels, state_dim, states, stride, pieces, piece_starts, query_starts, sequences_at,
):  # fmt: skip
    sequences = words(sequences_at, 1)[0]
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
