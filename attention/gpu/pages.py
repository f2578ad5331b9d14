# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Code shared by the paged attention kernels: the location of a token's row in the pages, and one tile of online softmax.

Pages on a GPU are token-major, [blocks, KV heads, tokens of a block, dim]: a warp reads a token's row in one go, and a
block of one layer is contiguous. (The CPU's pages are panels, see `kvcache.paged_cache`.) Scores are kept in base 2,
because exp2 is one instruction. Online softmax: Milakov and Gimelshein (2018).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _same(value):
    return value


def _number(value):
    """Unwrap the interpreter's scalars: they are arrays of one number, which Python's range does not take."""
    return int(value.handle.data.item())


bound = _number if triton.knobs.runtime.interpret else _same  # lets a computed int32 be the bound of a loop


@triton.jit
def blocks_of(table, begin, stop, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the numbers of the blocks of TILE tokens from `begin`, 0 from `stop` on; both are multiples of BLOCK.

    A loop carries the next tile's numbers through its iterations. The compiler pipelines loads only as deep as chains of
    loads allow. With numbers that an earlier iteration has read, keys and values are the only link of that chain, and
    `num_stages - 1` tiles are copied while one is computed. A block's number is loaded once for all its tokens.
    """
    blocks = ()
    for i in tl.static_range(TILE // BLOCK):
        first = begin + i * BLOCK
        blocks = blocks + (tl.load(table + first // BLOCK, mask=first < stop, other=0),)  # type: ignore[assignment] # noqa: RUF005 - Triton's tuple
    return blocks


@triton.jit
def rows_in(blocks, kv_head, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the row numbers in the pages of a tile's TILE tokens, from the numbers of its blocks."""
    offset = tl.arange(0, TILE)
    row = tl.zeros([TILE], tl.int64)
    for i in tl.static_range(TILE // BLOCK):
        own = (blocks[i].to(tl.int64) * KV_HEADS + kv_head) * BLOCK + offset % BLOCK
        row = tl.where(offset // BLOCK == i, own, row)
    return row


@triton.jit
def rows_of(table, begin, stop, kv_head, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the row numbers in the pages of TILE tokens from `begin`. Those from `stop` on are meaningless."""
    return rows_in(blocks_of(table, begin, stop, BLOCK, TILE), kv_head, KV_HEADS, BLOCK, TILE)


@triton.jit
def widened(stored, like):
    """Return what pages hold in the type of `like`, exactly. Codes are without their scales."""
    if stored.dtype == tl.float8e4nv:
        stored = stored.to(tl.float16)  # the conversion to bfloat16 needs compute capability 9.0
    return stored.to(like.dtype)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first token visible at each position: within the last WINDOW tokens or its chunk of CHUNK; 0 disables either."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        first = position // CHUNK * CHUNK
    return first


@triton.jit
def capped(scores, SOFT_CAP: tl.constexpr):
    """Squash scores (base e) into (-SOFT_CAP, SOFT_CAP), as Gemma does; 0 disables it."""
    if SOFT_CAP > 0:
        folded = tl.exp2(2 * LOG2_E * tl.minimum(scores / SOFT_CAP, 20.0))  # beyond 20 tanh is 1
        scores = SOFT_CAP * (1 - 2 / (folded + 1))
    return scores


@triton.jit
def weigh(scores, is_seen, top, total):
    """Take one tile of scores (base 2). Return its weights, the new maximum and sum, and the factor for earlier sums."""
    scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf: the row has seen no token yet
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(top - shift)
    return weights, new_top, total * shrink + tl.sum(weights, axis=1), shrink


@triton.jit
def soften(scores, factor, top, total):
    """Take one tile of unscaled scores, -inf if not seen; `factor` scales them to base 2. The result is as of `weigh`.

    Maxima are of unscaled scores. Scaling and subtraction are one explicit fused operation, with a mask in between or not.
    A tile of which a row sees nothing must leave its sums as they are: another cut of the prompt may lack that tile. So `shrink` is
    exactly 1 if the maximum stays. (A fused `top * factor - shift` leaves the rounding error of `shift`.)
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf: the row has seen no token yet
    shift = base * factor
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, tl.zeros_like(scores) - shift[:, None]))
    shrink = tl.exp2((top - base) * factor)
    return weights, new_top, total * shrink + tl.sum(weights, axis=1), shrink
