"""What fits on a rank: weights, slots with redundancy, memory for experts that move, buffers, KV cache and states.

The same functions that a start calls, with a device's memory in place of what a machine has free: what this says is what
a service of these flags reports. Tensor parallelism, which WideEP does not do, is counted beside it for comparison.
"""

from typing import Any, NamedTuple

from kvcache.paged_cache import BLOCK_TOKENS, LayerShape
from scheduler.step.sizing import WORKSPACE_BYTES, CacheSize, KVMemoryError, cache_size
from server.options.table import Options
from server.process.preflight.kv_share import (
    GPU_SHARE,
    cpu_cache_bytes,
    gpu_attention_bytes,
    gpu_cache_bytes,
)
from server.process.preflight.memory import AttentionHeads, rank_experts
from server.process.preflight.model import PreflightError
from server.sizing.devices import Device
from server.sizing.read_model import ReadModel


class SizeError(ValueError):
    """What was asked for cannot be had; the message says which bound forbids it."""


class RankMemory(NamedTuple):
    """One rank's memory, in bytes where nothing else is said."""

    total: int  # of the device, or the rank's share of the machine's
    shared_weights: int
    expert_weights: int  # all slots
    spare_experts: int  # for experts that move
    buffers: int  # activations, graphs, attention's parts
    kv_cache: int  # with states
    slots_per_rank: int  # of a layer
    num_redundant: int  # slots of a layer beyond one for each expert
    token_bytes: int  # KV of one token, all layers
    state_bytes: int  # of one sequence
    kv_tokens: int
    num_states: int

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return self._asdict()


def rank_memory(model: ReadModel, device: Device, options: Options, num_ranks: int) -> RankMemory:
    """Count what a rank holds.

    Args:
        options: as a start fills them in, with limits.

    Raises:
        SizeError: it does not fit; the message says by how much, or what is left for the KV cache.
    """
    try:
        experts = rank_experts(model.weights, dict(model.config), options, num_ranks)
    except PreflightError as error:  # more redundant experts than these ranks have a use for
        raise SizeError(str(error)) from error
    weights = model.weights.shared + experts.serving + experts.spare
    local_ranks = min(num_ranks, device.node_ranks)
    total = device.memory_bytes // (local_ranks if device.is_cpu else 1)
    buffers = 0 if device.is_cpu else WORKSPACE_BYTES + gpu_attention_bytes(options, heads_of(model))
    try:
        kv_bytes = options.kv_cache_bytes or _default_kv_bytes(
            model, device, options, weights, experts.spare, local_ranks
        )
        size = _cache_size(model, device, options, kv_bytes)
    except KVMemoryError as error:
        raise SizeError(str(error)) from error
    needed = weights + buffers + kv_bytes
    if needed > total:
        raise SizeError(
            f"a rank needs {needed / 2**30:.1f} GiB ({weights / 2**30:.1f} of weights, {kv_bytes / 2**30:.1f} of KV cache) "
            f"and {device.name} has {total / 2**30:.1f} GiB for it; use more ranks, fewer redundant experts or a smaller "
            f"model"
        )
    of_layer = experts.slots_per_rank * num_ranks
    return RankMemory(
        total=total,
        shared_weights=model.weights.shared,
        expert_weights=experts.serving,
        spare_experts=experts.spare,
        buffers=buffers,
        kv_cache=kv_bytes,
        slots_per_rank=experts.slots_per_rank,
        num_redundant=of_layer - model.costs.num_experts,
        token_bytes=sum(token_bytes(shape, device) for shape in model.shapes),
        state_bytes=sum(shape.state.num_bytes for shape in model.shapes if shape.state),
        kv_tokens=size.num_blocks * BLOCK_TOKENS,
        num_states=size.num_states,
    )


def heads_of(model: ReadModel) -> AttentionHeads:
    """What attention's buffers are counted by."""
    return AttentionHeads(model.heads, model.value_dims, model.is_latent, model.has_index, model.longest)


def token_bytes(shape: LayerShape, device: Device) -> int:
    """Of cache that one layer takes per token: bfloat16 on a GPU, float32 on a CPU."""
    return shape.token_bytes if device.is_cpu else 2 * shape.token_numbers


def _default_kv_bytes(
    model: ReadModel, device: Device, options: Options, weights: int, spare: int, local_ranks: int
) -> int:
    if not device.is_cpu:
        return gpu_cache_bytes(options, heads_of(model), free_bytes=device.memory_bytes, weight_bytes=weights)
    return cpu_cache_bytes(
        options, free_bytes=device.memory_bytes, num_local_ranks=local_ranks, spare_bytes=spare
    )


def _cache_size(model: ReadModel, device: Device, options: Options, kv_bytes: int) -> CacheSize:
    assert options.max_num_seqs, "limits are filled in"
    speculative = options.speculative
    return cache_size(
        model.shapes,
        kv_cache_bytes=kv_bytes,
        max_model_len=model.longest,
        max_num_seqs=options.max_num_seqs,
        has_snapshots=options.enable_prefix_caching and options.mamba_cache_mode != "none",
        num_drafts=speculative.num_drafts if speculative else 0,
        token_bytes=lambda shape: token_bytes(shape, device),
    )


def replica_tokens(model: ReadModel, device: Device, options: Options, ways: int, *, local_ranks: int) -> int:
    """Tokens of KV cache of one replica cut over `ways` devices by tensor parallelism; 0 where it does not fit.

    Every device holds its part of all weights, and of the KV heads as far as they can be cut; latents whole.

    Args:
        local_ranks: among which a CPU's memory is shared out.
    """
    cut = model.costs.cut(ways)
    share = options.gpu_memory_utilization or GPU_SHARE
    free = device.memory_bytes // local_ranks if device.is_cpu else int(device.memory_bytes * share)
    left = free - cut.shared_bytes - cut.all_experts_bytes - (0 if device.is_cpu else WORKSPACE_BYTES)
    left = min(left, options.kv_cache_bytes or left)
    number_bytes = 4 if device.is_cpu else 2
    per_token = sum(
        count * (each.cached_numbers + each.index_numbers) * number_bytes for count, each in cut.layers
    )
    return max(0, left // max(1, per_token))
