"""Measure this machine's cores and memory, compute the size of a rank's weights, and check that all local ranks fit. No torch.

Cores and memory are those that the kernel and a container's limits allow. cgroup v2 is read (and v1's memory limit), because
inside a container /proc describes the whole host. Weights are summed from the headers of the checkpoint's files, for the
given --dtype and number of expert slots per rank. A new placement is applied a few layers at a time, with as many spare
slots as one layer has on a rank (`moe.expert_weights`). They are allocated on first use, so memory budgets must
leave room for them.
"""

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from expert_placement.config import EplbConfigError, slots_of_rank
from moe.mtp.names import MtpNames
from server.machine.model_fields import NOT_OF_TEXT, field_of, most, num_experts
from server.options.table import Options
from server.serve.preflight.model import PreflightError, read_config, read_headers, slots_in

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return the number of cores that this process may use: its affinity, capped by the container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the memory available without swapping: MemAvailable, capped by the container's limit."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024  # the kernel writes KiB
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(cgroup / limit_name), _read(cgroup / usage_name)
        if limit.isdigit() and usage.isdigit():
            stat = _read((cgroup / usage_name).with_name("memory.stat"))
            cache = next(
                (int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0
            )
            available = min(available, int(limit) - int(usage) + cache)  # page cache can be reclaimed
    return max(0, available)


def total_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the memory of this machine, capped by the container's limit. The same for all processes at all times."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    total = int(fields["MemTotal"].split()[0]) * 1024
    limits = [_read(cgroup / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # no cgroup of this version
        return ""


class ExpertMemory(NamedTuple):
    """Bytes of one rank's experts."""

    slots_per_rank: int  # of a layer
    serving: int  # all slots of all layers
    spare: int


def expert_memory(
    expert_bytes: int, *, num_layers: int, num_experts: int, num_ranks: int, slots_per_rank: int
) -> ExpertMemory:
    """Return the memory of one rank's experts.

    Args:
        expert_bytes: Size of all experts of all `num_layers` MoE layers, without redundant copies.
    """
    of_slots = expert_bytes * slots_per_rank / max(1, num_experts)
    spare = of_slots / max(1, num_layers) if num_ranks > 1 else 0  # with one rank, experts never move
    return ExpertMemory(slots_per_rank, math.ceil(of_slots), math.ceil(spare))


def slots_per_rank(
    num_experts: int, num_ranks: int, *, num_redundant: int, placement_file: str | None
) -> int:
    """Return the number of slots that each layer has on a rank.

    Args:
        placement_file: A placement file. An invalid one is ignored here; `checks.check_placement` rejects it.

    Raises:
        PreflightError: There are more redundant experts than the ranks can use.
    """
    if placement_file:
        found = slots_in(placement_file)
        if found:
            return found
        num_redundant = 0  # the flag does not apply with a file
    try:
        return slots_of_rank(num_experts, num_ranks, num_redundant)
    except EplbConfigError as error:
        raise PreflightError(f"--eplb-config: {error}") from error


# Bytes per weight, by --dtype. On a CPU, auto keeps bfloat16 and reads all other types as float32.
_FLOAT_BYTES = {"auto": None, "float32": 4, "bfloat16": 2}
_QUANTISED_BYTES = {"int8": 1.25, "int4": 0.75}  # 1.06 and 0.56, plus the weights that are not quantised
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "F8_E4M3": 8,
    "F8_E8M0": 8,
}  # fmt: skip
PROCESS_BYTES = 300 << 20  # a rank without weights: 220 MB for Python and torch, the rest for buffers


class EncoderMemory(NamedTuple):
    """Host memory of the processes that encode images."""

    num_fronts: int  # each has one
    total_bytes: int


NO_ENCODERS = EncoderMemory(0, 0)


class WeightBytes(NamedTuple):
    """Size of a loaded checkpoint in memory, in bytes."""

    shared: int  # on every rank
    experts: int  # spread over all ranks
    # Number of MoE layers. Multi-token prediction layers, after the last one, count only if they are read.
    expert_layers: int = 1


# Scales of quantised weights keep their type. Input orders are used during loading and then dropped.
SCALES = re.compile(r"(_|\.)(scale|scales|scale_inv|scale_2|global_scale|qscale_weight)$")
NOT_KEPT = (".g_idx", ".weight_g_idx", ".weight_shape")
DEQUANTISED = ".kv_b_proj.weight"  # latent attention absorbs it, so it is dequantised
_SCALE_BITS = {"F32": 32, "BF16": 16, "F16": 16}


def weight_bytes(
    directory: Path,
    config: dict[str, Any],
    float_bytes: float | None,
    *,
    has_mtp: bool = False,
    has_image_experts: bool = True,
) -> WeightBytes:
    """Sum a checkpoint's tensors, for its text decoder only, from the headers of its files.

    Args:
        float_bytes: Bytes per unquantised number; None for the file's type as read on a CPU.
        has_mtp: Whether the layers for multi-token prediction are read.
        has_image_experts: Whether experts for images are read.

    Raises:
        PreflightError: There is no safetensors file, or one is missing, damaged or incomplete.
    """
    shared = experts = 0
    layers: set[tuple[int, int]] = set()  # layer, and place of its experts module among those of the layer
    num_layers = most(config, "num_hidden_layers") or math.inf
    tensors = read_headers(directory)
    mtp = mtp_names(tensors, config)
    for own_name, tensor in tensors.items():
        of_mtp = mtp.renamed(own_name)
        name = own_name if of_mtp is None else of_mtp
        if NOT_OF_TEXT.search(name) or name.endswith(NOT_KEPT):
            continue
        if of_mtp is not None and not (of_mtp and has_mtp):
            continue
        bits = _element_bits(tensor["dtype"], float_bytes)
        if SCALES.search(name):
            bits = _SCALE_BITS.get(tensor["dtype"], bits)
        elif name.endswith(DEQUANTISED) and tensor["dtype"] in _BITS:
            bits = _element_bits("F32", float_bytes)
        size = int(math.prod(tensor["shape"]) * bits / 8)
        if is_expert(name, tensor["shape"], num_experts(config)):
            place = _place_of_list(name, config)
            if place and not has_image_experts:
                continue
            experts += size
            numbers = map(int, re.findall(r"\.(\d+)\.", f".{name}")[:1])  # the first number is the layer
            layers.update((number, place) for number in numbers if mtp.has(own_name) or number < num_layers)
        else:
            shared += size
    return WeightBytes(shared, experts, max(1, len(layers)))


def has_image_experts(options: Options) -> bool:
    """Return whether a rank reads the experts for images of a model that has both kinds (`moe.vision.image_experts`)."""
    return options.device != "cuda" or not options.engine.enable_torch_compile


def mtp_names(names: Iterable[str], config: dict[str, Any]) -> MtpNames:
    """Find a checkpoint's layers for multi-token prediction among the names of its tensors."""
    return MtpNames(names, most(config, "num_hidden_layers") or sys.maxsize)


def is_expert(name: str, shape: list[int], count: int) -> bool:
    """Recognise routed experts: one tensor per expert, or all experts fused along the first dimension."""
    return re.search(r"\bexperts\.", name) is not None or (len(shape) == 3 and shape[0] == count)


def _place_of_list(name: str, config: dict[str, Any]) -> int:
    """Return 1 for an expert for images that follows its layer's experts for text in one list (ERNIE-4.5-VL), otherwise 0."""
    number = re.search(r"\bexperts\.(\d+)\.", name)
    has_both = isinstance(field_of(config, "moe_intermediate_size"), list)  # experts of two sizes
    return int(number.group(1)) // num_experts(config) if number and has_both else 0


def _element_bits(dtype: str, float_bytes: float | None) -> float:
    own_bytes = 2 if dtype == "BF16" else 4
    return _BITS.get(dtype, 8 * (own_bytes if float_bytes is None else float_bytes))


def float_bytes(options: Options) -> float | None:
    """Return the bytes per weight, approximate if quantised on load. None means the same as in `weight_bytes`."""
    engine = options.engine
    if engine.quantization in _QUANTISED_BYTES:  # other values name the checkpoint's own format
        return _QUANTISED_BYTES[engine.quantization]
    return 2 if options.device == "cuda" and engine.dtype == "auto" else _FLOAT_BYTES[engine.dtype]


def rank_experts(
    weights: WeightBytes, config: dict[str, Any], options: Options, num_ranks: int
) -> ExpertMemory:
    """Return the memory of a rank's experts, including redundant and spare slots."""
    count = max(1, num_experts(config))
    slots = slots_per_rank(
        count,
        num_ranks,
        num_redundant=options.engine.eplb_config.num_redundant_experts,
        placement_file=options.engine.expert_placement,
    )
    return expert_memory(
        weights.experts,
        num_layers=weights.expert_layers,
        num_experts=count,
        num_ranks=num_ranks,
        slots_per_rank=slots,
    )


def spare_bytes(options: Options, num_ranks: int) -> int:
    """Return the bytes that a rank must reserve for moving experts. The model has passed `check_start`."""
    config = read_config(Path(options.model))
    weights = weight_bytes(
        Path(options.model),
        config,
        float_bytes(options),
        has_mtp=options.engine.has_mtp,
        has_image_experts=has_image_experts(options),
    )
    return rank_experts(weights, config, options, num_ranks).spare


def rank_bytes(options: Options, num_ranks: int) -> int:
    """Return the size of a rank's weights, including spare slots. The model has passed `check_start`."""
    config = read_config(Path(options.model))
    weights = weight_bytes(
        Path(options.model),
        config,
        float_bytes(options),
        has_mtp=options.engine.has_mtp,
        has_image_experts=has_image_experts(options),
    )
    experts = rank_experts(weights, config, options, num_ranks)
    return weights.shared + experts.serving + experts.spare


class AttentionHeads(NamedTuple):
    """Attention dimensions, as maxima over all layers."""

    heads: int
    value_dims: tuple[int, ...]  # per head, one for each kind of layer; the latent's if latents are cached
    is_latent: bool
    has_index: bool  # whether an indexer selects the attended tokens
    max_model_len: int


def attention_heads(options: Options) -> AttentionHeads:
    """Return the maxima over all layers of the model, which has passed `check_start`."""
    config = read_config(Path(options.model))
    heads, is_latent = max(1, most(config, "num_attention_heads")), most(config, "kv_lora_rank") > 0
    length = options.engine.max_model_len or most(config, "max_position_embeddings")
    return AttentionHeads(heads, value_dims(config), is_latent, most(config, "index_topk") > 0, length)


# Families with different kinds of layers: MiMo-V2 (with a window), Gemma 4 (without one).
_VALUE_FIELDS = (("v_head_dim", "head_dim"), ("swa_v_head_dim", "swa_head_dim"), ("global_head_dim",))


def value_dims(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the possible value dimensions of a head, from a config; the latent's if latents are cached."""
    if latent := most(config, "kv_lora_rank"):
        return (latent,)
    kinds = [max(most(config, name) for name in names) for names in _VALUE_FIELDS]
    heads = max(1, most(config, "num_attention_heads"))
    kinds[0] = kinds[0] or most(config, "hidden_size") // heads
    return tuple(dict.fromkeys(dim for dim in kinds if dim))


def check_memory(
    weights: WeightBytes,
    experts: Sequence[ExpertMemory],
    options: Options,
    *,
    free_bytes: int,
    adapters: Sequence[int] = (),
    encoders: EncoderMemory = NO_ENCODERS,
) -> int:
    """Return the memory that this node needs: weights, spare slots, adapters, a given KV cache, processes, encoders of images.

    Args:
        experts: Memory of each rank's experts. Ranks of smaller pools hold more of them.
        adapters: Memory of each rank's adapters.
        encoders: Memory of the encoders of images in the same memory.

    Raises:
        PreflightError: It exceeds `free_bytes`.
    """
    cache = options.engine.kv_cache_bytes or 0
    needed = sum(weights.shared + each.serving + each.spare + cache + PROCESS_BYTES for each in experts)
    needed += sum(adapters) + encoders.total_bytes
    if needed <= free_bytes:
        return needed
    largest = max(experts, key=lambda each: each.serving)
    spare = f" + {gib(largest.spare)} for moving experts" if largest.spare else ""
    kv = f" + {gib(cache)} of KV cache" if cache else ""
    lora = lora_remedy = ""
    if most_adapters := max(adapters, default=0):
        engine = options.engine
        count = engine.max_loras if options.device == "cuda" else engine.most_adapters
        lora = f" + {gib(most_adapters)} for up to {count} adapters of rank {engine.max_lora_rank}"
        lora_remedy = (
            "a smaller --max-lora-rank, --max-loras or --max-cpu-loras, fewer --lora-target-modules, "
        )
    images = encoder_remedy = ""
    if encoders.num_fronts:
        images = f" The {in_words(encoders)}."
        encoder_remedy = "--language-model-only, "
    which = "Each rank holds" if len(set(experts)) == 1 else "The largest rank, of the smallest pool, holds"
    raise PreflightError(
        f"{len(experts)} rank{'s' if len(experts) > 1 else ''} on this node would need about {gib(needed)}, but only "
        f"{gib(free_bytes)} is free. {which} {gib(weights.shared + largest.serving)} of weights ({gib(weights.shared)} on "
        f"every rank, and {gib(largest.serving)} for {largest.slots_per_rank} experts of each layer, out of "
        f"{gib(weights.experts)} for all experts){spare}{lora}{kv} + {gib(PROCESS_BYTES)} for its process.{images} Use {lora_remedy}{encoder_remedy}"
        "fewer ranks per node, more nodes, fewer redundant experts, --dtype bfloat16, a smaller --kv-cache-memory or a smaller model"
    )


def in_words(encoders: EncoderMemory) -> str:
    """Return the memory of encoders as a part of a sentence."""
    count = encoders.num_fronts
    which = "image encoder takes" if count == 1 else f"image encoders of {count} fronts take"
    return f"{which} {gib(encoders.total_bytes)}"


def gib(size: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{size / (1 << 30):.1f} GiB"
