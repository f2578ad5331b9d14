# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What the paged attention kernels share: where a token's row lies in the pages, and one tile of online softmax.

Pages on a GPU are token-major, [blocks, KV heads, tokens of a block, dim]: a warp reads a token's row in one go, and a
block of one layer is contiguous. (The CPU's pages are panels, see `kvcache.paged_cache`.) Scores are kept in base 2:
exp2 is one instruction. Online softmax: Milakov and Gimelshein (2018).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def rows_of(table, tokens, is_seen, kv_head, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Return each token's row number in the pages; tokens that are not seen get row 0, which exists."""
    block = tl.load(table + tokens // BLOCK, mask=is_seen, other=0).to(tl.int64)
    return tl.where(is_seen, (block * KV_HEADS + kv_head) * BLOCK + tokens % BLOCK, 0)


@triton.jit
def capped(scores, SOFT_CAP: tl.constexpr):
    """Squash scores (base e) into (-SOFT_CAP, SOFT_CAP), as Gemma does; 0 is off."""
    if SOFT_CAP > 0:
        folded = tl.exp2(2 * LOG2_E * tl.minimum(scores / SOFT_CAP, 20.0))  # beyond 20 tanh is 1
        scores = SOFT_CAP * (1 - 2 / (folded + 1))
    return scores


@triton.jit
def weigh(scores, is_seen, top, total):
    """Take in one tile of scores (base 2): return its weights, the new maximum and sum, and what sums shrink by."""
    scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(top - shift)
    return weights, new_top, total * shrink + tl.sum(weights, axis=1), shrink
