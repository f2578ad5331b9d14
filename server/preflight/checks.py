"""Find what cannot work before any weight is read: one named error each, in milliseconds and without torch.

Reads config.json and the safetensors headers only. What it says about experts is a first look by field names; the
authoritative check, against the model's own code, comes when moe builds the model.
"""

import errno
import json
import math
import re
import socket
from pathlib import Path
from typing import Any, NamedTuple

from dispatch.availability import check_service_backend
from moe.quantisation import UnservedQuantisationError, read_quantisation
from server.options.command_line import Options
from server.preflight.expert_memory import ExpertMemory, expert_memory, slots_per_rank
from server.preflight.machine import available_bytes
from server.preflight.start_file import why_unfit

EXPERT_COUNT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length")
_FLOAT_BYTES = {
    "auto": 4,
    "float32": 4,
    "bfloat16": 2,
}  # what a weight takes, by --dtype (D9: auto is fp32 on CPU)
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "F8_E4M3": 8,
    "F8_E8M0": 8,
}  # fmt: skip
_PROCESS_BYTES = 300 << 20  # a rank without weights: Python and torch take 220 MB, buffers the rest
_OTHER_FORMATS = ("*.bin", "*.gguf", "*.pt", "*.pth")
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


class PreflightError(ValueError):
    """The service cannot be started as asked; the message says why and what to do."""


class WeightBytes(NamedTuple):
    """What a checkpoint takes in memory once loaded, in bytes."""

    shared: int  # on every rank
    experts: int  # spread over all ranks
    expert_layers: int = (
        1  # layers that have experts; such as predict more tokens, past the model's last, left out
    )


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
    """
    check_backend(options.all2all_backend, num_ranks, on_gpus=options.device == "cuda")
    check_nodes(options.dispatch_node_size, num_ranks)
    directory = Path(options.model)
    config = read_config(directory)
    check_is_moe(config, directory)
    check_quantisation(config, directory)
    check_length(config, options.max_model_len)
    weights = weight_bytes(directory, config, float_bytes(options))
    check_placement(options.expert_placement, weights, config, num_ranks)
    check_memory(
        weights,
        rank_experts(weights, config, options, num_ranks),
        options,
        num_local_ranks=num_local_ranks if gpu_bytes is None else 1,
        free_bytes=available_bytes() if gpu_bytes is None else gpu_bytes,
    )
    if has_front:
        check_port(options.host, options.port)


def check_backend(name: str, num_ranks: int, *, on_gpus: bool = False) -> None:
    """Refuse a way to exchange tokens that cannot work here.

    Raises:
        PreflightError: saying what is missing and what to use instead.
    """
    problem = check_service_backend(name, num_ranks, on_gpus=on_gpus)
    if problem:
        raise PreflightError(problem)


def check_nodes(node_size: int, num_ranks: int) -> None:
    """Refuse nodes that the ranks do not fill.

    Raises:
        PreflightError: naming the sizes that work.
    """
    if node_size and num_ranks % node_size:
        sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        raise PreflightError(
            f"--dispatch-node-size is {node_size} for {num_ranks} ranks; give one of {sizes}, or 0"
        )


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


def read_config(directory: Path) -> dict[str, Any]:
    """Return a model directory's config.json."""
    if not directory.exists():
        raise PreflightError(f"the model path {directory} does not exist")
    if not directory.is_dir():
        raise PreflightError(
            f"the model path {directory} is a file; give the directory that holds config.json"
        )
    path = directory / "config.json"
    if not path.is_file():
        raise PreflightError(f"{directory} is not a model directory: it has no config.json")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise PreflightError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise PreflightError(f"{path} is not a JSON object")
    return config


def check_is_moe(config: dict[str, Any], directory: Path) -> None:
    """Check that a config has experts."""
    if num_experts(config) < 2:
        raise PreflightError(
            f"{directory} is not a Mixture-of-Experts model: its config.json (model_type "
            f"{config.get('model_type', 'unknown')!r}) has none of {', '.join(EXPERT_COUNT_FIELDS)} above 1; WideEP "
            "serves MoE models only"
        )


def check_quantisation(config: dict[str, Any], directory: Path) -> None:
    """Check that the weights are kept in a way that is served."""
    try:
        read_quantisation(_field(config, "quantization_config"))
    except UnservedQuantisationError as error:
        raise PreflightError(f"{directory} cannot be served: {error}") from error


def num_experts(config: dict[str, Any]) -> int:
    """Return the routed experts per layer that a config names, 0 where it names none."""
    return max((_largest(_field(config, name)) for name in EXPERT_COUNT_FIELDS), default=0)


def _field(config: dict[str, Any], name: str) -> Any:
    """Look a field up in the config or, for models of several parts, in its text model's."""
    parts = (config, config.get("text_config"), config.get("llm_config"))
    return next((part[name] for part in parts if isinstance(part, dict) and part.get(name) is not None), None)


def _largest(value: Any) -> int:
    """Return a count, or the largest of a count per layer."""
    counts = value if isinstance(value, list) else [value]
    return max((count for count in counts if isinstance(count, int)), default=0)


def check_length(config: dict[str, Any], max_model_len: int | None) -> None:
    """Check that the length asked for is one the model was made for."""
    longest = max(_largest(_field(config, name)) for name in _LENGTH_FIELDS)
    if max_model_len is not None and 0 < longest < max_model_len:
        raise PreflightError(f"--max-model-len is {max_model_len}; the model takes at most {longest} tokens")


def weight_bytes(directory: Path, config: dict[str, Any], float_bytes: int) -> WeightBytes:
    """Add up a checkpoint's tensors from the headers of its files.

    Raises:
        PreflightError: there is no safetensors file, or one is missing, damaged or cut short.
    """
    shared = experts = 0
    layers: set[int] = set()
    num_layers = _largest(_field(config, "num_hidden_layers")) or math.inf
    for path in safetensors_files(directory):
        for name, tensor in read_header(path).items():
            size = math.prod(tensor["shape"]) * _element_bits(tensor["dtype"], float_bytes) // 8
            if _is_expert(name, tensor["shape"], num_experts(config)):
                experts += size
                numbers = map(int, re.findall(r"\.(\d+)\.", f".{name}")[:1])  # the first is the layer's
                layers.update(number for number in numbers if number < num_layers)
            else:
                shared += size
    return WeightBytes(shared, experts, max(1, len(layers)))


def _is_expert(name: str, shape: list[int], count: int) -> bool:
    """Tell routed experts: one tensor per expert, or all experts fused along the first dimension."""
    return re.search(r"\bexperts\.", name) is not None or (len(shape) == 3 and shape[0] == count)


def _element_bits(dtype: str, float_bytes: int) -> int:
    return _BITS.get(dtype, float_bytes * 8)


def safetensors_files(directory: Path) -> list[Path]:
    """Return a checkpoint's files: those that its index names, or all where it has no index."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for pattern in _OTHER_FORMATS for path in directory.glob(pattern))
        seen = f"; it has {', '.join(others[:3])}, a format that WideEP does not read" if others else ""
        raise PreflightError(
            f"{directory} has no .safetensors weights{seen}. Get or save the model as safetensors "
            "(model.save_pretrained in transformers)"
        )
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreflightError(f"{index} is not a safetensors index: {error!r}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise PreflightError(
            f"{len(missing)} of the {len(names)} weight files that {index} names are missing: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Download the model again"
        )
    return [index.parent / name for name in names]


def read_header(path: Path) -> dict[str, Any]:
    """Return a safetensors file's tensors by name, after checking that the file is whole."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        content = file.read(min(header_bytes, _MAX_HEADER_BYTES))
    try:
        tensors = json.loads(content) if len(content) == header_bytes else {}
        tensors.pop("__metadata__", None)
        end = 8 + header_bytes + max(tensor["data_offsets"][1] for tensor in tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreflightError(
            f"{path} is not a safetensors file (is it a git-lfs pointer or a cut download?). Download it again"
        ) from error
    if (size := path.stat().st_size) != end:
        raise PreflightError(f"{path} has {size} bytes, its header says {end}. Download it again")
    return dict(tensors)


def rank_experts(
    weights: WeightBytes, config: dict[str, Any], options: Options, num_ranks: int
) -> ExpertMemory:
    """What a rank's experts take, redundant and spare slots included."""
    count = max(1, num_experts(config))
    slots = slots_per_rank(
        count,
        num_ranks,
        num_redundant=options.eplb_config.num_redundant_experts,
        placement_file=options.expert_placement,
    )
    return expert_memory(
        weights.experts,
        num_layers=weights.expert_layers,
        num_experts=count,
        num_ranks=num_ranks,
        slots_per_rank=slots,
    )


def spare_bytes(options: Options, num_ranks: int) -> int:
    """What a rank must leave free for experts that move, of a model that passed `check_start`."""
    config = read_config(Path(options.model))
    weights = weight_bytes(Path(options.model), config, float_bytes(options))
    return rank_experts(weights, config, options, num_ranks).spare


def rank_bytes(options: Options, num_ranks: int) -> int:
    """What a rank's weights take, spare slots included, of a model that passed `check_start`."""
    config = read_config(Path(options.model))
    weights = weight_bytes(Path(options.model), config, float_bytes(options))
    experts = rank_experts(weights, config, options, num_ranks)
    return weights.shared + experts.serving + experts.spare


def float_bytes(options: Options) -> int:
    """What one weight takes in memory."""
    return 2 if options.device == "cuda" and options.dtype == "auto" else _FLOAT_BYTES[options.dtype]


def check_memory(
    weights: WeightBytes, experts: ExpertMemory, options: Options, *, num_local_ranks: int, free_bytes: int
) -> None:
    """Check that this node's ranks fit into its free memory: weights, spare slots, KV cache where given, processes."""
    rank_weights, cache = weights.shared + experts.serving, options.kv_cache_bytes or 0
    needed = num_local_ranks * (rank_weights + experts.spare + cache + _PROCESS_BYTES)
    if needed <= free_bytes:
        return
    spare = f" + {_gib(experts.spare)} for experts that move" if experts.spare else ""
    kv = f" + {_gib(cache)} of KV cache" if cache else ""
    raise PreflightError(
        f"{num_local_ranks} rank{'s' if num_local_ranks > 1 else ''} on this node would take about {_gib(needed)}, but "
        f"{_gib(free_bytes)} is free. Each holds {_gib(rank_weights)} of weights ({_gib(weights.shared)} that every "
        f"rank keeps and {experts.slots_per_rank} experts of each layer: {_gib(experts.serving)} where all ranks "
        f"together need {_gib(weights.experts)}){spare}{kv} + {_gib(_PROCESS_BYTES)} of its own. Use fewer ranks per "
        "node, more nodes, fewer redundant experts, --dtype bfloat16, a smaller --kv-cache-memory or a smaller model"
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def check_port(host: str, port: int) -> None:
    """Check that HTTP can listen on host:port (port 0: on any)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise PreflightError(
            f"--host is {host!r}, which is no address of this machine: {error.strerror}"
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a port in TIME_WAIT is free, as for uvicorn
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
