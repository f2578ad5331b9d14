"""Check that a service can have another number of ranks: settings, experts, cores and memory of this machine. No torch."""

from pathlib import Path

from expert_placement.config import EplbConfigError, slots_of_rank
from server.machine.model_fields import num_experts
from server.options.table import Options
from server.serve.preflight.adapter_room import rank_adapter_bytes
from server.serve.preflight.checks import check_backend, check_nodes
from server.serve.preflight.memory import PROCESS_BYTES, available_bytes, rank_bytes, usable_cores
from server.serve.preflight.model import PreflightError, read_config

MOST_OF_AVAILABLE = 0.9  # share of free memory that a resize may take
RANKS_PER_CORE = 4  # with more, ranks mostly wait for cores


def why_no_resizes(options: Options) -> str | None:
    """Return why a service with these options can never be resized, or None if it can."""
    if options.device == "cuda":
        return "The service cannot be resized: this is not implemented on GPUs. It works with --device cpu."
    if options.pools is not None:
        return "The service cannot be resized: it has pools of fixed sizes (--pools). Without --pools it can."
    if options.has_own_pool:
        return "The service cannot be resized: torchruns add pools of fixed sizes to it (--pool). Without --pool it can."
    return None


def why_not_resized(
    options: Options, num_ranks: int, wanted: int, *, free_bytes: int | None = None, cores: int | None = None
) -> str | None:
    """Return why the service cannot change from one number of ranks to another, or None if it can.

    Args:
        free_bytes: Free memory of this machine. `cores`: Its cores. None means that they are measured.
    """
    cores = cores or usable_cores()
    try:
        experts = max(1, num_experts(read_config(Path(options.model))))
        if wanted > experts:
            return f"the model has {experts} experts in a layer, and each rank needs one"
        slots_of_rank(experts, wanted, options.engine.eplb_config.num_redundant_experts)
        check_backend(options.engine.all2all_backend, wanted)
        check_nodes(options.engine.dispatch_node_size, wanted, on_gpus=False)
        if wanted > num_ranks and wanted > RANKS_PER_CORE * cores:
            return f"this machine has {cores} cores, which are enough for {RANKS_PER_CORE * cores} ranks"
        return _why_no_room(
            options, num_ranks, wanted, available_bytes() if free_bytes is None else free_bytes
        )
    except (EplbConfigError, PreflightError) as error:
        return str(error)


def _why_no_room(options: Options, num_ranks: int, wanted: int, free_bytes: int) -> str | None:
    planned = options.with_engine(expert_placement=None)  # the file is for the number of ranks at the start
    before, after = (
        rank_bytes(planned, size) + rank_adapter_bytes(planned, size) for size in (num_ranks, wanted)
    )
    if wanted > num_ranks:
        of_rank = after + PROCESS_BYTES + (options.engine.kv_cache_bytes or 0)
        needed, what = (wanted - num_ranks) * of_rank, f"{wanted - num_ranks} more ranks"
    else:
        needed, what = wanted * max(0, after - before), f"the experts of {num_ranks - wanted} ranks"
    if needed <= MOST_OF_AVAILABLE * free_bytes:
        return None
    return (
        f"{what} take {needed / 2**30:.2f} GiB, but only {MOST_OF_AVAILABLE:.0%} of the free memory may be taken, and "
        f"{free_bytes / 2**30:.2f} GiB are free"
    )
