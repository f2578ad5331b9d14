"""The tensors of a LoRA adapter as low-rank products of a model's modules, read from a directory in PEFT's format.

Names and shapes come from the file's header; no value is read. Layouts of experts:

- fused (transformers 5): a module's experts are one parameter [E, N, K], wrapped once per adapted parameter. The inner wrapper's
  tensors are under `experts.base_layer`, the outer one's under `experts`; with one adapted parameter they are under `experts`,
  also the first one's. A [E * R, K] is ordered by expert, then rank; B [N, R * E] by rank, then expert.
- single: `experts.7.gate_proj` or `experts.7.w1`, two matrices for each expert (transformers 4, Megatron, Unsloth).
- stacked: `experts.w1`, tensors with a first dimension of E experts, or of 1 if all share them ("shared outer").

Without torch. `factors` reads the values; `targets` compares the products with a model.

Legend: E experts, R rank, K input features, N output features.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from moe.lora.adapter_config import WEIGHTS_NAME, AdapterConfig, AdapterError, read_config

_PREFIX = "base_model.model."
_LINEAR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(?:\.default)?")
_BASE_COPY = re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.weight")
_FUSED = re.compile(r"(?P<experts>.+\.experts)(?P<wrappers>(?:\.base_layer)*)")
_SINGLE = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>\w+)")
_STACKED = re.compile(r"(?P<experts>.+\.experts)\.(?P<leaf>gate_proj|up_proj|down_proj|w1|w2|w3)")
_LEAVES = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down",
}  # fmt: skip
FUSED_LEAVES = ("gate_up_proj", "up_proj", "down_proj")  # in the order in which modules declare them
_DTYPES = ("F32", "F16", "BF16")
_MOST_HEADER_BYTES = 100 << 20  # as the safetensors library allows


class FactorLayout(StrEnum):
    """How a product's tensors are stored."""

    LINEAR = "linear"  # A [R, K], B [N, R]
    EMBEDDING = "embedding"  # A [R, ids], B [N, R]
    FUSED = "fused"
    SINGLE = "single"
    STACKED = "stacked"


class FileTensor(NamedTuple):
    """A tensor in the file."""

    name: str
    shape: tuple[int, ...]


class LowRank(NamedTuple):
    """One low-rank product: `scale * B @ A` is added to a module's weight."""

    module: str  # path in the model; of experts, the path of their module
    layout: FactorLayout
    leaf: str  # of experts: gate, up or down; of fused ones the parameter
    expert: int  # of single experts; -1 otherwise
    a: FileTensor
    b: FileTensor
    rank: int
    scale: float

    @property
    def name(self) -> str:
        """Name for messages."""
        parts = [
            self.module,
            *([str(self.expert)] if self.expert >= 0 else []),
            *([self.leaf] if self.leaf else []),
        ]
        return ".".join(parts)


@dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """A checked adapter directory."""

    directory: Path
    products: tuple[LowRank, ...]
    # Base weights of adapted embeddings, which PEFT saves next to the adapter.
    base_copies: tuple[FileTensor, ...]
    digest: str  # of all values and scales: equal for adapters with equal content

    @property
    def weights(self) -> Path:
        """File with the tensors."""
        return self.directory / WEIGHTS_NAME

    @property
    def max_rank(self) -> int:
        """Largest rank of a product."""
        return max(each.rank for each in self.products)


def read_adapter(
    directory: Path, *, max_rank: int | None = None, modules: Collection[str] = ()
) -> AdapterFiles:
    """Read an adapter's configuration and the header of its tensors, and compute its digest.

    Args:
        max_rank: Largest rank to accept. None disables the limit.
        modules: Last parts of the names of modules that it may adapt; `experts` are the routed ones. Empty means all.

    Raises:
        AdapterError: The adapter is not supported, incomplete, above the limit, or adapts another module.
    """
    config = read_config(directory)
    stored = _read_header(directory / WEIGHTS_NAME)
    sides, base_copies = _pairs_of(stored)
    products = _products(config, sides)
    if not products:
        raise AdapterError(f"{directory / WEIGHTS_NAME} holds no LoRA tensors")
    found = AdapterFiles(
        directory=directory,
        products=tuple(products),
        base_copies=tuple(base_copies),
        digest=_digest(directory / WEIGHTS_NAME, products),
    )
    if max_rank is not None and found.max_rank > max_rank:
        largest = max(products, key=lambda each: each.rank)
        raise AdapterError(
            f"{directory}: the rank of {largest.name} is {largest.rank}, above the limit of {max_rank} (--max-lora-rank)"
        )
    other = next((each for each in products if each.module.rpartition(".")[2] not in modules), None)
    if modules and other is not None:
        raise AdapterError(
            f"{directory} adapts {other.name}; --lora-target-modules allows only {', '.join(modules)}"
        )
    return found


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file's tensors by name."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _MOST_HEADER_BYTES)))
        header.pop("__metadata__", None)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
        dtypes = {name: entry["dtype"] for name, entry in header.items()}
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        raise AdapterError(
            f"{path.parent} has no {path.name}; convert adapter_model.bin with safetensors if there is one"
        ) from None
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AdapterError(f"{path} is not a safetensors file: {error!r}") from error
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise AdapterError(f"{path}: {name} is of type {dtype}; only {', '.join(_DTYPES)} are supported")
    if num_bytes < end:
        raise AdapterError(f"{path} is cut off: it has {num_bytes} bytes, and its header describes {end}")
    return shapes


class _Sides(NamedTuple):
    """The two tensors of a product, by the path that their names give."""

    layout: FactorLayout
    a: FileTensor
    b: FileTensor


def _pairs_of(stored: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, _Sides], list[FileTensor]]:
    """Pair the tensors by path."""
    halves: dict[tuple[str, FactorLayout], dict[str, FileTensor]] = {}
    others: list[FileTensor] = []
    for full_name, shape in stored.items():
        name = full_name.removeprefix(_PREFIX)
        found = _LINEAR.fullmatch(name)
        layout = FactorLayout.LINEAR
        if found is None:
            found, layout = _EMBEDDING.fullmatch(name), FactorLayout.EMBEDDING
        if found is None:
            others.append(FileTensor(full_name, shape))
            continue
        halves.setdefault((found["module"], layout), {})[found["side"]] = FileTensor(full_name, shape)
    sides: dict[str, _Sides] = {}
    for (path, layout), pair in halves.items():
        if pair.keys() != {"A", "B"}:
            missing = next(iter({"A", "B"} - pair.keys()))
            raise AdapterError(f"{path} has no lora_{missing}; the adapter is incomplete")
        sides[path] = _Sides(layout, pair["A"], pair["B"])
    adapted = {path for path, each in sides.items()}
    for other in others:
        copied = _BASE_COPY.fullmatch(other.name.removeprefix(_PREFIX))
        if copied is None or copied["module"] not in adapted:
            raise AdapterError(
                f"{other.name} is not a LoRA tensor; whole weights in an adapter are not supported"
            )
    return sides, others


def _products(config: AdapterConfig, sides: Mapping[str, _Sides]) -> list[LowRank]:
    wrapped: dict[str, list[tuple[int, _Sides]]] = {}
    products: list[LowRank] = []
    for path, each in sides.items():
        if (fused := _FUSED.fullmatch(path)) is not None:
            depth = fused["wrappers"].count(".base_layer")
            wrapped.setdefault(fused["experts"], []).append((depth, each))
        elif (single := _SINGLE.fullmatch(path)) is not None:
            leaf = _leaf(path, single["leaf"])
            products.append(
                _matrix(
                    config, single["experts"], path, each, FactorLayout.SINGLE, leaf, int(single["expert"])
                )
            )
        elif (stacked := _STACKED.fullmatch(path)) is not None:
            products.append(_stacked(config, stacked["experts"], path, each, _leaf(path, stacked["leaf"])))
        else:
            products.append(_matrix(config, path, path, each, each.layout, "", -1))
    for experts, wrappers in wrapped.items():
        products += _fused(config, experts, wrappers)
    return products


def _leaf(path: str, name: str) -> str:
    if name not in _LEAVES:
        raise AdapterError(f"{path} is not a weight of an expert that is known: {', '.join(_LEAVES)}")
    return _LEAVES[name]


def _matrix(
    config: AdapterConfig, module: str, path: str, sides: _Sides, layout: FactorLayout, leaf: str, expert: int
) -> LowRank:  # fmt: skip
    rank = _rank(path, sides, 2)
    if rank != config.rank_of(path):
        raise AdapterError(f"{path} has rank {rank}; its configuration has {config.rank_of(path)}")
    return LowRank(module, layout, leaf, expert, sides.a, sides.b, rank, config.scale_of(path, rank))


def _stacked(config: AdapterConfig, module: str, path: str, sides: _Sides, leaf: str) -> LowRank:
    rank = _rank(path, sides, 3)
    if rank != config.rank_of(path):
        raise AdapterError(f"{path} has rank {rank}; its configuration has {config.rank_of(path)}")
    return LowRank(
        module, FactorLayout.STACKED, leaf, -1, sides.a, sides.b, rank, config.scale_of(path, rank)
    )


def _rank(path: str, sides: _Sides, dims: int) -> int:
    """Return the rank that the shapes of A [..., R, K] and B [..., N, R] give."""
    for side in (sides.a, sides.b):
        if len(side.shape) != dims or 0 in side.shape:
            raise AdapterError(f"{side.name} has the shape {[*side.shape]}; {dims} dimensions are expected")
    if sides.a.shape[-2] != sides.b.shape[-1]:
        raise AdapterError(f"{path}: A {[*sides.a.shape]} and B {[*sides.b.shape]} have no common rank")
    return sides.a.shape[-2]


def _fused(config: AdapterConfig, experts: str, wrappers: list[tuple[int, _Sides]]) -> list[LowRank]:
    """Name the parameters of wrapped experts: the innermost wrapper is of the parameter that the module declares first."""
    named = [leaf for leaf in FUSED_LEAVES if _is_targeted(config, f"{experts}.{leaf}")]
    is_old = not named  # a configuration of the time before fused experts
    if is_old:
        named = ["gate_up_proj"] * config.splits_gate_and_up
        named += ["down_proj"] * any(
            each in ("all-linear", "down_proj", "w2") for each in config.target_modules
        )
    inner_first = [sides for _, sides in sorted(wrappers, key=lambda each: -each[0])]
    if len(named) != len(inner_first):
        raise AdapterError(
            f"{experts} has {len(inner_first)} adapted parameters, but target_parameters names {', '.join(named) or 'none'}"
        )
    products = []
    for leaf, sides in zip(named, inner_first, strict=True):
        path = f"{experts}.{leaf}"
        if len(sides.a.shape) != 2 or len(sides.b.shape) != 2 or sides.a.shape[0] != sides.b.shape[1]:
            raise AdapterError(
                f"{path}: A {[*sides.a.shape]} and B {[*sides.b.shape]} have no common rank of all experts"
            )
        rank, factor = config.rank_of(path), 1
        if is_old and leaf == "gate_up_proj" and not config.has_pattern(path):
            rank, factor = 2 * rank, 2  # PEFT fuses gate and up
        if sides.a.shape[0] % rank:
            raise AdapterError(
                f"{path}: A has {sides.a.shape[0]} rows, which is not a multiple of the configured rank {rank}"
            )
        scale = config.scale_of(path, rank, factor=factor)
        products.append(LowRank(experts, FactorLayout.FUSED, leaf, -1, sides.a, sides.b, rank, scale))
    return products


def _is_targeted(config: AdapterConfig, name: str) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in config.target_parameters)


def _digest(path: Path, products: list[LowRank]) -> str:
    """Return 32 hexadecimal digits that identify the adapter's content."""
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256")
    content.update(
        json.dumps([[each.name, each.layout, each.rank, each.scale] for each in products]).encode()
    )
    return content.hexdigest()[:32]
