"""Attention kernels with random inputs: paged decode, absorbed latents, chunked prefill; and their peers.

The peers get contiguous keys and values, without pages, which favours them.

Legend: S sequences, H query heads, G KV heads, D dim, N blocks, B tokens of a block, M blocks of a sequence, T rows.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention.gpu.decode import paged_decode
from attention.gpu.mla import latent_decode
from attention.gpu.prefill import paged_prefill, tile_tokens
from attention.gpu.splits import DecodeScratch
from benchmarks.gpu.bench import Bench, Call, MakeCall, bytes_of, spoiling
from benchmarks.gpu.ranks.models import AttentionShape, LatentShape
from kvcache.step import Span, Step

BLOCK = 16
_SERVED_TOKENS = 32768  # most tokens of a sequence
_SERVED_SEQUENCES = 256  # scratch memory, which decides how contexts are split, is that of a service


def decode_call(
    bench: Bench,
    seed: int,
    *,
    shape: AttentionShape,
    contexts: Sequence[int],
    with_peers: bool = False,
    is_invariant: bool = False,
    split_tokens: int | None = None,
    **options: Any,
) -> Call:
    """Build a call with one query token per sequence over its pages; `options` are the kernel's.

    With `is_invariant`, bits do not depend on the batch, as with --batch-invariant. `split_tokens` is for `DecodeScratch`.
    """
    generator, S = bench.generator(seed), len(contexts)
    table_SM = _table(bench, generator, contexts)
    pages = (int(table_SM.max()) + 1, shape.kv_heads, BLOCK, shape.dim)
    keys, values = (bench.normal(generator, *pages) for _ in range(2))
    query = bench.normal(generator, S, shape.heads, shape.dim, spread=2.0)
    sinks = bench.normal(generator, shape.heads).float() if shape.has_sinks else None
    context_S, scale = bench.integers(list(contexts)), shape.dim**-0.5
    scratch = DecodeScratch(
        max_sequences=max(S, _SERVED_SEQUENCES),
        heads=shape.heads,
        value_dim=shape.dim,
        max_tokens=_longest(contexts),
        device=bench.device,
        is_invariant=is_invariant,
        split_tokens=split_tokens,
    )
    out = torch.empty_like(query)
    run = functools.partial(
        paged_decode, query, keys, values, context_S, table_SM, scratch,
        scale=scale, window=shape.window, sinks_H=sinks, out=out, **options,
    )  # fmt: skip

    def oracle(shift: int = 0) -> Tensor:
        rows = []
        for row, context in enumerate(contexts):
            key, value = (_gathered(part, table_SM[row], context, shift) for part in (keys, values))
            rows.append(attend(query[row : row + 1], key, value, scale, shape.window, sinks))
        return torch.cat(rows)

    seen = sum(min(context, shape.window or context) for context in contexts)
    moved = seen * shape.kv_heads * 2 * shape.dim * keys.element_size() + 2 * bytes_of(query)
    peers = _decode_peers(query, keys, values, table_SM, contexts[0], scale) if with_peers else {}
    return Call(
        run=run, prepare=spoiling(out), oracle=oracle, control=functools.partial(oracle, 1), num_bytes=moved, peers=peers,
        operations=4 * seen * shape.heads * shape.dim,
    )  # fmt: skip


def latent_call(
    bench: Bench,
    seed: int,
    *,
    shape: LatentShape,
    contexts: Sequence[int],
    is_invariant: bool = False,
    **options: Any,
) -> Call:
    """Build a call with one absorbed query token per sequence over latent pages, as `decode_call`."""
    generator, S, width = bench.generator(seed), len(contexts), shape.latent + shape.rope
    table_SM = _table(bench, generator, contexts)
    pages = bench.normal(generator, int(table_SM.max()) + 1, BLOCK, width)
    query = bench.normal(generator, S, shape.heads, width, spread=0.3)
    out = query.new_empty(S, shape.heads, shape.latent)
    scratch = DecodeScratch(
        max_sequences=max(S, _SERVED_SEQUENCES), heads=shape.heads, value_dim=shape.latent,
        max_tokens=_longest(contexts), device=bench.device, is_invariant=is_invariant,
    )  # fmt: skip
    run = functools.partial(
        latent_decode, query, pages, bench.integers(list(contexts)), table_SM, scratch,
        latent_dim=shape.latent, scale=shape.scale, out=out, **options,
    )  # fmt: skip

    def oracle(shift: int = 0) -> Tensor:
        rows = []
        for row, context in enumerate(contexts):
            latents = _gathered(pages[:, None], table_SM[row], context, shift)
            rows.append(
                attend(query[row : row + 1], latents, latents[..., : shape.latent], shape.scale, 0, None)
            )
        return torch.cat(rows)

    tokens = sum(contexts)
    return Call(
        run=run, prepare=spoiling(out), oracle=oracle, control=functools.partial(oracle, 1),
        num_bytes=tokens * width * pages.element_size() + bytes_of(query, out),
        operations=2 * tokens * shape.heads * (width + shape.latent),
    )  # fmt: skip


def prefill_call(
    bench: Bench,
    seed: int,
    *,
    shape: AttentionShape,
    spans: Sequence[tuple[int, int]],
    with_peers: bool = False,
    **options: Any,
) -> Call:
    """Build a call with chunks of prompts, (cached tokens, new tokens) each, over their pages."""
    generator = bench.generator(seed)
    contexts = [start + length for start, length in spans]
    table_SM = _table(bench, generator, contexts)
    pages = (int(table_SM.max()) + 1, shape.kv_heads, BLOCK)
    keys, values = (bench.normal(generator, *pages, dim) for dim in (shape.dim, shape.values))
    query = bench.normal(generator, sum(length for _, length in spans), shape.heads, shape.dim)
    sinks = bench.normal(generator, shape.heads).float() if shape.has_sinks else None
    scale, starts = shape.dim**-0.5, [0]
    for _, length in spans:
        starts.append(starts[-1] + length)
    out = query.new_empty(len(query), shape.heads, shape.values)
    run = functools.partial(
        paged_prefill, query, keys, values, _tiles(bench, spans, shape), bench.integers(starts),
        bench.integers(contexts), table_SM, scale=scale, window=shape.window, sinks_H=sinks, out=out,
        **options,
    )  # fmt: skip

    def oracle(shift: int = 0) -> Tensor:
        rows = []
        for row, context in enumerate(contexts):
            key, value = (_gathered(part, table_SM[row], context, shift) for part in (keys, values))
            own = query[starts[row] : starts[row + 1]]
            rows.append(attend(own, key, value, scale, shape.window, sinks))
        return torch.cat(rows)

    pairs = sum(_pairs(start, length, shape.window) for start, length in spans)
    dims = shape.dim + shape.values
    moved = sum(contexts) * shape.kv_heads * dims * keys.element_size() + bytes_of(query, out)
    peers = _prefill_peers(query, keys, values, table_SM, spans[0], scale) if with_peers else {}
    return Call(
        run=run, prepare=spoiling(out), oracle=oracle, control=functools.partial(oracle, 1), num_bytes=moved, peers=peers,
        operations=2 * pairs * shape.heads * dims,
    )  # fmt: skip


def attend(
    query_QHD: Tensor, key_GCD: Tensor, value_GCV: Tensor, scale: float, window: int, sinks_H: Tensor | None
) -> Tensor:
    """Attend the last Q tokens of one sequence, in float32, 512 rows at a time: [Q, H, V]."""
    (Q, H, _), (G, C, _) = query_QHD.shape, key_GCD.shape
    parts = []
    for first in range(0, Q, 512):
        rows = query_QHD[first : first + 512].float().transpose(0, 1).reshape(G, H // G, -1, key_GCD.shape[2])
        scores = rows @ key_GCD.float()[:, None].transpose(-1, -2) * scale
        position = torch.arange(C - Q + first, C - Q + first + rows.shape[2], device=scores.device)[:, None]
        token = torch.arange(C, device=scores.device)
        hidden = token > position
        if window:
            hidden |= token <= position - window
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks_H is not None:
            sink = sinks_H.view(G, H // G, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), -1)
        parts.append((scores.softmax(-1)[..., :C] @ value_GCV.float()[:, None]).flatten(0, 1).transpose(0, 1))
    return torch.cat(parts)


def decode_maker(shape: AttentionShape, batch: int, context: int, *, with_peers: bool = False) -> MakeCall:
    """Return a maker of decodes with equal contexts."""
    return functools.partial(decode_call, shape=shape, contexts=[context] * batch, with_peers=with_peers)


def latent_maker(shape: LatentShape, batch: int, context: int) -> MakeCall:
    """Return a maker of latent decodes with equal contexts."""
    return functools.partial(latent_call, shape=shape, contexts=[context] * batch)


def prefill_maker(shape: AttentionShape, *spans: tuple[int, int], with_peers: bool = False) -> MakeCall:
    """Return a maker of prefills."""
    return functools.partial(prefill_call, shape=shape, spans=spans, with_peers=with_peers)


def _table(bench: Bench, generator: torch.Generator, contexts: Sequence[int]) -> Tensor:
    """Assign shuffled blocks to sequences, without sharing."""
    counts = [-(-context // BLOCK) for context in contexts]
    order = torch.randperm(sum(counts) + 2, generator=generator, device=bench.device)
    table = torch.zeros(len(contexts), max(counts), dtype=torch.int64, device=bench.device)
    for row, (begin, count) in enumerate(zip(_begins(counts), counts, strict=True)):
        table[row, :count] = order[begin : begin + count]
    return table


def _longest(contexts: Sequence[int]) -> int:
    """Return the sequence length for scratch memory: a service's longest sequence if contexts are realistic."""
    return max(contexts) if max(contexts) < _SERVED_TOKENS // 64 else max(_SERVED_TOKENS, *contexts)


def _begins(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:at]) for at in range(len(counts))]


def _tiles(bench: Bench, spans: Sequence[tuple[int, int]], shape: AttentionShape) -> Tensor:
    """Return the tiles into which a step cuts these spans, as for a model."""
    step = Step(
        max_tokens=sum(length for _, length in spans), max_sequences=len(spans), block_tokens=BLOCK,
        max_blocks=max(-(-(start + length) // BLOCK) for start, length in spans),
    )  # fmt: skip
    step.fill([Span(start, length, [0]) for start, length in spans])
    tokens = tile_tokens(shape.heads, shape.kv_heads, shape.dim, shape.values)
    return torch.from_numpy(step.tiles(tokens)).to(bench.device)


def _gathered(pages_NGBD: Tensor, blocks_M: Tensor, context: int, shift: int = 0) -> Tensor:
    """Return a sequence's rows, [G, C, D]; with a shift, those of the blocks after its own."""
    own = pages_NGBD[(blocks_M[: -(-context // BLOCK)] + shift) % len(pages_NGBD)]
    return own.transpose(0, 1).flatten(1, 2)[:, :context]


def _pairs(start: int, length: int, window: int) -> int:
    """Count pairs of a query token and a token that it sees."""
    return sum(min(position + 1, window or position + 1) for position in range(start, start + length))


def _decode_peers(
    query: Tensor, keys: Tensor, values: Tensor, table_SM: Tensor, context: int, scale: float
) -> dict[str, Callable[[], object]]:
    """Return torch's attention over contiguous keys and values of equal contexts."""
    key, value = (torch.stack([_gathered(part, row, context) for row in table_SM]) for part in (keys, values))
    own = query[:, :, None]
    common: dict[str, Any] = {"scale": scale, "enable_gqa": True}
    return {
        "sdpa": functools.partial(functional.scaled_dot_product_attention, own, key, value, **common),
        "flex": functools.partial(_compiled_flex(), own, key, value, **common),
    }


def _prefill_peers(
    query: Tensor, keys: Tensor, values: Tensor, table_SM: Tensor, span: tuple[int, int], scale: float
) -> dict[str, Callable[[], object]]:
    """Return torch's attention for one prompt from its beginning. SDPA's causal mask does not fit later chunks."""
    if span[0]:
        return {}
    key, value = (_gathered(part, table_SM[0], span[1])[None] for part in (keys, values))
    own = query.transpose(0, 1)[None].contiguous()
    common: dict[str, Any] = {"scale": scale, "enable_gqa": True}
    mask = create_block_mask(_is_seen, None, None, span[1], span[1], device=query.device.type)
    return {
        "sdpa": functools.partial(
            functional.scaled_dot_product_attention, own, key, value, is_causal=True, **common
        ),
        "flex": functools.partial(_compiled_flex(), own, key, value, block_mask=mask, **common),
    }


def _is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@functools.cache
def _compiled_flex() -> Callable[..., object]:
    compiled: Callable[..., object] = torch.compile(flex_attention, dynamic=False)
    return compiled
