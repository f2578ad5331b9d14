"""Find what cannot work before any weight is read: one named error each, in milliseconds and without torch.

Reads config.json and the safetensors headers only.
"""

import errno
import socket
from pathlib import Path
from typing import Any

from dispatch.wires.availability import why_not_served_by
from moe.mtp.names import why_no_mtp
from scheduler.policy.config import why_no_compiler, why_no_nodes
from server.model_fields import num_experts
from server.options.table import Options
from server.process.preflight.memory import (
    ExpertMemory,
    WeightBytes,
    available_bytes,
    check_memory,
    float_bytes,
    mtp_names,
    rank_experts,
    reads_mtp,
    slots_per_rank,
    weight_bytes,
)
from server.process.preflight.model import (
    PreflightError,
    check_is_moe,
    check_length,
    check_quantisation,
    read_config,
    read_headers,
    why_unfit,
)
from server.process.unix_socket import check_path


def check_start(
    options: Options,
    *,
    num_ranks: int,
    num_local_ranks: int,
    has_front: bool,
    gpu_bytes: int | None = None,
) -> None:
    """Check that the model can be served as asked on this node.

    Args:
        options: with `model` a directory.
        num_ranks: in the whole service.
        num_local_ranks: of them, on this node.
        has_front: whether this node will listen on the HTTP port.
        gpu_bytes: free memory of a rank's GPU, where they have one each.

    Raises:
        PreflightError: naming the first thing that is wrong.
        OptionsError: of --uds.
    """
    check_choices(options, num_ranks)
    weights = check_files(options, num_ranks)
    check_room(options, weights, num_ranks=num_ranks, num_local_ranks=num_local_ranks, gpu_bytes=gpu_bytes)
    if has_front:
        check_listener(options)


def check_choices(options: Options, num_ranks: int) -> None:
    """Check what was asked for against the machine and the number of ranks; reads nothing of the model.

    Raises:
        PreflightError: naming the first thing that is wrong.
    """
    check_backend(options.all2all_backend, num_ranks, on_gpus=options.device == "cuda")
    check_nodes(options.dispatch_node_size, num_ranks, on_gpus=options.device == "cuda")
    check_compiler(options)


def check_files(options: Options, num_ranks: int) -> WeightBytes:
    """Check the model's files, and return what they take in memory.

    Raises:
        PreflightError: naming the first thing that is wrong.
    """
    directory = Path(options.model)
    config = read_config(directory)
    check_is_moe(config, directory)
    check_quantisation(config, directory, asked=options.quantization)
    check_length(config, options.max_model_len)
    check_mtp(config, directory, options)
    weights = weight_bytes(directory, config, float_bytes(options), has_mtp=reads_mtp(options))
    check_placement(options.expert_placement, weights, config, num_ranks)
    return weights


def check_room(
    options: Options, weights: WeightBytes, *, num_ranks: int, num_local_ranks: int, gpu_bytes: int | None
) -> ExpertMemory:
    """Check that this node's ranks fit into its memory, and return what a rank's experts take.

    Raises:
        PreflightError: they do not.
    """
    experts = rank_experts(weights, read_config(Path(options.model)), options, num_ranks)
    check_memory(
        weights,
        experts,
        options,
        num_local_ranks=num_local_ranks if gpu_bytes is None else 1,
        free_bytes=available_bytes() if gpu_bytes is None else gpu_bytes,
    )
    return experts


def check_listener(options: Options) -> None:
    """Check that HTTP can listen where it is to.

    Raises:
        PreflightError: the port is taken, or the host is not ours.
        OptionsError: of --uds.
    """
    if options.uds is None:
        check_port(options.host, options.port)
    else:
        check_path(options.uds)


def note_on_redundancy(options: Options, num_ranks: int) -> str | None:
    """Say that more redundant experts are kept than asked for, where they do not divide by the ranks.

    Args:
        options: of a service that `check_start` let pass.
    """
    asked = options.eplb_config.num_redundant_experts
    if asked == 0 or options.expert_placement is not None:
        return None
    experts = num_experts(read_config(Path(options.model)))
    slots = slots_per_rank(experts, num_ranks, num_redundant=asked, placement_file=None)
    kept = slots * num_ranks - experts
    if kept == asked:
        return None
    return (
        f"num_redundant_experts is {asked}; {kept} are kept, because each of {num_ranks} ranks has the same number of slots "
        f"({slots} for the {experts} experts of a layer)"
    )


def check_backend(name: str, num_ranks: int, *, on_gpus: bool = False) -> None:
    """Refuse a way to exchange tokens that cannot work here.

    Raises:
        PreflightError: saying what is missing and what to use instead.
    """
    problem = why_not_served_by(name, num_ranks, on_gpus=on_gpus)
    if problem:
        raise PreflightError(problem)


def check_nodes(node_size: int, num_ranks: int, *, on_gpus: bool) -> None:
    """Refuse nodes that the ranks do not fill, and any between GPUs.

    Raises:
        PreflightError: naming the sizes that work.
    """
    if node_size and on_gpus:
        raise PreflightError(why_no_nodes(node_size))
    if node_size and num_ranks % node_size:
        sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        raise PreflightError(
            f"--dispatch-node-size is {node_size} for {num_ranks} ranks; give one of {sizes}, or 0"
        )


def check_compiler(options: Options) -> None:
    """Refuse torch.compile with what it cannot work with.

    Raises:
        PreflightError: naming it, and what to do.
    """
    problem = why_no_compiler(on_gpus=options.device == "cuda", is_invariant=options.batch_invariant)
    if options.enable_torch_compile and problem:
        raise PreflightError(problem)


def check_mtp(config: dict[str, Any], directory: Path, options: Options) -> None:
    """Refuse to draft with layers for multi-token prediction that a checkpoint does not have.

    Raises:
        PreflightError: saying what would be needed, and what needs none.
    """
    if not reads_mtp(options):
        return
    if not mtp_names(read_headers(directory), config).layers:
        raise PreflightError(f"--speculative-config: {why_no_mtp(config['model_type'], directory)}")


def check_placement(file: str | None, weights: WeightBytes, config: dict[str, Any], num_ranks: int) -> None:
    """Refuse a file that is no placement for this model on so many ranks; None is no file.

    Raises:
        PreflightError: saying what is wrong with it, or what it is a placement of.
    """
    if file is None:
        return
    layers, experts = weights.expert_layers, num_experts(config)
    problem = why_unfit(file, num_layers=layers, num_experts=experts, num_ranks=num_ranks)
    if problem:
        raise PreflightError(f"--expert-placement: {problem}")


def check_port(host: str, port: int) -> None:
    """Check that HTTP can listen on host:port (port 0: on any)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise PreflightError(
            f"--host is {host!r}, which is no address of this machine: {error.strerror}"
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        # A port in TIME_WAIT is free, as for uvicorn.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise PreflightError(_why_not_bound(host, port, error)) from error


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; give another --port (0 takes a free one)"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"--host is {host!r}, which is no address of this machine; give one that is, or 0.0.0.0 for all"
        )
    return f"cannot listen on {host} port {port}: {error.strerror}; give another --host or --port"
