"""Rendezvous of a test's processes, and seeds: the part of `deep_ep.utils.envs` that applies without CUDA."""

import os
import random

import torch
import torch.distributed as dist
from deep_ep import get_logical_domain_size, get_physical_domain_size

__all__ = ["get_logical_domain_size", "get_physical_domain_size"]  # DeepEP's tests import them from here
DEFAULT_PORT = 8361  # DeepEP's

_local_rank = 0
_seeds = {"global": 0, "local": 0}


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Join a gloo group and return rank, number of ranks and the group of all ranks.

    Reads MASTER_ADDR and MASTER_PORT and, as DeepEP does, WORLD_SIZE as the number of nodes and RANK as this node's. Sets the
    default dtype to bfloat16, which DeepEP's tests expect. The default device stays the CPU.
    """
    global _local_rank
    _local_rank = local_rank
    num_nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", str(DEFAULT_PORT)))
    num_ranks = num_nodes * num_local_ranks
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_local_ranks))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=num_ranks,
        rank=node * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    init_seed(seed)
    return dist.get_rank(), num_ranks, dist.new_group(list(range(num_ranks)))


def init_seed(global_seed: int) -> None:
    """Seed torch and random with `global_seed` plus the rank."""
    _seeds.update({"global": global_seed, "local": global_seed + dist.get_rank()})
    torch.manual_seed(_seeds["local"])
    random.seed(_seeds["local"])


def get_local_seed() -> int:
    """Return this rank's seed."""
    return _seeds["local"]


def get_global_seed() -> int:
    """Return the seed shared by all ranks."""
    return _seeds["global"]


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print on every rank, or on the first of each node, then synchronise."""
    if not once_in_node or _local_rank == 0:
        print(s, flush=True)
    dist.barrier()


def check_nvlink_connections(group: dist.ProcessGroup) -> None:
    """Do nothing: CPUs have no NVLink to check."""


def check_torch_deterministic() -> None:
    """Do nothing: torch's own initialisation of memory is not used here."""
