"""Which heads the GPU kernels take: said once when a model is built, and checked again at every launch."""

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_DIM, LARGEST_DIM = 16, 256  # of a key or a value: a product on tensor cores, and what registers hold
LARGEST_LATENT = 512
MAX_GROUP = 64  # query heads of a KV head, the rows of one product


def check_heads(heads: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Raise ValueError where paged decode or prefill lack a shape or type."""
    if dtype not in DTYPES:
        raise ValueError(f"attention in {dtype} has no GPU kernel; there are bfloat16, float16 and float32")
    if kv_heads < 1 or heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise ValueError(
            f"{heads} query heads on {kv_heads} KV heads have no GPU kernel; "
            f"each KV head takes the same number of query heads, at most {MAX_GROUP}"
        )
    if not LEAST_DIM <= min(key_dim, value_dim) <= max(key_dim, value_dim) <= LARGEST_DIM:
        raise ValueError(
            f"heads with keys of {key_dim} and values of {value_dim} have no GPU kernel; "
            f"there are {LEAST_DIM} to {LARGEST_DIM}"
        )


def check_latents(latent_dim: int, rope_dim: int, dtype: torch.dtype) -> None:
    """Raise ValueError where absorbed latent decode lacks a shape or type."""
    if dtype not in DTYPES:
        raise ValueError(f"attention in {dtype} has no GPU kernel; there are bfloat16, float16 and float32")
    if latent_dim & (latent_dim - 1) or not LEAST_DIM <= latent_dim <= LARGEST_LATENT:
        raise ValueError(
            f"latent_dim is {latent_dim}; the kernel takes powers of 2 from {LEAST_DIM} to {LARGEST_LATENT} "
            "(512 in every known model)"
        )
    if not 0 < rope_dim <= 128:
        raise ValueError(f"the rotary part of latents is {rope_dim}; the kernel takes 1 to 128")


def check_layout(query_THD: Tensor, *pages: Tensor) -> None:
    """Raise ValueError where a kernel would read other numbers than are meant."""
    _, heads, dim = query_THD.shape
    if query_THD.stride(2) != 1 or (heads > 1 and query_THD.stride(1) != dim):
        raise ValueError(
            f"the query's heads lie {query_THD.stride(1)} and its dims {query_THD.stride(2)} numbers apart; "
            f"the kernels take {dim} and 1: call contiguous() on it"
        )
    for page in pages:
        if page.dtype != query_THD.dtype:
            raise ValueError(
                f"the query is {query_THD.dtype} and the pages are {page.dtype}; they must be alike"
            )
        if not page.is_contiguous():
            raise ValueError(
                "the pages are no contiguous tensor; the kernels take one layer's pages as allocated"
            )


def check_tile(tokens: int, block_tokens: int) -> None:
    """Raise ValueError where a tile does not consist of whole blocks."""
    if tokens % block_tokens:
        raise ValueError(
            f"a tile has {tokens} tokens; the kernels take multiples of a block's {block_tokens}"
        )
