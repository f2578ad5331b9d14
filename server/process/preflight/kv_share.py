"""What a rank gives its KV cache where the user says nothing: one rule, for engines that start and for `wideep size`."""

from scheduler.step.sizing import attention_bytes, cache_budget, gpu_cache_budget
from server.options.table import Options
from server.process.preflight.memory import AttentionHeads

KV_SHARE = 0.25  # of free memory over the local ranks, where the user says nothing
GPU_SHARE = 0.9  # of a GPU's free memory, likewise


def cpu_cache_bytes(options: Options, *, free_bytes: int, num_local_ranks: int, spare_bytes: int) -> int:
    """A rank's share of a machine's free memory.

    Args:
        spare_bytes: for experts that move.

    Raises:
        KVMemoryError: nothing is left.
    """
    share = int(free_bytes * (options.gpu_memory_utilization or KV_SHARE)) // num_local_ranks
    return cache_budget(share, spare_bytes)


def gpu_cache_bytes(options: Options, heads: AttentionHeads, *, free_bytes: int, weight_bytes: int) -> int:
    """What is left of a GPU.

    Args:
        free_bytes: before anything is loaded.
        weight_bytes: of the rank, spare slots included.

    Raises:
        KVMemoryError: nothing is.
    """
    share = options.gpu_memory_utilization or GPU_SHARE
    return gpu_cache_budget(free_bytes, share, weight_bytes, gpu_attention_bytes(options, heads))


def gpu_attention_bytes(options: Options, heads: AttentionHeads) -> int:
    """What attention on a GPU takes beside the pages, for the most rows that a step may decode."""
    num_drafts = options.speculative.num_drafts if options.speculative else 0
    most_rows = (options.max_num_seqs or 0) * (1 + num_drafts)
    return attention_bytes(
        heads.heads,
        heads.value_dims,
        is_latent=heads.is_latent,
        has_index=heads.has_index,
        max_num_seqs=min(most_rows, options.max_num_batched_tokens or most_rows),
        max_model_len=heads.max_model_len,
    )
