"""A rank's memory budget for the KV cache, and how many blocks and states it holds."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from attention.gpu.limits import EXPANDED_BYTES, score_bytes, scratch_bytes
from kvcache.paged_cache import BLOCK_TOKENS, LayerShape
from scheduler.policy.state_tables import STATES_OF_ONE, fewest_states

SNAPSHOTS_PER_SEQUENCE = 4  # that are kept at most, beside those
_FOR_SNAPSHOTS = " (one is a snapshot for later requests: --mamba-cache-mode none does without)"
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
    heads: int,
    value_dims: Sequence[int],
    *,
    is_latent: bool,
    has_index: bool,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """What attention on a GPU takes beside the pages: the parts of decodes, prompts' latents that are expanded, and an
    index's scores.

    Args:
        heads: query heads of a layer. value_dims: of a head's value, of each kind of layers; of a latent where those are
            cached.
    """
    scratch = sum(
        scratch_bytes(max_sequences=max_num_seqs, heads=heads, value_dim=dim, max_tokens=max_model_len)
        for dim in value_dims
    )
    scores = score_bytes(max_num_seqs, max_model_len) if has_index else 0
    return scratch + (EXPANDED_BYTES if is_latent else 0) + scores


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


class CacheSize(NamedTuple):
    """What a rank's cache holds."""

    num_blocks: int
    num_states: int  # slots of `kvcache.states.StatePool`; 0: the model keeps none


def cache_size(
    shapes: Sequence[LayerShape],
    *,
    kv_cache_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    has_snapshots: bool = True,
    num_drafts: int = 0,
    token_bytes: Callable[[LayerShape], int] = lambda shape: shape.token_bytes,
) -> CacheSize:
    """Choose how many blocks and state slots a rank has.

    Args:
        shapes: what each layer caches.
        kv_cache_bytes: the rank's budget, which both share.
        max_model_len: tokens one sequence may have; at least one such sequence must fit.
        max_num_seqs: sequences at once; more than all of them need is not reserved.
        has_snapshots: keep states that later requests may go on from.
        num_drafts: tokens that a step of a sequence may try.
        token_bytes: what a layer takes per token on the device (default: on a CPU).

    Raises:
        KVMemoryError: naming what is needed and what is there.
    """
    block_bytes = sum(token_bytes(shape) for shape in shapes) * BLOCK_TOKENS
    blocks_of_one = -(-max_model_len // BLOCK_TOKENS)
    state_bytes = sum(shape.state.num_bytes for shape in shapes if shape.state)
    states, left = 0, kv_cache_bytes
    if state_bytes:
        fewest = fewest_states(num_drafts=num_drafts, keeps_snapshots=has_snapshots)
        wanted = (
            max_num_seqs * (STATES_OF_ONE + num_drafts)
            + has_snapshots * SNAPSHOTS_PER_SEQUENCE * max_num_seqs
        )
        after_one = kv_cache_bytes - blocks_of_one * block_bytes
        states = min(wanted, max(fewest, kv_cache_bytes // 2 // state_bytes), after_one // state_bytes)
        if states < fewest:
            raise KVMemoryError(
                f"a request of --max-model-len {max_model_len} tokens needs {blocks_of_one * block_bytes / 2**20:.0f} MiB "
                f"of KV cache and {fewest} states of {state_bytes / 2**20:.1f} MiB{_FOR_SNAPSHOTS * has_snapshots}, and the "
                f"rank has {kv_cache_bytes / 2**20:.0f} MiB; give --kv-cache-memory more, or --max-model-len less"
            )
        left -= states * state_bytes
    blocks = min(left // block_bytes, blocks_of_one * max_num_seqs)
    if blocks < blocks_of_one:
        raise KVMemoryError(
            f"a request of --max-model-len {max_model_len} tokens needs {blocks_of_one * block_bytes / 2**20:.0f} MiB "
            f"of KV cache and the rank has {kv_cache_bytes / 2**20:.0f} MiB; give --kv-cache-memory more, or "
            f"--max-model-len {kv_cache_bytes // block_bytes * BLOCK_TOKENS} or less"
        )
    return CacheSize(blocks, states)
