"""Reject options and files that cannot work before any weight is read: one specific error, in milliseconds, without torch.

Reads config.json and the safetensors headers only.
"""

import errno
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dispatch.wires.availability import why_not_served_by
from moe.lora.adapter_config import AdapterError
from moe.lora.adapter_files import read_adapter
from moe.mtp.names import why_no_mtp
from scheduler.policy.config import why_no_adapters, why_no_compiler, why_no_fp8_rows, why_no_nodes
from server.machine.lines import say
from server.machine.model_fields import num_experts
from server.options.adapters import modules_of
from server.options.pools import Pool
from server.options.table import Options
from server.serve.preflight.adapter_room import NO_FEATURES, adapted_features
from server.serve.preflight.images import check_images, encoder_memory
from server.serve.preflight.memory import (
    NO_ENCODERS,
    ExpertMemory,
    WeightBytes,
    available_bytes,
    check_memory,
    float_bytes,
    gib,
    has_image_experts,
    in_words,
    mtp_names,
    rank_experts,
    slots_per_rank,
    weight_bytes,
)
from server.serve.preflight.model import (
    PreflightError,
    check_is_moe,
    check_length,
    check_quantisation,
    has_random_weights,
    read_config,
    read_headers,
    why_unfit,
)
from server.serve.preflight.random_weights import check_random_weights, warn_of_random_weights
from server.serve.preflight.tiers import check_tiers, note_on_hand_over
from server.serve.preflight.unix_socket import check_path


def check_start(
    options: Options,
    *,
    pool_sizes: Sequence[int],
    has_front: bool,
    gpu_bytes: int | None = None,
) -> None:
    """Check that this node can serve the model with these options.

    Args:
        options: The options; `model` is a directory.
        pool_sizes: For each rank on this node, the number of ranks of its pool.
        has_front: Whether this node listens on the HTTP port.
        gpu_bytes: Free memory of a rank's GPU; None on a CPU.

    Raises:
        PreflightError: The first problem found.
        OptionsError: --uds is unusable.
    """
    check_choices(options, pool_sizes)
    weights = check_files(options, pool_sizes)
    if has_front:
        check_random_weights(options)
        check_images(options)
    check_room(options, weights, pool_sizes=pool_sizes, gpu_bytes=gpu_bytes, has_front=has_front)
    if has_front:
        check_listener(options)
        check_adapters(options)


def check_adapters(options: Options) -> None:
    """Check the files of the adapters of the start. Whether they fit the model is checked by the ranks.

    Raises:
        PreflightError: One is not supported; the message names it.
    """
    for name, path in modules_of(options.lora_modules).items():
        try:
            read_adapter(
                Path(path), max_rank=options.engine.max_lora_rank, modules=options.lora_target_modules
            )
        except AdapterError as error:
            raise PreflightError(f"--lora-modules {name}: {error}") from error


def check_choices(options: Options, pool_sizes: Sequence[int]) -> None:
    """Check the options against the machine and the numbers of ranks, without reading the model.

    Args:
        pool_sizes: As for `check_start`.

    Raises:
        PreflightError: The first problem found.
    """
    for num_ranks in sorted(set(pool_sizes)):
        check_backend(options.engine.all2all_backend, num_ranks, on_gpus=options.device == "cuda")
        check_nodes(options.engine.dispatch_node_size, num_ranks, on_gpus=options.device == "cuda")
    check_compiler(options)
    check_activations(options)
    wire = options.engine.all2all_backend
    if options.engine.enable_lora and (problem := why_no_adapters(options.device, max(pool_sizes), wire)):
        raise PreflightError(problem)


def check_files(options: Options, pool_sizes: Sequence[int]) -> WeightBytes:
    """Check the model's files and return their size in memory. `pool_sizes` is as for `check_start`.

    Raises:
        PreflightError: The first problem found.
    """
    directory = Path(options.model)
    config = read_config(directory)
    check_is_moe(config, directory)
    check_quantisation(config, directory, asked=options.engine.quantization)
    check_length(config, options.engine.max_model_len)
    check_mtp(config, directory, options)
    weights = weight_bytes(
        directory,
        config,
        float_bytes(options),
        has_mtp=options.engine.has_mtp,
        has_image_experts=has_image_experts(options),
    )
    for num_ranks in sorted(set(pool_sizes)):
        check_placement(options.engine.expert_placement, weights, config, num_ranks)
    return weights


def check_room(
    options: Options,
    weights: WeightBytes,
    *,
    pool_sizes: Sequence[int],
    gpu_bytes: int | None,
    has_front: bool = True,
) -> ExpertMemory:
    """Check that this node's ranks, tiers and encoders fit into its memory, and return the size of the experts of its largest rank.

    Args:
        pool_sizes, gpu_bytes, has_front: As for `check_start`.

    Raises:
        PreflightError: They do not fit.
    """
    config = read_config(Path(options.model))
    experts = [rank_experts(weights, config, options, num_ranks) for num_ranks in pool_sizes]
    largest = max(experts, key=lambda each: each.serving)
    host_bytes, adapted = available_bytes(), NO_FEATURES
    if options.engine.enable_lora:
        adapted = adapted_features(Path(options.model), config, options.lora_target_modules)
    encoders = encoder_memory(options) if has_front else NO_ENCODERS
    if encoders.total_bytes > host_bytes:
        raise PreflightError(
            f"the {in_words(encoders)}, but only {gib(host_bytes)} of host memory is free. Use fewer fronts (--api-server-count), "
            "--image-encoder-device cuda, or --language-model-only, which refuses images"
        )
    counted = experts if gpu_bytes is None else [largest]  # each rank has its own GPU
    needed = check_memory(
        weights,
        counted,
        options,
        free_bytes=host_bytes if gpu_bytes is None else gpu_bytes,
        adapters=[
            adapted.rank_bytes(options.engine, each.slots_per_rank, on_gpu=gpu_bytes is not None)
            for each in counted
        ],
        encoders=encoders if gpu_bytes is None else NO_ENCODERS,
    )
    taken = needed if gpu_bytes is None else encoders.total_bytes
    check_tiers(options.engine, ranks_bytes=taken, free_bytes=host_bytes)
    return largest


def check_listener(options: Options) -> None:
    """Check that HTTP can listen on the given address.

    Raises:
        PreflightError: The port is in use, or the host does not belong to this machine.
        OptionsError: --uds is unusable.
    """
    if options.uds is None:
        check_port(options.host, options.port)
    else:
        check_path(options.uds)


def say_notes(given: Options, options: Options, pools: Sequence[Pool]) -> None:
    """Log random weights, and the defaults that a user might not expect.

    Args:
        given: The options as given. `options`: Those that serve.
    """
    warn_of_random_weights(options)
    sizes = dict.fromkeys(pool.num_ranks for pool in pools)
    for note in (
        note_on_hand_over(given, options),
        *(note_on_redundancy(options, num_ranks) for num_ranks in sizes),
    ):
        if note is not None:
            say(f"wideep: {note}")


def note_on_redundancy(options: Options, num_ranks: int) -> str | None:
    """Return a note if the number of redundant experts was rounded up to give all ranks of a pool the same number of slots.

    Args:
        options: Options that `check_start` has accepted.
    """
    asked = options.engine.eplb_config.num_redundant_experts
    if asked == 0 or options.engine.expert_placement is not None:
        return None
    experts = num_experts(read_config(Path(options.model)))
    slots = slots_per_rank(experts, num_ranks, num_redundant=asked, placement_file=None)
    kept = slots * num_ranks - experts
    if kept == asked:
        return None
    return (
        f"num_redundant_experts is {asked}, but {kept} are used: each of the {num_ranks} ranks has the same number of slots "
        f"({slots} for the {experts} experts of a layer)"
    )


def check_backend(name: str, num_ranks: int, *, on_gpus: bool = False) -> None:
    """Raise if a dispatch backend cannot work here.

    Raises:
        PreflightError: The message names the problem and an alternative.
    """
    problem = why_not_served_by(name, num_ranks, on_gpus=on_gpus)
    if problem:
        raise PreflightError(problem)


def check_nodes(node_size: int, num_ranks: int, *, on_gpus: bool) -> None:
    """Raise if the ranks do not fill their nodes, or if nodes are given for GPUs.

    Raises:
        PreflightError: The message lists the sizes that work.
    """
    if node_size and on_gpus:
        raise PreflightError(why_no_nodes(node_size))
    if node_size and num_ranks % node_size:
        sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        raise PreflightError(
            f"--dispatch-node-size is {node_size}, which does not divide {num_ranks} ranks; use one of {sizes}, or 0"
        )


def check_compiler(options: Options) -> None:
    """Raise if torch.compile conflicts with another option or the device.

    Raises:
        PreflightError: The message names the conflict and the remedy.
    """
    problem = why_no_compiler(on_gpus=options.device == "cuda", is_invariant=options.engine.batch_invariant)
    if options.engine.enable_torch_compile and problem:
        raise PreflightError(problem)


def check_activations(options: Options) -> None:
    """Raise if the device does not support --activation-dtype.

    Raises:
        PreflightError: The message names the remedy.
    """
    problem = why_no_fp8_rows(options.engine.activation_dtype)
    if options.device == "cpu" and problem:
        raise PreflightError(problem)


def check_mtp(config: dict[str, Any], directory: Path, options: Options) -> None:
    """Raise if drafts need MTP layers that the checkpoint does not have.

    Raises:
        PreflightError: The message names the missing layers, and methods that need none.
    """
    if not options.engine.has_mtp or has_random_weights(
        directory
    ):  # layers of random weights follow config.json
        return
    if not mtp_names(read_headers(directory), config).layers:
        raise PreflightError(f"--speculative-config: {why_no_mtp(config['model_type'], directory)}")


def check_placement(file: str | None, weights: WeightBytes, config: dict[str, Any], num_ranks: int) -> None:
    """Raise if the file is not a placement for this model and number of ranks. None is accepted.

    Raises:
        PreflightError: The message names the problem, or the dimensions that the placement has.
    """
    if file is None:
        return
    layers, experts = weights.expert_layers, num_experts(config)
    problem = why_unfit(file, num_layers=layers, num_experts=experts, num_ranks=num_ranks)
    if problem:
        raise PreflightError(f"--expert-placement: {problem}")


def check_port(host: str, port: int) -> None:
    """Raise if HTTP cannot listen on host:port. Port 0 means any port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise PreflightError(
            f"--host is {host!r}, which is not an address of this machine: {error.strerror}"
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        # A port in TIME_WAIT counts as free, as in uvicorn.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise PreflightError(_why_not_bound(host, port, error)) from error


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; choose another --port (0 chooses a free one)"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host is {host!r}, which is not an address of this machine; use one that is, or 0.0.0.0 for all"
    return f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port"
