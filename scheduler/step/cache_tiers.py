"""Open the tiers below a rank's KV cache."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import Store

from dispatch.wires.segment import identify_process
from kvcache.gpu.unit import DeviceUnit
from kvcache.paged_cache import BLOCK_TOKENS, PagedCache
from kvcache.tiers.early import WrittenLayers
from kvcache.tiers.opening import Kinds, open_disk, open_host
from kvcache.tiers.peers import PeerNetwork, Peers
from kvcache.tiers.records import RecordLayout, StoreError
from kvcache.tiers.remote_memory import RemoteMemoryError
from kvcache.tiers.tiers import Tiers, Units
from kvcache.unit import CacheUnit, block_parts, layout_of, parts_after, state_parts
from scheduler.policy.config import ConfigError, EngineConfig
from scheduler.policy.state_tables import STRIDE


def open_tiers(
    config: EngineConfig,
    cache: PagedCache,
    device: torch.device,
    store: Store | None,
    enter_thread: Callable[[], None],
    network: PeerNetwork | None = None,
) -> Tiers | None:
    """Return the tiers of a rank's cache, or None if none is wanted.

    Args:
        store: The job's store, where ranks of one host meet. None: the rank is alone.
        enter_thread: Called first in every new thread.
        network: How ranks of other nodes reach the tier in host memory. None if there are no others.

    Raises:
        ConfigError: The sizes, the directory or the network cannot be used. The message names what to change.
    """
    if not config.has_kv_tiers:
        return None
    unit_of = CacheUnit if device.type == "cpu" else DeviceUnit
    blocks, states = block_parts(cache), state_parts(cache)

    def make_units() -> Units:
        return Units(unit_of(blocks), unit_of(states))

    kinds = _kinds(config, cache, device, make_units())
    host = json.dumps(identify_process().host)
    tiers = []
    try:
        if config.kv_offloading_dir is not None:
            tiers.append(open_disk(Path(config.kv_offloading_dir), kinds, config.kv_offloading_disk_bytes))
        if config.kv_offloading_bytes:
            secret = tiers[0].blocks.secret if tiers else None
            size = config.kv_offloading_bytes
            tiers.insert(0, open_host(kinds, size, store=store, host=host, secret=secret))
    except StoreError as error:
        raise ConfigError(str(error)) from error
    layers = WrittenLayers(cache.progress, parts_after(cache)) if unit_of is CacheUnit else None
    opened = Tiers(tiers, make_units, enter_thread=enter_thread, layers=layers)
    if network is not None and config.kv_offloading_bytes:
        memory = hashlib.sha256(host.encode()).hexdigest()[:16]
        try:
            opened.peers = Peers(
                opened, tiers[0], network,
                memory=memory, blocks=kinds.blocks, states=kinds.states, block_tokens=BLOCK_TOKENS,
            )  # fmt: skip
        except RemoteMemoryError as error:
            opened.close()
            raise ConfigError(f"--kv-transfer-backend nixl: {error}") from error
        except OSError as error:
            opened.close()
            raise ConfigError(
                f"the KV tier cannot listen on {network.host}: {error.strerror or error}"
            ) from error
    return opened


def _kinds(config: EngineConfig, cache: PagedCache, device: torch.device, units: Units) -> Kinds:
    facts = {
        "checkpoint": config.checkpoint_facts,
        "device": device.type,
        "dtype": config.dtype,
        "quantization": str(config.quantization),
        "activation_dtype": config.activation_dtype,
        "batch_invariant": str(config.batch_invariant),
        "dispatch_dtype": config.dispatch_dtype,
    }
    software = config.software_facts
    if device.type != "cpu":  # a CPU compiles nothing, and its backends give equal bits
        facts["all2all_backend"] = config.all2all_backend
        facts["compiler"] = config.compiler if config.enable_torch_compile else ""
    if device.type == "cuda":
        software += torch.cuda.get_device_name(device)
    if config.repeats_decodes:
        facts["tokens"] = "prompts"  # earlier versions also kept blocks of generated tokens
    if config.enable_lora:
        facts["lora_dtype"] = config.lora_dtype
    model = layout_of(cache, facts)
    computing = hashlib.sha256(software.encode()).digest()
    blocks = RecordLayout(model, computing, units.blocks.num_bytes)
    if not units.states.num_bytes:
        return Kinds(blocks, None)
    # One state for every STRIDE tokens, as prompts are saved. The share depends on shapes only, not on a rank's memory, so that
    # all ranks of a node, and a rank after a restart, divide a tier alike.
    of_states = units.states.num_bytes
    of_blocks = units.blocks.num_bytes * (STRIDE // BLOCK_TOKENS)
    return Kinds(
        blocks, RecordLayout(model, computing, units.states.num_bytes), of_states / (of_states + of_blocks)
    )
