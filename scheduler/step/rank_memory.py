"""Give a rank's KV cache what its device's memory leaves, after the other parts were measured."""

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from kvcache.paged_cache import BLOCK_TOKENS, PagedCache
from moe.model import Model, Skeleton
from scheduler.policy.config import ConfigError, EngineConfig
from scheduler.policy.state_tables import fewest_states
from scheduler.sampling.sampler import Sampler
from scheduler.step.device_memory import DeviceMemory, Measured, Measurement, expansion_bytes, run_largest
from scheduler.step.groups import first_problem
from scheduler.step.parts import estimate_graphs
from scheduler.step.sizing import CacheSize, KVMemoryError, cache_size


class CacheShare(NamedTuple):
    """The size of a rank's cache, and its reason."""

    kv_cache_bytes: int
    size: CacheSize
    memory: str


def size_of_cache(
    config: EngineConfig, skeleton: Skeleton, max_model_len: int, kv_cache_bytes: int
) -> CacheSize:
    """Return the number of blocks and states in a cache of this many bytes.

    Raises:
        ConfigError: A setting is for models with recurrent layers only.
        KVMemoryError: One sequence does not fit.
    """
    if config.mamba_cache_mode is not None and not any(shape.state for shape in skeleton.cache_shapes):
        raise ConfigError(
            f"--mamba-cache-mode {config.mamba_cache_mode} is for models with recurrent layers, and "
            f"{skeleton.model.config.model_type} has none: remove it"
        )
    return cache_size(
        skeleton.cache_shapes,
        kv_cache_bytes=kv_cache_bytes,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        has_snapshots=config.keeps_snapshots,
        num_drafts=config.num_drafts,
        token_bytes=skeleton.backend.token_bytes,
    )


def measure(
    config: EngineConfig,
    model: Model,
    sampler: Sampler,
    memory: DeviceMemory,
    measurement: Measurement,
    *,
    replays: bool,
    report: Callable[[int, int], None],
) -> Measured:
    """Run the largest step and capture a few graphs, on a cache that is just large enough. Collective.

    Raises:
        KVMemoryError: The device has not enough memory.
    """
    backend, shapes, step = model.skeleton.backend, model.skeleton.cache_shapes, model.step
    tokens = min(config.max_num_batched_tokens, config.max_model_len or config.max_num_batched_tokens)
    states = fewest_states(num_drafts=config.num_drafts, keeps_snapshots=config.keeps_snapshots)
    num_states = states if any(shape.state for shape in shapes) else 0

    def run(cache: PagedCache) -> None:
        backend.warm_up(model, cache, report)
        run_largest(model, cache, sampler, config.max_decode_tokens)

    found = measurement.measure(
        lambda: backend.make_cache(shapes, -(-tokens // BLOCK_TOKENS), num_states, step),
        run,
        lambda cache: estimate_graphs(model, cache, memory, replays=replays),
    )
    return found._replace(step=found.step + expansion_bytes(shapes))


def share_out(
    config: EngineConfig,
    skeleton: Skeleton,
    max_model_len: int,
    measured: Measured,
    group: dist.ProcessGroup | None,
) -> CacheShare:
    """Give the cache what the measured parts leave. Collective: if one rank has too little memory, all raise.

    Raises:
        KVMemoryError: A rank has not enough memory for one sequence, or for the given size.
    """
    found, problem = None, None
    try:
        num_bytes = config.kv_cache_bytes
        if config.memory_bytes is None:
            measured.check(num_bytes)
        else:
            num_bytes = measured.cache_bytes(config.memory_bytes)
        size = size_of_cache(config, skeleton, max_model_len, num_bytes)
        found = CacheShare(num_bytes, size, f"{measured.in_words}, KV cache {num_bytes / 2**30:.2f} GiB")
    except KVMemoryError as error:
        problem = str(error)
        if measured.in_words not in problem:
            problem += f"; measured: {measured.in_words}"
    if (first := first_problem(problem, group)) is not None:
        raise KVMemoryError(first)
    assert found is not None, "a rank without a problem has a size"
    return found
