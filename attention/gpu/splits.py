# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""How decode cuts contexts into splits that run in parallel, and merges their parts.

The cuts of a context depend on its own length and on the shape of the heads, never on the batch: splits have
`split_tokens`, or two, three, ... times that if a context would otherwise have more than `num_splits` of them. Any program
may compute any split without changing a bit: as many programs as the GPU runs at once take turns at all splits of all
sequences, and find them from the contexts on the device. One long context among short ones is thus spread over the whole
GPU, no program starts past the end of a sequence, and a CUDA graph can replay the launches for any contexts.

Memory traffic besides the cache: per split and head V + 2 float32 written and read once. With 8 heads on a KV head and
256 tokens that is 6 % of the split's keys and values. Latents have all heads on one row, so their splits are longer.
One sequence of 8k tokens on 4 KV heads makes 128 parts, near the 132 multiprocessors of an H100 or H200. 256 sequences
of 2k make 8,192 parts, 16 for each of 528 programs, so the last round costs 3 %.
Rejected: splits chosen to fill the GPU (FlashDecoding), whose sums depend on the batch; a grid over sequences and the
longest context allowed, in which most programs find nothing to do.

Ideas: FlashDecoding (Dao et al., 2023); one persistent program per seat, as in FlashMLA and FlashInfer.

Legend: S sequences, H query heads, V value dim, C splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.limits import split_sizes
from attention.gpu.pages import LOG2_E, bound, first_seen

_MERGED_PARTS = 8  # parts of a row merged at a time
_INTERPRETED_MULTIPROCESSORS = 3  # fewer than parts, so that programs take turns in the interpreter too


@triton.jit
def cut(
    end, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return where contexts' first splits begin (a multiple of TILE), the tokens of a split, and the number of splits."""
    first = first_seen(tl.maximum(end - 1, 0), WINDOW, CHUNK) // TILE * TILE
    tokens = SPLIT * tl.maximum(tl.cdiv(end - first, SPLIT * SPLITS), 1)
    return first, tokens, tl.cdiv(end - first, tokens)


@triton.jit
def count_splits(
    context, num_sequences,
    S_PAD: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return [S_PAD], the number of splits of each sequence and all before it."""
    sequence = tl.arange(0, S_PAD)
    end = tl.load(context + sequence, mask=sequence < num_sequences, other=0).to(tl.int32)
    _, _, count = cut(end, TILE, SPLIT, SPLITS, WINDOW, CHUNK)
    return tl.cumsum(count, axis=0)


@triton.jit
def find_split(
    context, number, splits_up_to,
    TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return for split `number`: its sequence, its number within the sequence, its first token, and the one past its end."""
    is_before = splits_up_to <= number
    sequence = tl.sum(is_before.to(tl.int32), axis=0)
    split = number - tl.max(tl.where(is_before, splits_up_to, 0), axis=0)
    end = tl.load(context + sequence).to(tl.int32)
    first, tokens, _ = cut(end, TILE, SPLIT, SPLITS, WINDOW, CHUNK)
    begin = first + split * tokens
    return sequence, split, begin, tl.minimum(begin + tokens, end), end


@triton.jit
def merge_parts(
    sums, tops, totals, context, sinks, out,
    V: tl.constexpr, V_PAD: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Run as program (sequence, head): add the parts in order, the sink first, and divide. A padded row becomes zero."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    heads, dim = tl.num_programs(1), tl.arange(0, V_PAD)
    end = tl.load(context + sequence).to(tl.int32)
    _, _, count = cut(end, TILE, SPLIT, SPLITS, WINDOW, CHUNK)
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    if HAS_SINKS:
        top, total = tl.zeros([1], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E, total + 1.0
    sum_V = tl.zeros([V_PAD], tl.float32)
    at = (sequence * heads + head).to(tl.int64) * SPLITS
    for step in range(bound(tl.cdiv(count, PARTS))):
        split = step * PARTS + tl.arange(0, PARTS)
        part_top = tl.load(tops + at + split, mask=split < count, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(part_top, axis=0))
        shrink, share = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        part_total = tl.load(totals + at + split, mask=split < count, other=0.0)
        total = total * shrink + tl.sum(part_total * share, axis=0)
        part_CV = tl.load(
            sums + (at + split)[:, None] * V + dim[None, :],
            mask=(split[:, None] < count) & (dim[None, :] < V), other=0.0,
        )  # fmt: skip
        sum_V = sum_V * shrink + tl.sum(part_CV * share[:, None], axis=0)
        top = new_top
    result = sum_V / tl.where(total > 0, total, 1.0)
    place = out + (sequence * heads + head).to(tl.int64) * V + dim
    tl.store(place, result.to(out.dtype.element_ty), mask=dim < V)


class DecodeScratch:
    """Memory for the parts of splits, and the way contexts are split. One scratch serves all layers of a shape; launches do
    not read what earlier ones left."""

    def __init__(
        self,
        *,
        max_sequences: int,
        heads: int,
        value_dim: int,
        max_tokens: int,
        device: torch.device,
        split_tokens: int | None = None,
        max_splits: int | None = None,
    ) -> None:
        """Allocate for contexts of up to `max_tokens`. Longer ones are computed as well, in longer splits.

        Args:
            split_tokens: Tokens of the shortest splits. max_splits: largest number of splits of a context. Both default to
                values for the shape of the heads. A row's bits depend on both.
        """
        self.split_tokens, self.num_splits = split_sizes(value_dim, max_tokens)
        if split_tokens is not None or max_splits is not None:
            self.split_tokens = split_tokens or self.split_tokens
            self.num_splits = max(1, min(max_splits or 64, -(-max_tokens // self.split_tokens)))
        self.multiprocessors = _INTERPRETED_MULTIPROCESSORS
        if device.type == "cuda":
            self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        parts = max_sequences * heads * self.num_splits
        self.sums = torch.empty(parts * value_dim, dtype=torch.float32, device=device)
        self.tops = torch.empty(parts, dtype=torch.float32, device=device)
        self.totals = torch.empty_like(self.tops)

    def check(self, sequences: int, heads: int, value_dim: int, tile_tokens: int) -> None:
        """Raise ValueError if a launch does not fit."""
        parts = sequences * heads * self.num_splits
        if parts > self.tops.numel() or parts * value_dim > self.sums.numel():
            raise ValueError(
                f"{sequences} sequences of {heads} heads with values of {value_dim} do not fit this DecodeScratch, "
                f"which has room for {self.tops.numel() // self.num_splits} rows and {self.sums.numel()} values; "
                "allocate it for the largest batch and layer"
            )
        if self.split_tokens % tile_tokens:
            raise ValueError(
                f"split_tokens is {self.split_tokens}; the kernel needs multiples of its tile, {tile_tokens}"
            )


def launch_merge(
    scratch: DecodeScratch,
    context_S: Tensor,
    sinks_H: Tensor | None,
    out_SHV: Tensor,
    tile_tokens: int,
    window: int,
    chunk: int,
) -> None:
    """Write `out_SHV` from the parts that the preceding launch over the same contexts has stored."""
    S, H, V = out_SHV.shape
    merge_parts[(S, H)](
        scratch.sums, scratch.tops, scratch.totals, context_S, sinks_H, out_SHV, V=V, V_PAD=triton.next_power_of_2(V),
        TILE=tile_tokens, SPLIT=scratch.split_tokens, SPLITS=scratch.num_splits, PARTS=_MERGED_PARTS, WINDOW=window,
        CHUNK=chunk, HAS_SINKS=sinks_H is not None, num_warps=4,
    )  # fmt: skip
