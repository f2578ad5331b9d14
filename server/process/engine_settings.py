"""What a rank's engine is set to: the command line, the rank's place, and what the machine has to give."""

from pathlib import Path

import torch

from scheduler.policy.config import DispatchMode, EngineConfig, HalfThresholds
from scheduler.step.sizing import cache_budget, gpu_cache_budget
from server.options.command_line import Options
from server.process.preflight.machine import available_bytes
from server.process.preflight.rank_memory import rank_bytes, spare_bytes
from server.process.rendezvous import Place

KV_SHARE = 0.25  # of free memory over the local ranks, where the user says nothing
GPU_SHARE = 0.9  # of a GPU's free memory, likewise


def engine_config(options: Options, place: Place) -> EngineConfig:
    """Return one rank's settings; what is not given takes a share of the memory that is free now."""
    assert options.max_num_seqs and options.max_num_batched_tokens, "the supervisor fills limits in"
    return EngineConfig(
        directory=Path(options.model),
        rank=place.rank,
        world_size=place.world_size,
        num_local_ranks=place.local_world_size,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        device=f"cuda:{place.local_rank}" if options.device == "cuda" else "cpu",
        dtype=options.dtype,
        enforce_eager=options.enforce_eager,
        compiler="inductor" if options.enable_torch_compile else "",
        halves=_halves(options),
        batch_invariant=options.batch_invariant,
        kv_cache_bytes=options.kv_cache_bytes or _default_cache_bytes(options, place),
        enable_prefix_caching=options.enable_prefix_caching,
        all2all_backend=options.all2all_backend,
        dispatch_mode=DispatchMode(options.dispatch_mode),
        dispatch_dtype=options.dispatch_dtype,
        dispatch_node_size=options.dispatch_node_size,
        eplb=options.eplb_config,
        placement_file=Path(options.expert_placement) if options.expert_placement else None,
        threads=options.threads or 1,
        timeout_s=options.distributed_timeout_s,
    )


def _halves(options: Options) -> HalfThresholds | None:
    if not options.enable_dbo:
        return None
    return HalfThresholds(options.dbo_decode_token_threshold, options.dbo_prefill_token_threshold)


def _default_cache_bytes(options: Options, place: Place) -> int:
    """This rank's share of what is free, less what experts need that move."""
    if options.device == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(place.local_rank)
        gpu_share = options.gpu_memory_utilization or GPU_SHARE
        return gpu_cache_budget(free_bytes, gpu_share, rank_bytes(options, place.world_size))
    share = int(available_bytes() * (options.gpu_memory_utilization or KV_SHARE)) // place.local_world_size
    return cache_budget(share, spare_bytes(options, place.world_size))
