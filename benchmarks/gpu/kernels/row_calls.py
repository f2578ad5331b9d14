"""Kernels that work on separate rows: norm, cast, rotary, routing, KV write; with random inputs and oracles.

Legend: T rows, D hidden, H heads, R rotary dim, E experts, K choices, N blocks, G KV heads, B tokens of a block.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from attention.gpu.rotary import Rotation, rotate
from benchmarks.gpu.bench import Bench, Call, bytes_of, spoiling
from kvcache.gpu.write import write_pages
from moe.gpu.norm import rms_norm
from moe.gpu.products.linear_rows import LinearTile, multiply_rows_alike
from moe.gpu.routing import route
from moe.routing import Routing

BLOCK = 16
EPS = 1e-6
QWEN3_ROUTING = Routing(choices=8, normalise=True)
GPT_OSS_ROUTING = Routing(choices=4, softmax_after=True)
DEEPSEEK_ROUTING = Routing(choices=8, is_sigmoid=True, normalise=True, scale=2.5, groups=8, groups_chosen=4)


def norm_call(bench: Bench, seed: int, *, rows: int, hidden: int) -> Call:
    """Build a call of RMSNorm on rows."""
    generator = bench.generator(seed)
    x, weight = bench.normal(generator, rows, hidden), bench.normal(generator, hidden)

    def oracle(shift: int = 0) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
        return normed.float() * weight.float().roll(shift)

    return Call(
        run=functools.partial(rms_norm, x, weight, EPS),
        oracle=oracle,
        control=functools.partial(oracle, 1),
        num_bytes=2 * bytes_of(x),
        peers={"torch": functools.partial(functional.rms_norm, x, (hidden,), weight, EPS)},
    )


def linear_call(
    bench: Bench, seed: int, *, rows: int, out_dim: int, in_dim: int, tile: LinearTile | None = None
) -> Call:
    """Build a call of a linear layer with --batch-invariant. The peer is cuBLAS, which has other bits for other numbers of rows."""
    generator = bench.generator(seed)
    x, weight = (
        bench.normal(generator, rows, in_dim),
        bench.normal(generator, out_dim, in_dim, spread=in_dim**-0.5),
    )
    out = x.new_empty(rows, out_dim)
    return Call(
        run=functools.partial(multiply_rows_alike, x, weight, out=out, tile=tile),
        prepare=spoiling(out),
        oracle=lambda: x.float() @ weight.float().T,
        control=lambda: x.float() @ weight.float().roll(1, 0).T,
        num_bytes=bytes_of(x, weight, out),
        operations=2 * rows * out_dim * in_dim,
        peers={"cublas": functools.partial(functional.linear, x, weight)},
    )


def rotary_call(
    bench: Bench, seed: int, *, rows: int, heads: int, kv_heads: int, dim: int, is_interleaved: bool = False
) -> Call:
    """Build a call that rotates queries and keys in place, in one launch; both are checked."""
    generator = bench.generator(seed)
    drawn = bench.normal(generator, rows, heads + kv_heads, dim)
    query, key = drawn[:, :heads].clone(), drawn[:, heads:].clone()
    position = torch.randint(0, 32768, (rows, 1), generator=generator, device=bench.device)
    angles_TR = position / 1e4 ** (torch.arange(dim // 2, device=bench.device) * 2 / dim)
    cosines, sines = (
        torch.cat((part, part), -1).to(bench.dtype) for part in (angles_TR.cos(), angles_TR.sin())
    )

    def prepare() -> None:
        query.copy_(drawn[:, :heads])
        key.copy_(drawn[:, heads:])

    def oracle(shift: int = 0) -> Tensor:
        half = dim // 2
        cosine, sine = (part[:, None, :half].float().roll(shift, 0) for part in (cosines, sines))
        pairs = drawn.float().reshape(*drawn.shape[:-1], *((half, 2) if is_interleaved else (2, half)))
        a, b = pairs.unbind(-1 if is_interleaved else -2)
        turned = (a * cosine - b * sine, b * cosine + a * sine)
        return torch.stack(turned, -1 if is_interleaved else -2).flatten(-2)

    return Call(
        run=functools.partial(
            rotate, query, cosines, sines, keys_TGD=key, rotation=Rotation(is_interleaved=is_interleaved)
        ),
        prepare=prepare,
        result=lambda _: torch.cat((query, key), 1),
        oracle=oracle,
        control=functools.partial(oracle, 1),
        num_bytes=2 * bytes_of(drawn) + bytes_of(cosines, sines) // 2,
    )


def routing_call(bench: Bench, seed: int, *, rows: int, experts: int, routing: Routing) -> Call:
    """Build a call that chooses experts; it is checked as one row of weights over all experts per token."""
    generator = bench.generator(seed)
    logits = bench.normal(generator, rows, experts, spread=2.0)
    bias = bench.normal(generator, experts, spread=0.1).float() if routing.is_sigmoid else None

    def spread_out(chosen: tuple[Tensor, Tensor]) -> Tensor:
        ids, weights = chosen
        return torch.zeros(rows, experts, device=bench.device).scatter(1, ids, weights)

    def oracle(shift: int = 0) -> Tensor:
        return spread_out(choose(logits.float().roll(shift, 0), routing, bias))

    return Call(
        run=functools.partial(route, logits, routing, bias_E=bias), result=spread_out, oracle=oracle,
        control=functools.partial(oracle, 1), num_bytes=bytes_of(logits) + rows * routing.choices * 12,
    )  # fmt: skip


def choose(logits_TE: Tensor, routing: Routing, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose in plain torch; equal scores go to the lower expert."""
    if routing.softmax_after:
        scores = logits_TE
    else:
        scores = logits_TE.sigmoid() if routing.is_sigmoid else logits_TE.softmax(-1)
    choice = scores if bias_E is None else scores + bias_E
    if routing.groups > routing.groups_chosen:
        inside = choice.view(len(choice), routing.groups, -1)
        best = inside.topk(2, dim=-1).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.groups_chosen]
        is_kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        choice = inside.masked_fill(~is_kept[..., None], float("-inf")).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.choices]
    weights = scores.gather(1, ids)
    if routing.softmax_after:
        weights = weights.softmax(-1)
    if routing.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * routing.scale


def write_call(
    bench: Bench, seed: int, *, rows: int, kv_heads: int, dim: int, has_values: bool = True
) -> Call:
    """Build a call that writes keys and values, or latents, to shuffled slots in one launch; every third row is padding."""
    generator = bench.generator(seed)
    num_blocks, parts = -(-rows // BLOCK) + 2, 2 if has_values else 1
    drawn = bench.normal(generator, parts, rows, kv_heads, dim)
    pages = torch.zeros(parts, num_blocks, kv_heads, BLOCK, dim, dtype=bench.dtype, device=bench.device)
    slots = torch.randperm(num_blocks * BLOCK, generator=generator, device=bench.device)[:rows]
    slots[2::3] = -1
    values = (drawn[1], pages[1]) if has_values else ()

    def oracle(shift: int = 0) -> Tensor:
        kept = slots >= 0
        rows_CNGD = torch.zeros(parts, num_blocks * BLOCK, kv_heads, dim, device=bench.device)
        rows_CNGD[:, slots[kept]] = drawn[:, kept].float().roll(shift, 1)
        return rows_CNGD.view(parts, num_blocks, BLOCK, kv_heads, dim).transpose(2, 3)

    return Call(
        run=functools.partial(write_pages, drawn[0], slots, pages[0], *values),
        prepare=pages.zero_,
        result=lambda _: pages,
        oracle=oracle,
        control=functools.partial(oracle, 1),
        num_bytes=2 * int((slots >= 0).sum()) * bytes_of(drawn) // rows,
    )
