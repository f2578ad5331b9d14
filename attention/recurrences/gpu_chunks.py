# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Recurrences that are sums of outer products, on GPUs: prompts chunk by chunk, with products on tensor cores.

    S_t = exp(g_t) S_(t-1) + k_t u_t;  u_t = rate_t (v_t - k_t exp(g_t) S_(t-1)), or rate_t v_t if nothing is subtracted;
    out_t = q_t S_t

Within a chunk every u follows from the state before it and the rows so far, so 16 tokens take a few products of 16 rows
instead of 16 walks over the state (Yang et al., Gated DeltaNet, 2024; Dao and Gu, Mamba-2, 2024). Chunks are the blocks of
the text's positions: a prompt cut at the ends of blocks has the same bits as an uncut one. A prompt that is cut elsewhere, or
continued by decodes, which walk (`attention.recurrences.gpu_kernels`), does not. Batch-invariant steps always walk.
Rejected: letting a decode repeat its chunk's products from the state and the rows before it. That keeps the bits but
takes eight times the threads for one token.

The dependencies between rows are solved row by row, which is stable for all keys. Inverting by squaring is not stable if keys
are similar. Decay per channel is applied as differences, because exp(-g) alone would overflow.

Legend: P rows, H heads, K key dim, V value dim, D decays of a head (1 or K), TILE columns of a program, CHUNK positions.
"""

import triton
import triton.language as tl

from attention.gpu.pages import bound
from attention.recurrences.gpu_kernels import own_rows
from kvcache.paged_cache import BLOCK_TOKENS

CHUNK = tl.constexpr(BLOCK_TOKENS)


@triton.jit
def _row_of(rows, place, index):
    """Return one row of [CHUNK, n] as [n]."""
    return tl.sum(tl.where(place[:, None] == index, rows, 0.0), axis=0)


@triton.jit
def _unit(rows):
    """Normalise rows to length one."""
    return rows / tl.sqrt(tl.sum(rows * rows, axis=1) + 1e-6)[:, None]


@triton.jit
def _summed(g, place, DECAY_DIM: tl.constexpr):
    """Return the running sums over the rows of [CHUNK, D]."""
    if DECAY_DIM == 1:
        return tl.cumsum(tl.sum(g, axis=1), axis=0)[:, None]
    else:  # scans over two dimensions do not compile
        is_before = (place[:, None] >= place[None, :]).to(tl.float32)
        return tl.dot(is_before, g, input_precision="ieee")


@triton.jit
def _faded_pairs(q, k, faded, place, count, DECAY_DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Return [CHUNK, CHUNK] q_i k_j and k_i k_j, decayed from row j to row i. Values with j > i are meaningless."""
    if DECAY_DIM == 1:
        decay = tl.sum(faded, axis=1)
        is_later = place[:, None] >= place[None, :]
        fading = tl.exp(tl.where(is_later, decay[:, None] - decay[None, :], 0.0))
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION) * fading
        kk = tl.dot(k, tl.trans(k), input_precision=PRECISION) * fading
    else:
        qk = tl.zeros([CHUNK, CHUNK], tl.float32)
        kk = tl.zeros([CHUNK, CHUNK], tl.float32)
        for other in range(bound(count)):
            is_later = place[:, None] >= other
            fading = tl.exp(tl.where(is_later, faded - _row_of(faded, place, other)[None, :], 0.0))
            fading = fading * _row_of(k, place, other)[None, :]
            is_other = place[None, :] == other
            qk = tl.where(is_other, tl.sum(q * fading, axis=1)[:, None], qk)
            kk = tl.where(is_other, tl.sum(k * fading, axis=1)[:, None], kk)
    return qk, kk


@triton.jit
def walk_chunks(
    query, key, value, decay, rate, skips, states, before, after, position, query_start, out, query_stride, key_stride,
    value_stride, scale, KEY_HEADS: tl.constexpr, H: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    TILE: tl.constexpr, DECAY_DIM: tl.constexpr, HAS_UNIT_LENGTH: tl.constexpr, IS_ADDED: tl.constexpr,
    HAS_SKIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run as program (sequence, head, tile of columns).

    `decay` [P, H, D]; `rate` [P, H]; `skips` [H]: factors with which a row's value is added to its output; `states`
    [slots, H, K, V]. States are stored only after a sequence's last row and at the ends of chunks.
    """
    head, dim, place = tl.program_id(1), tl.arange(0, K_PAD), tl.arange(0, CHUNK)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_dim, is_column = dim < K, column < V
    is_state = is_dim[:, None] & is_column[None, :]
    first, count, slot = own_rows(query_start, before, tl.program_id(0))
    begun = (tl.load(position + first, mask=count > 0, other=0) % CHUNK).to(tl.int32)
    of_state = head * (K * V) + dim[:, None] * V + column[None, :]
    state = tl.load(states + slot * (H * K * V) + of_state, mask=is_state & (slot >= 0), other=0.0)
    of_key = head // (H // KEY_HEADS) * K + dim[None, :]
    of_decay = tl.arange(0, 1 if DECAY_DIM == 1 else K_PAD)[None, :]
    for chunk in range(bound((begun + count + CHUNK - 1) // CHUNK)):
        row = first - begun + chunk * CHUNK + place
        is_row = (row >= first) & (row < first + count)
        is_key, is_value = is_row[:, None] & is_dim[None, :], is_row[:, None] & is_column[None, :]
        k = tl.load(key + row[:, None] * key_stride + of_key, mask=is_key, other=0.0).to(tl.float32)
        q = tl.load(query + row[:, None] * query_stride + of_key, mask=is_key, other=0.0).to(tl.float32)
        of_value = row[:, None] * value_stride + head * V + column[None, :]
        v = tl.load(value + of_value, mask=is_value, other=0.0).to(tl.float32)
        is_decay = is_row[:, None] & (of_decay < DECAY_DIM)
        g = tl.load(decay + (row[:, None] * H + head) * DECAY_DIM + of_decay, mask=is_decay, other=0.0)
        rates = tl.load(rate + row * H + head, mask=is_row, other=0.0)[:, None]
        if HAS_UNIT_LENGTH:
            q, k = _unit(q), _unit(k)
        q = q * scale
        faded = _summed(g, place, DECAY_DIM)
        grown = tl.exp(faded)
        filled = tl.minimum(begun + count - chunk * CHUNK, CHUNK)
        qk, kk = _faded_pairs(q, k, faded, place, filled, DECAY_DIM, PRECISION)
        result = tl.dot(q * grown, state, input_precision=PRECISION)
        added = v
        if not IS_ADDED:
            added = v - tl.dot(k * grown, state, input_precision=PRECISION)
        added = added * rates
        if not IS_ADDED:
            kk = tl.where(place[:, None] > place[None, :], kk * rates, 0.0)
            for index in range(bound(filled)):
                less = tl.sum(_row_of(kk, place, index)[:, None] * added, axis=0)
                added = tl.where(place[:, None] == index, added - less[None, :], added)
        qk = tl.where(place[:, None] >= place[None, :], qk, 0.0)
        result += tl.dot(qk, added, input_precision=PRECISION)
        if HAS_SKIP:
            result += tl.load(skips + head) * v
        to = out + (row[:, None] * H + head) * V + column[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=is_value)
        faded_all = _row_of(faded, place, CHUNK - 1)
        state = state * tl.exp(faded_all)[:, None]
        state += tl.dot(tl.trans(k * tl.exp(faded_all[None, :] - faded)), added, input_precision=PRECISION)
        kept = tl.load(after + first - begun + chunk * CHUNK + filled - 1)
        tl.store(states + kept * (H * K * V) + of_state, state, mask=is_state & (kept >= 0))
