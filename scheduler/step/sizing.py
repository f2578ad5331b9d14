"""A rank's memory budget for the KV cache, and how many blocks it holds."""

from collections.abc import Callable, Sequence

from attention.gpu.limits import EXPANDED_BYTES, scratch_bytes
from kvcache.paged_cache import BLOCK_TOKENS, LayerShape

WORKSPACE_BYTES = 2 << 30  # of a GPU, for activations, graphs and logits; not measured yet


class KVMemoryError(ValueError):
    """The memory given to the KV cache does not hold one sequence of the wanted length."""


def cache_budget(share_bytes: int, spare_bytes: int) -> int:
    """What a rank's share of free memory leaves for the KV cache.

    Args:
        spare_bytes: for experts that move while serving; reserved later, so that it must not be promised now.

    Raises:
        KVMemoryError: nothing is left.
    """
    if share_bytes <= spare_bytes:
        raise KVMemoryError(
            f"the share of free memory that a rank's KV cache may take is {share_bytes / 2**20:.0f} MiB, and experts "
            f"that move while serving need {spare_bytes / 2**20:.0f} MiB of it; free some memory, use fewer redundant "
            f"experts, or give --kv-cache-memory"
        )
    return share_bytes - spare_bytes


def attention_bytes(
    heads: int, value_dim: int, *, is_latent: bool, max_num_seqs: int, max_model_len: int
) -> int:
    """What attention on a GPU takes beside the pages: the parts of decodes, and prompts' latents that are expanded.

    Args:
        heads: query heads of a layer. value_dim: of a head's value; of a latent where those are cached.
    """
    scratch = scratch_bytes(
        max_sequences=max_num_seqs, heads=heads, value_dim=value_dim, max_tokens=max_model_len
    )
    return scratch + (EXPANDED_BYTES if is_latent else 0)


def gpu_cache_budget(free_bytes: int, share: float, weight_bytes: int, attention_bytes: int) -> int:
    """What a GPU's memory leaves for the KV cache.

    Args:
        free_bytes: before anything is loaded.
        share: of it that the service may take.
        weight_bytes: of this rank, spare slots included.
        attention_bytes: see there.

    Raises:
        KVMemoryError: nothing is left.
    """
    workspace_bytes = WORKSPACE_BYTES + attention_bytes
    left = int(free_bytes * share) - weight_bytes - workspace_bytes
    if left <= 0:
        raise KVMemoryError(
            f"the GPU has {free_bytes / 2**30:.1f} GiB free, of which --gpu-memory-utilization {share:g} may be taken; "
            f"the rank's weights need {weight_bytes / 2**30:.1f} GiB of it and steps {workspace_bytes / 2**30:.1f} GiB, "
            f"which leaves nothing for the KV cache; use more ranks, fewer redundant experts, a smaller --max-num-seqs "
            f"or a smaller model"
        )
    return left


def num_blocks(
    shapes: Sequence[LayerShape],
    *,
    kv_cache_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    token_bytes: Callable[[LayerShape], int] = lambda shape: shape.token_bytes,
) -> int:
    """Choose the size of a rank's block pool.

    Args:
        shapes: what each layer caches.
        kv_cache_bytes: the rank's budget.
        max_model_len: tokens one sequence may have; at least one such sequence must fit.
        max_num_seqs: sequences at once; more than all of them need is not reserved.
        token_bytes: what a layer takes per token on the device (default: on a CPU).

    Raises:
        KVMemoryError: naming what is needed and what is there.
    """
    block_bytes = sum(token_bytes(shape) for shape in shapes) * BLOCK_TOKENS
    blocks_of_one = -(-max_model_len // BLOCK_TOKENS)
    blocks = min(kv_cache_bytes // block_bytes, blocks_of_one * max_num_seqs)
    if blocks < blocks_of_one:
        raise KVMemoryError(
            f"a request of --max-model-len {max_model_len} tokens needs {blocks_of_one * block_bytes / 2**20:.0f} MiB "
            f"of KV cache and the rank has {kv_cache_bytes / 2**20:.0f} MiB; give --kv-cache-memory more, or "
            f"--max-model-len {kv_cache_bytes // block_bytes * BLOCK_TOKENS} or less"
        )
    return blocks
