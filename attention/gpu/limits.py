"""Shapes that the GPU kernels support, and the memory they need in addition to the pages. Does not import Triton.

Unsupported shapes are reported before a weight is read (`why_not`) and checked again at every launch. The memory is
counted before the size of the KV cache is chosen, so that no first allocation happens while serving.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvcache.codes import is_coded
from kvcache.paged_cache import LayerShape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_DIM, LARGEST_DIM = 16, 512  # of a key or a value: limited by products on tensor cores and by registers
WIDE_DIM = 256  # larger dims use tiles of fewer rows (Gemma 4's full attention: 512)
LARGEST_LATENT = 512
MAX_GROUP, MAX_WIDE_GROUP = 64, 16  # query heads of a (wide) KV head, the rows of one product
LATENT_VALUES = 512  # from this value dim on, heads share cached latents
# Parts of splits in addition to one for each sequence. More are computed in turns by a GPU's programs, so few suffice.
LEAST_SPARE_PARTS, MOST_SPARE_PARTS, SPARE_PART_BYTES = 128, 2048, 64 << 20
# With --batch-invariant: splits of a run, and most parts of a batch that is computed split by split.
RUN, SINGLE_PARTS = 8, 4096
# Size of the keys and values expanded at once from the contexts of prompts, for one layer: the product and its copy as pages.
# Larger ones are expanded head by head: 128 heads (DeepSeek) of 128k tokens would take 10.7 GB, and as much again for the copy.
EXPANDED_BYTES = 512 << 20
# Pairs of a prompt's row and a cached latent for which a captured step attends absorbed, per ABSORBED_HEADS heads. By estimate,
# not measured, a layer then takes as long as the host takes to launch one that expands latents.
ABSORBED_PAIRS, ABSORBED_HEADS = 3 << 20, 64
ABSORBED_LAUNCHES = (
    8  # most launches for the rows of a layer; each takes as many rows as there may be decodes
)
SCORE_BYTES = 256 << 20  # of an index's scores at a time; decodes, scored together, may exceed it
# Values per token: a key. An index over pools adds a gate and a part of a pool's key.
LARGEST_INDEX = 3 * 256
LARGEST_STATE = 512  # rows of the state of a head or channel: a program holds all rows of some columns


def check_heads(heads: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Raise ValueError if paged decode and prefill do not support the shape or type."""
    if dtype not in DTYPES:
        raise ValueError(f"attention in {dtype} has no GPU kernel; use bfloat16, float16 or float32")
    most = MAX_WIDE_GROUP if max(key_dim, value_dim) > WIDE_DIM else MAX_GROUP
    if kv_heads < 1 or heads % kv_heads or heads // kv_heads > most:
        raise ValueError(
            f"{heads} query heads on {kv_heads} KV heads have no GPU kernel; "
            f"each KV head must have the same number of query heads, at most {most}"
        )
    if not LEAST_DIM <= min(key_dim, value_dim) <= max(key_dim, value_dim) <= LARGEST_DIM:
        raise ValueError(
            f"heads with keys of {key_dim} and values of {value_dim} have no GPU kernel; "
            f"both must be {LEAST_DIM} to {LARGEST_DIM}"
        )


def check_latents(latent_dim: int, rope_dim: int, dtype: torch.dtype) -> None:
    """Raise ValueError if absorbed latent decode does not support the shape or type."""
    if dtype not in DTYPES:
        raise ValueError(f"attention in {dtype} has no GPU kernel; use bfloat16, float16 or float32")
    if latent_dim & (latent_dim - 1) or not LEAST_DIM <= latent_dim <= LARGEST_LATENT:
        raise ValueError(
            f"latent_dim is {latent_dim}; the kernel supports powers of 2 from {LEAST_DIM} to {LARGEST_LATENT} "
            "(512 in every known model)"
        )
    if not 0 <= rope_dim <= 128:
        raise ValueError(f"the rotary part of latents is {rope_dim}; the kernel supports 0 to 128")


def check_layout(query_THD: Tensor, *pages: Tensor, has_codes: bool = False) -> None:
    """Raise ValueError if a kernel would read the wrong numbers. `has_codes`: scales are given for pages of codes."""
    _, heads, dim = query_THD.shape
    if query_THD.stride(2) != 1 or (heads > 1 and query_THD.stride(1) != dim):
        raise ValueError(
            f"the query's heads have stride {query_THD.stride(1)} and its dims stride {query_THD.stride(2)}; "
            f"the kernels need {dim} and 1: call contiguous() on it"
        )
    for page in pages:
        if is_coded(page) != has_codes:
            raise ValueError(
                f"the pages are {page.dtype}; codes of eight bits need scales, other types have none"
            )
        if not has_codes and page.dtype != query_THD.dtype:
            raise ValueError(
                f"the query is {query_THD.dtype} and the pages are {page.dtype}; they must have the same type"
            )
        if not page.is_contiguous():
            raise ValueError("the pages are not contiguous; the kernels need one layer's pages as allocated")


def check_tile(tokens: int, block_tokens: int) -> None:
    """Raise ValueError if a tile does not consist of whole blocks."""
    if tokens % block_tokens:
        raise ValueError(
            f"a tile has {tokens} tokens; the kernels need multiples of a block's {block_tokens}"
        )


def why_not(shapes: Sequence[LayerShape], latent_ranks: Iterable[int]) -> str | None:
    """Return what the kernels do not support, or None.

    Args:
        shapes: The cache shape of each layer.
        latent_ranks: `kv_lora_rank` of the layers that cache latents.
    """
    states = [shape.state.recurrent for shape in shapes if shape.state and len(shape.state.recurrent) > 1]
    large = max((state[-2] for state in states), default=0)
    if large > LARGEST_STATE:
        return f"recurrent states of {large} rows; the GPU kernels support up to {LARGEST_STATE}"
    if any(shape.index_dim > LARGEST_INDEX for shape in shapes):
        return f"an index of more than {LARGEST_INDEX} values per token, the limit of the GPU kernels"
    of_heads = [shape for shape in shapes if shape.num_kv_heads and not shape.latent]
    dims = {dim for shape in of_heads for dim in (shape.key_dim, shape.value_dim)}
    bad = sorted(dim for dim in dims if not LEAST_DIM <= dim <= LARGEST_DIM)
    if bad:
        return f"heads of {bad[0]} values; the GPU kernels support {LEAST_DIM} to {LARGEST_DIM}"
    if any(shape.latent and shape.window for shape in shapes):
        return "a sliding window over latents, which the GPU kernels do not support"
    for rank in latent_ranks:
        if rank & (rank - 1) or not LEAST_DIM <= rank <= LARGEST_LATENT:
            return (
                f"latents of {rank} values (kv_lora_rank); the GPU kernels support powers of 2 from {LEAST_DIM} to "
                f"{LARGEST_LATENT}"
            )
    return None


def split_sizes(value_dim: int, max_tokens: int, *, is_invariant: bool = False) -> tuple[int, int]:
    """Return the tokens of decode's shortest splits and the largest number of splits of a context of `max_tokens`.

    With `is_invariant`, splits do not adapt to the batch, so they are long enough for large batches.
    """
    if is_invariant:
        tokens, most = (1024, 32) if value_dim >= LATENT_VALUES else (256, 64)
    else:
        tokens, most = (64, 64) if value_dim >= LATENT_VALUES else (64, 128)
    return tokens, max(1, min(most, -(-max_tokens // tokens)))


def run_of(value_dim: int) -> int:
    """Return how many splits decode may take at a time with `is_invariant` (see `runs`), or 0 if only one.

    Two sums of the widest values do not fit a program's registers.
    """
    return 0 if value_dim > WIDE_DIM else RUN


def num_parts(
    max_sequences: int, heads: int, value_dim: int, num_splits: int, *, is_invariant: bool = False
) -> int:
    """Return how many parts of splits a `DecodeScratch` holds.

    With `is_invariant`, all splits of all sequences, or all runs and as many splits as are computed one by one. Otherwise one
    for each sequence, and as many as keep a GPU busy.
    """
    most = max_sequences * num_splits
    if is_invariant:
        run = run_of(value_dim)
        return min(most, max(SINGLE_PARTS, max_sequences * -(-num_splits // run))) if run else most
    spare = min(MOST_SPARE_PARTS, max(LEAST_SPARE_PARTS, SPARE_PART_BYTES // _part_bytes(heads, value_dim)))
    return min(most, max_sequences + spare)


def _part_bytes(heads: int, value_dim: int) -> int:
    """Return the bytes of a split's values' sums, maxima and totals, float32."""
    return heads * (value_dim + 2) * 4


def scratch_bytes(
    *, max_sequences: int, heads: int, value_dim: int, max_tokens: int, is_invariant: bool = False
) -> int:
    """Return the bytes of a `DecodeScratch`."""
    _, num_splits = split_sizes(value_dim, max_tokens, is_invariant=is_invariant)
    parts = num_parts(max_sequences, heads, value_dim, num_splits, is_invariant=is_invariant)
    return parts * _part_bytes(heads, value_dim)


def score_rows(max_rows: int, max_sequences: int, max_tokens: int) -> int:
    """Return how many rows' scores of up to `max_tokens` tokens exist at once: at least those of all decodes."""
    return min(max_rows, max(max_sequences, SCORE_BYTES // (4 * max_tokens)))


def score_bytes(max_sequences: int, max_tokens: int) -> int:
    """Return the largest size of these scores in bytes."""
    return max(SCORE_BYTES, max_sequences * max_tokens * 4)


def expanded_bytes_of_token(key_dim: int, value_dim: int, itemsize: int) -> int:
    """Return the bytes per token and head while prompts' latents are expanded: the product and its copy as pages."""
    return 2 * (key_dim + value_dim) * itemsize
