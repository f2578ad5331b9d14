"""The memory of a rank: weights, slots with redundancy, room for moving experts, buffers, KV cache and states.

It calls the functions of a start, with the device's memory instead of the machine's free memory, so the result equals the
report of a service with these flags. Tensor parallelism, which WideEP does not support, is computed for comparison.
"""

from typing import Any, NamedTuple

from kvcache.paged_cache import BLOCK_TOKENS, LayerShape
from scheduler.policy.config import why_no_adapters
from scheduler.step.sizing import WORKSPACE_BYTES, CacheSize, KVMemoryError, cache_size
from server.options.table import Options
from server.serve.preflight.kv_share import GPU_SHARE, cpu_cache_bytes, gpu_attention_bytes, gpu_cache_bytes
from server.serve.preflight.memory import AttentionHeads, rank_experts
from server.serve.preflight.model import PreflightError
from server.tools.size.costs.device_table import Device
from server.tools.size.costs.read_model import ReadModel
from server.tools.size.costs.roofline import WIDEEP, WIDEEP_CPU, EngineTraits


class SizeError(ValueError):
    """The requested deployment is not possible; the message names the bound."""


class RankMemory(NamedTuple):
    """One rank's memory, in bytes unless stated otherwise."""

    total: int  # of the device, or the rank's share of the machine
    shared_weights: int
    expert_weights: int  # all slots
    spare_experts: int  # room for moving experts
    adapters: int  # most that LoRA adapters may take
    buffers: int  # activations, graphs, partial results of attention
    kv_cache: int  # including states
    host_tier: int  # a CPU rank's share of the node's tier; 0 on a GPU
    slots_per_rank: int  # per layer
    num_redundant: int  # slots per layer in addition to one per expert
    token_bytes: int  # KV cache of one token in all layers
    state_bytes: int  # of one sequence
    kv_tokens: int
    num_states: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return self._asdict()


class TierSize(NamedTuple):
    """A tier of the KV cache, which the ranks of a node share."""

    name: str
    num_bytes: int
    tokens: int  # that fit, if it holds no states

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return self._asdict()


def tier_sizes(options: Options, token_bytes: int) -> tuple[TierSize, ...]:
    """Return the tiers that these options add to each node.

    Args:
        token_bytes: KV cache of one token in all layers; a tier holds blocks as the device does.
    """
    engine = options.engine
    block_bytes = max(1, token_bytes * BLOCK_TOKENS)
    return tuple(
        TierSize(name, num_bytes, num_bytes // block_bytes * BLOCK_TOKENS)
        for name, num_bytes in (
            ("host memory", engine.kv_offloading_bytes),
            ("disk", engine.kv_offloading_disk_bytes),
        )
        if num_bytes
    )


def rank_memory(model: ReadModel, device: Device, options: Options, num_ranks: int) -> RankMemory:
    """Return the memory of a rank.

    Args:
        options: Options of a start, with limits filled in.

    Raises:
        SizeError: The model does not fit; the message has the difference, or the room for the KV cache.
    """
    wire = options.engine.all2all_backend
    if options.engine.enable_lora and (problem := why_no_adapters(options.device, num_ranks, wire)):
        raise SizeError(problem)
    try:
        experts = rank_experts(model.weights, dict(model.config), options, num_ranks)
    except PreflightError as error:  # more redundant experts than these ranks can use
        raise SizeError(str(error)) from error
    adapters = model.adapted.rank_bytes(options.engine, experts.slots_per_rank, on_gpu=not device.is_cpu)
    weights = model.weights.shared + experts.serving + experts.spare + adapters
    local_ranks = min(num_ranks, device.node_ranks)
    total = device.memory_bytes // (local_ranks if device.is_cpu else 1)
    buffers = 0 if device.is_cpu else WORKSPACE_BYTES + gpu_attention_bytes(options, heads_of(model))
    host_tier = options.engine.kv_offloading_bytes // local_ranks if device.is_cpu else 0
    if host_tier:  # the default KV cache is a share of what it leaves
        _check_fits(device, total, weights + buffers, options.engine.kv_cache_bytes or 0, host_tier)
    try:
        kv_bytes = options.engine.kv_cache_bytes or _default_kv_bytes(
            model, device, options, weights, experts.spare, local_ranks
        )
        size = _cache_size(model, device, options, kv_bytes)
    except KVMemoryError as error:
        raise SizeError(str(error)) from error
    _check_fits(device, total, weights + buffers, kv_bytes, host_tier)
    of_layer = experts.slots_per_rank * num_ranks
    return RankMemory(
        total=total,
        shared_weights=model.weights.shared,
        expert_weights=experts.serving,
        spare_experts=experts.spare,
        adapters=adapters,
        buffers=buffers,
        kv_cache=kv_bytes,
        host_tier=host_tier,
        slots_per_rank=experts.slots_per_rank,
        num_redundant=of_layer - model.costs.num_experts,
        token_bytes=sum(token_bytes(shape, device) for shape in model.shapes),
        state_bytes=sum(shape.state.num_bytes for shape in model.shapes if shape.state),
        kv_tokens=size.num_blocks * BLOCK_TOKENS,
        num_states=size.num_states,
    )


def _check_fits(device: Device, total: int, rank_bytes: int, kv_bytes: int, host_tier: int) -> None:
    """Raise if the parts of a rank exceed the memory that it has. `rank_bytes`: weights, adapters and buffers."""
    needed = rank_bytes + kv_bytes + host_tier
    if needed <= total:
        return
    tier = f", {host_tier / 2**30:.1f} of its node's tier in host memory" if host_tier else ""
    raise SizeError(
        f"a rank needs {needed / 2**30:.1f} GiB ({rank_bytes / 2**30:.1f} of weights, adapters and buffers, {kv_bytes / 2**30:.1f} of KV "
        f"cache{tier}), but {device.name} has {total / 2**30:.1f} GiB per rank; use more ranks, fewer redundant experts or a "
        f"smaller {'--kv-offloading-size' if host_tier else 'model'}"
    )


def heads_of(model: ReadModel) -> AttentionHeads:
    """Return the dimensions that determine the size of attention's buffers."""
    return AttentionHeads(model.heads, model.value_dims, model.is_latent, model.has_index, model.longest)


def engine_of(device: Device, options: Options) -> EngineTraits:
    """Return WideEP's traits on a device. Scales of a KV cache in 8 bits count as nothing in a step's time."""
    engine = WIDEEP_CPU if device.is_cpu else WIDEEP
    return engine if options.engine.kv_cache_dtype == "auto" else engine._replace(kv_bytes=1)


def token_bytes(shape: LayerShape, device: Device) -> int:
    """Return the cache bytes of one layer per token: bfloat16 on a GPU, float32 on a CPU, or codes."""
    return shape.token_bytes if device.is_cpu else shape.device_token_bytes(2)


def _default_kv_bytes(
    model: ReadModel, device: Device, options: Options, weights: int, spare: int, local_ranks: int
) -> int:
    if not device.is_cpu:
        return gpu_cache_bytes(options, heads_of(model), free_bytes=device.memory_bytes, weight_bytes=weights)
    return cpu_cache_bytes(
        options, free_bytes=device.memory_bytes, num_local_ranks=local_ranks, spare_bytes=spare
    )


def _cache_size(model: ReadModel, device: Device, options: Options, kv_bytes: int) -> CacheSize:
    engine = options.engine
    assert engine.max_num_seqs, "limits are filled in"
    return cache_size(
        model.shapes,
        kv_cache_bytes=kv_bytes,
        max_model_len=model.longest,
        max_num_seqs=engine.max_num_seqs,
        has_snapshots=engine.keeps_snapshots,
        num_drafts=engine.num_drafts,
        token_bytes=lambda shape: token_bytes(shape, device),
    )


def replica_tokens(model: ReadModel, device: Device, options: Options, ways: int, *, local_ranks: int) -> int:
    """Return the KV cache tokens of one replica split over `ways` devices by tensor parallelism, or 0 if it does not fit.

    Every device holds its part of all weights and, as far as they can be split, of the KV heads; latents are whole.

    Args:
        local_ranks: Number of ranks that share a CPU's memory.
    """
    cut = model.costs.cut(ways)
    share = options.gpu_memory_utilization or GPU_SHARE
    free = device.memory_bytes // local_ranks if device.is_cpu else int(device.memory_bytes * share)
    left = free - cut.shared_bytes - cut.all_experts_bytes - (0 if device.is_cpu else WORKSPACE_BYTES)
    left = min(left, options.engine.kv_cache_bytes or left)
    number_bytes = engine_of(device, options).kv_bytes
    per_token = sum(
        count * (each.cached_numbers + each.index_numbers) * number_bytes for count, each in cut.layers
    )
    return max(0, int(left // max(1, per_token)))
