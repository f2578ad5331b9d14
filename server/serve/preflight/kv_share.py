"""The default size of a rank's KV cache: one rule for engines and for `wideep size`."""

from scheduler.step.sizing import attention_bytes, cache_budget, gpu_cache_budget
from server.options.table import Options
from server.serve.preflight.memory import AttentionHeads

KV_SHARE = 0.25  # default share of free memory, over all local ranks
GPU_SHARE = 0.9  # default share of a GPU's free memory


def cpu_cache_bytes(options: Options, *, free_bytes: int, num_local_ranks: int, spare_bytes: int) -> int:
    """Return a rank's share of a machine's free memory, after the tier that all its ranks share.

    Args:
        spare_bytes: Bytes reserved for moving experts.

    Raises:
        KVMemoryError: No memory is left.
    """
    free_bytes -= options.engine.kv_offloading_bytes
    share = int(free_bytes * (options.gpu_memory_utilization or KV_SHARE)) // num_local_ranks
    return cache_budget(share, spare_bytes)


def gpu_cache_bytes(options: Options, heads: AttentionHeads, *, free_bytes: int, weight_bytes: int) -> int:
    """Estimate the bytes that remain of a GPU's share after weights, steps and attention. An engine measures them later
    (`scheduler.step.device_memory`); the estimate refuses early what cannot fit, and serves `wideep size`.

    Args:
        free_bytes: Free memory before anything is loaded.
        weight_bytes: Size of the rank's weights, including spare slots.

    Raises:
        KVMemoryError: No memory is left.
    """
    return gpu_cache_budget(free_bytes, gpu_share(options), weight_bytes, gpu_attention_bytes(options, heads))


def gpu_share(options: Options) -> float:
    """Return the share of a GPU's free memory that the service may take."""
    return options.gpu_memory_utilization or GPU_SHARE


def gpu_attention_bytes(options: Options, heads: AttentionHeads) -> int:
    """Return the bytes of attention's buffers on a GPU, for the largest number of rows that a step may decode."""
    engine = options.engine
    most_rows = (engine.max_num_seqs or 0) * (1 + engine.num_drafts)
    return attention_bytes(
        heads.heads,
        heads.value_dims,
        is_latent=heads.is_latent,
        has_index=heads.has_index,
        max_num_seqs=min(most_rows, engine.max_num_batched_tokens or most_rows),
        max_model_len=heads.max_model_len,
        is_invariant=engine.batch_invariant,
    )
