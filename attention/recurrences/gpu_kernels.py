# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""GPU kernels of recurrences: they run token by token, as on CPU, so no bit depends on cuts or on other rows.

A program has one head (or some channels) of one sequence, with some columns of its state in registers. It reads the state
before the sequence's first row, walks the rows, and stores the state after every row for which the step keeps one. A decode
is bound by the bytes of its state, read and written once. A prompt is a long walk over its tokens. If bits may depend on
cuts, prompts run chunk by chunk instead (`attention.recurrences.gpu_chunks`), except for Mamba: its state decays by channel
and state dimension, which no product of matrices can express.

Sources: as in `attention.recurrences.cpu_kernels`.

Legend: P rows, C channels, H heads, K key dim, V value dim, N state dim, TILE columns of a program.
"""

import triton
import triton.language as tl

from attention.gpu.pages import bound


@triton.jit
def silu(value):
    """Return value * sigmoid(value)."""
    return value / (1.0 + tl.exp(-value))


@triton.jit
def softplus(value):
    """Return log(1 + exp(value)), accurate to rounding even for small exp(value), with torch's threshold of 20."""
    grown = tl.exp(tl.minimum(value, 20.0))
    one_more = 1.0 + grown
    exact = tl.where(
        one_more == 1.0, grown, tl.log(one_more) * grown / tl.where(one_more == 1.0, 1.0, one_more - 1.0)
    )
    return tl.where(value > 20.0, value, exact)


@triton.jit
def pass_time(
    time, rates, biases, passed, decay, time_stride, low, high,
    H: tl.constexpr, H_PAD: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Run as program (row): make decays and rates of Mamba-2's time steps. `rates`, `biases` [H]; `passed`, `decay` [P, H]."""
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, H_PAD)
    is_head = head < H
    value = tl.load(time + row * time_stride + head, mask=is_head, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(biases + head, mask=is_head, other=0.0)
    if HAS_SOFTPLUS:
        value = softplus(value)
    value = tl.minimum(tl.maximum(value, low), high)
    tl.store(passed + row * H + head, value, mask=is_head)
    rate = tl.load(rates + head, mask=is_head, other=0.0)
    tl.store(decay + row * H + head, rate * value, mask=is_head)


@triton.jit
def own_rows(query_start, before, sequence):
    """Return a sequence's first row, its number of rows, and the slot of the state before them (-1 without one)."""
    first = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first
    return first, count.to(tl.int32), tl.load(before + first, mask=count > 0, other=-1)


@triton.jit
def convolve_rows(
    x, weight, bias, tails, before, after, row_before, out, x_stride,
    TAPS: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr,
):  # fmt: skip
    """Run as program (row, tile of channels). `weight` [TAPS, C]; `tails` [slots, TAPS - 1, C]."""
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_channel = channel < C
    slot, kept, seen = tl.load(before + row), tl.load(after + row), tl.load(row_before + row)
    total = tl.zeros([TILE], tl.float32)
    if HAS_BIAS:
        total = tl.load(bias + channel, mask=is_channel, other=0.0)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        here = tl.load(x + (row - back) * x_stride + channel, mask=is_channel & (back <= seen), other=0.0)
        tail = tails + (slot * (TAPS - 1) + TAPS - 1 + seen - back) * C + channel
        older = tl.load(tail, mask=is_channel & (back > seen) & (slot >= 0), other=0.0)
        value = here.to(tl.float32) + older
        total += tl.load(weight + tap * C + channel, mask=is_channel, other=0.0) * value
        if tap > 0:
            keep = tails + (kept * (TAPS - 1) + tap - 1) * C + channel
            tl.store(keep, value, mask=is_channel & (kept >= 0))
    if HAS_SILU:
        total = silu(total)
    tl.store(out + row * C + channel, total.to(out.dtype.element_ty), mask=is_channel)


@triton.jit
def walk_tokens(
    query, key, value, decay, rate, skips, states, before, after, query_start, out, query_stride, key_stride, value_stride,
    scale, KEY_HEADS: tl.constexpr, H: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    TILE: tl.constexpr, DECAY_DIM: tl.constexpr, HAS_UNIT_LENGTH: tl.constexpr, IS_ADDED: tl.constexpr,
    HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """Run as program (sequence, head, tile of columns).

    `decay` [P, H, DECAY_DIM]; `rate` [P, H]; `skips` [H]: factors with which a row's value is added to its output;
    `states` [slots, H, K, V].
    """
    head, dim = tl.program_id(1), tl.arange(0, K_PAD)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_dim, is_column = dim < K, column < V
    is_state = is_dim[:, None] & is_column[None, :]
    first, count, slot = own_rows(query_start, before, tl.program_id(0))
    place = head * (K * V) + dim[:, None] * V + column[None, :]
    state = tl.load(states + slot * (H * K * V) + place, mask=is_state & (slot >= 0), other=0.0)
    of_key = head // (H // KEY_HEADS) * K + dim
    for step in range(bound(count)):
        row = first + step
        q = tl.load(query + row * query_stride + of_key, mask=is_dim, other=0.0).to(tl.float32)
        k = tl.load(key + row * key_stride + of_key, mask=is_dim, other=0.0).to(tl.float32)
        if HAS_UNIT_LENGTH:
            q = q / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6)
            k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
        q = q * scale
        v = tl.load(value + row * value_stride + head * V + column, mask=is_column, other=0.0).to(tl.float32)
        if DECAY_DIM == 1:
            state = state * tl.exp(tl.load(decay + row * H + head))
        else:
            fading = tl.load(decay + (row * H + head) * K + dim, mask=is_dim, other=0.0)
            state = state * tl.exp(fading)[:, None]
        added = v
        if not IS_ADDED:
            added = v - tl.sum(state * k[:, None], axis=0)
        added = added * tl.load(rate + row * H + head)
        state = state + k[:, None] * added[None, :]
        result = tl.sum(state * q[:, None], axis=0)
        if HAS_SKIP:
            result += tl.load(skips + head) * v
        tl.store(out + (row * H + head) * V + column, result.to(out.dtype.element_ty), mask=is_column)
        kept = tl.load(after + row)
        tl.store(states + kept * (H * K * V) + place, state, mask=is_state & (kept >= 0))


@triton.jit
def walk_channels(
    x, time, writes, reads, gates, rates, skips, biases, states, before, after, query_start, out, x_stride, time_stride,
    write_stride, read_stride, gate_stride, C: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, TILE: tl.constexpr,
    HAS_SKIP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTPLUS: tl.constexpr, HAS_GATES: tl.constexpr,
):  # fmt: skip
    """Run Mamba as program (sequence, tile of channels). `rates` [C, N]; `skips`, `biases` [C]; `states` [slots, N, C]."""
    dim, channel = tl.arange(0, N_PAD), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_dim, is_channel = dim < N, channel < C
    is_state = is_dim[:, None] & is_channel[None, :]
    first, count, slot = own_rows(query_start, before, tl.program_id(0))
    place = dim[:, None] * C + channel[None, :]
    state = tl.load(states + slot * (N * C) + place, mask=is_state & (slot >= 0), other=0.0)
    rate = tl.load(rates + channel[None, :] * N + dim[:, None], mask=is_state, other=0.0)
    for step in range(bound(count)):
        row = first + step
        passed = tl.load(time + row * time_stride + channel, mask=is_channel, other=0.0).to(tl.float32)
        if HAS_BIAS:
            passed += tl.load(biases + channel, mask=is_channel, other=0.0)
        if HAS_SOFTPLUS:
            passed = softplus(passed)
        inputs = tl.load(x + row * x_stride + channel, mask=is_channel, other=0.0).to(tl.float32)
        write = tl.load(writes + row * write_stride + dim, mask=is_dim, other=0.0).to(tl.float32)
        read = tl.load(reads + row * read_stride + dim, mask=is_dim, other=0.0).to(tl.float32)
        state = state * tl.exp(rate * passed[None, :]) + write[:, None] * (inputs * passed)[None, :]
        result = tl.sum(state * read[:, None], axis=0)
        if HAS_SKIP:
            result += tl.load(skips + channel, mask=is_channel, other=0.0) * inputs
        if HAS_GATES:
            gate = tl.load(gates + row * gate_stride + channel, mask=is_channel, other=0.0)
            result *= silu(gate.to(tl.float32))
        tl.store(out + row * C + channel, result.to(out.dtype.element_ty), mask=is_channel)
        kept = tl.load(after + row)
        tl.store(states + kept * (N * C) + place, state, mask=is_state & (kept >= 0))
