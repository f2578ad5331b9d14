"""A rank's memory budget for the KV cache, and the number of blocks and states that fit."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from attention.gpu.limits import EXPANDED_BYTES, score_bytes, scratch_bytes
from kvcache.paged_cache import BLOCK_TOKENS, LayerShape
from scheduler.policy.state_tables import STATES_OF_ONE, fewest_states

SNAPSHOTS_PER_SEQUENCE = 4  # kept at most, in addition to the states of running sequences
_FOR_SNAPSHOTS = " (one of them for a snapshot for later requests; --mamba-cache-mode none needs none)"
# Of a GPU, for activations, graphs and logits: an estimate before anything is loaded. An engine measures them.
WORKSPACE_BYTES = 2 << 30


class KVMemoryError(ValueError):
    """The memory given to the KV cache cannot hold one sequence of the requested length."""


def cache_budget(share_bytes: int, spare_bytes: int) -> int:
    """Return what a rank's share of free memory leaves for the KV cache.

    Args:
        spare_bytes: For experts that move while serving. Allocated later, so it must not be promised now.

    Raises:
        KVMemoryError: Nothing is left.
    """
    if share_bytes <= spare_bytes:
        raise KVMemoryError(
            f"the KV cache may take {share_bytes / 2**20:.0f} MiB, the rank's share of free memory, but experts "
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
    is_invariant: bool = False,
) -> int:
    """Return what attention on a GPU needs in addition to the pages: partial results of decodes, expanded latents of
    prompts, and an index's scores.

    Args:
        heads: Query heads of a layer. value_dims: Dimension of a head's value for each kind of layer; of a latent if
            the layer caches latents.
        is_invariant: Bits must not depend on the batch, which needs more partial results.
    """
    scratch = sum(
        scratch_bytes(
            max_sequences=max_num_seqs,
            heads=heads,
            value_dim=dim,
            max_tokens=max_model_len,
            is_invariant=is_invariant,
        )
        for dim in value_dims
    )
    scores = score_bytes(max_num_seqs, max_model_len) if has_index else 0
    return scratch + (EXPANDED_BYTES if is_latent else 0) + scores


def gpu_cache_budget(free_bytes: int, share: float, weight_bytes: int, attention_bytes: int) -> int:
    """Estimate what a GPU's memory leaves for the KV cache.

    Args:
        free_bytes: Free memory before anything is loaded.
        share: Share of it that the service may take.
        weight_bytes: Weights of this rank, spare slots included.
        attention_bytes: Result of `attention_bytes`.

    Raises:
        KVMemoryError: Nothing is left.
    """
    workspace_bytes = WORKSPACE_BYTES + attention_bytes
    left = int(free_bytes * share) - weight_bytes - workspace_bytes
    if left <= 0:
        raise KVMemoryError(
            f"the GPU has {free_bytes / 2**30:.1f} GiB free, of which --gpu-memory-utilization allows {share:g}; "
            f"the rank's weights need {weight_bytes / 2**30:.1f} GiB of it and steps about {workspace_bytes / 2**30:.1f} GiB, "
            f"which leaves nothing for the KV cache; use more ranks, fewer redundant experts, a smaller --max-num-seqs "
            f"or a smaller model"
        )
    return left


class CacheSize(NamedTuple):
    """Capacity of a rank's cache."""

    num_blocks: int
    num_states: int  # slots of `kvcache.states.StatePool`; 0 if the model keeps no states


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
    """Choose the number of blocks and state slots of a rank.

    Args:
        shapes: What each layer caches.
        kv_cache_bytes: The rank's budget for both.
        max_model_len: Most tokens of a sequence. At least one such sequence must fit.
        max_num_seqs: Most concurrent sequences. No more memory is reserved than all of them need.
        has_snapshots: Keep states from which later requests may continue.
        num_drafts: Most drafts in a step of a sequence.
        token_bytes: Returns a layer's bytes per token on the device. Defaults to those on a CPU.

    Raises:
        KVMemoryError: The message names the memory needed and available.
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
                f"rank has {kv_cache_bytes / 2**20:.0f} MiB; increase --kv-cache-memory or reduce --max-model-len"
            )
        left -= states * state_bytes
    blocks = min(left // block_bytes, blocks_of_one * max_num_seqs)
    if blocks < blocks_of_one:
        raise KVMemoryError(
            f"a request of --max-model-len {max_model_len} tokens needs {blocks_of_one * block_bytes / 2**20:.0f} MiB "
            f"of KV cache and the rank has {kv_cache_bytes / 2**20:.0f} MiB; increase --kv-cache-memory, or reduce "
            f"--max-model-len to {kv_cache_bytes // block_bytes * BLOCK_TOKENS} or less"
        )
    return CacheSize(blocks, states)
