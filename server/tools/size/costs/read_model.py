"""Read a model for `wideep size`: its costs, its cache and the size of its weights.

The model is built on the meta device, as in a start, and only config.json is read: there is no list of families, and an
unsupported model is refused with the message of a start. If the weights are present, the headers of their files give their
size; otherwise it is counted on the modules, in the format of the configuration.
Rejected: formulas over field names of config.json, which would be wrong for the next family.
"""

import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from kvcache.paged_cache import LayerShape
from moe.backend import Backend
from moe.cpu.backend import CPU
from moe.families import UnsupportedModelError, leaves
from moe.gpu import limits as gpu_limits
from moe.load.quantisation import MODELOPT_FILE, Quantisation, WeightFormat
from moe.model import Skeleton
from moe.text_part import decoder_layers
from scheduler.policy.config import model_length
from server.machine.model_fields import experts_per_token, field_of, most
from server.serve.preflight.adapter_room import (
    EXPERTS,
    AdaptedFeatures,
    adapted_features,
    expert_features,
    pair_features,
)
from server.serve.preflight.memory import DEQUANTISED, WeightBytes, value_dims, weight_bytes
from server.serve.preflight.model import PreflightError, check_is_moe, check_quantisation, read_config
from server.tools.size.costs.model_costs import LayerCosts, Layers, ModelCosts

_CODE_BITS = {"fp8": 8, "mxfp8": 8, "int8": 8, "mxfp4": 4, "nvfp4": 4, "int4": 4}
_SCALE_BYTES = {"fp8": 4, "mxfp8": 1, "int8": 2, "mxfp4": 1, "nvfp4": 1, "int4": 2}  # in the files
_PLAIN_KINDS = {4: "float32", 2: "bfloat16", 1.25: "int8", 0.75: "int4"}  # by bytes, as counted by a start

# By `on_gpu`. Unsupported features of GPU kernels come from the function that a start uses; no other part matters here.
BACKENDS = {False: CPU, True: replace(CPU, why_unserved=gpu_limits.why_unserved)}


@dataclass(frozen=True, kw_only=True)
class ReadModel:
    """A model for sizing.

    Attributes:
        name: Name for users. path: Path to start it with.
        config: Content of config.json.
        weights: Size of its weights once loaded, as counted by a start.
        adapted: The matrices that adapters may change.
        has_files: The size was read from the weight files, not counted on the configuration.
        shapes: Cache of each layer.
        longest: Maximum tokens of a sequence.
        heads, value_dims: Of attention, see `AttentionHeads`.
    """

    name: str
    path: str
    config: Mapping[str, Any]
    costs: ModelCosts
    weights: WeightBytes
    adapted: AdaptedFeatures
    has_files: bool
    shapes: tuple[LayerShape, ...]
    longest: int
    heads: int
    value_dims: tuple[int, ...]

    @property
    def is_latent(self) -> bool:
        """Return whether latents are cached."""
        return any(shape.latent for shape in self.shapes)

    @property
    def has_index(self) -> bool:
        """Return whether a sparse index chooses tokens."""
        return any(shape.index_dim for shape in self.shapes)


def read_model(
    path: Path,
    *,
    on_gpu: bool,
    float_bytes: float | None,
    max_model_len: int | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    adapted_modules: Collection[str] = (),
) -> ReadModel:
    """Read a model's directory or a single config.json.

    Args:
        on_gpu: Check that GPU kernels support the model; otherwise CPU kernels.
        float_bytes: Bytes per number that is not quantised. None keeps the checkpoint's type.
        quantization: Quantisation on load.
        kv_cache_dtype: Format of the KV cache, a key of `kvcache.codes.CODES`.
        adapted_modules: Modules that adapters may change, as in `adapted_features`.

    Raises:
        PreflightError: The model has no experts, its files are damaged, or it is already quantised.
        UnsupportedModelError: The model is not supported on this kind of device.
        ConfigError: max_model_len is more than the model supports.
    """
    if path.is_dir():
        check_quantisation(read_config(path), path, asked=quantization)
        return _read(
            path,
            BACKENDS[on_gpu],
            float_bytes,
            max_model_len,
            path.resolve().name,
            str(path),
            kv_cache_dtype,
            adapted_modules,
        )
    if not path.is_file():
        raise PreflightError(
            f"{path} does not exist; give a model's directory or its config.json (nothing is downloaded)"
        )
    with tempfile.TemporaryDirectory(prefix="wideep_size_") as folder:
        shutil.copy(path, Path(folder) / "config.json")
        modelopt = path.with_name(MODELOPT_FILE)
        if modelopt.is_file():
            shutil.copy(modelopt, folder)
        try:
            check_quantisation(read_config(Path(folder)), path.parent, asked=quantization)
            return _read(
                Path(folder),
                BACKENDS[on_gpu],
                float_bytes,
                max_model_len,
                str(path),
                kv_cache_dtype=kv_cache_dtype,
                adapted_modules=adapted_modules,
            )
        except (PreflightError, UnsupportedModelError) as error:
            named = str(error).replace(f"{folder}/config.json", str(path)).replace(folder, str(path))
            raise type(error)(named) from error


def read_config_values(values: Mapping[str, Any], *, float_bytes: float | None) -> ReadModel:
    """Read a model from the values of a config.json."""
    with tempfile.TemporaryDirectory(prefix="wideep_size_") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(values)))
        return _read(Path(folder), CPU, float_bytes, None, str(values.get("model_type")))


def _read(
    directory: Path,
    backend: Backend,
    float_bytes: float | None,
    max_model_len: int | None,
    name: str,
    path: str = "MODEL",
    kv_cache_dtype: str = "auto",
    adapted_modules: Collection[str] = (),
) -> ReadModel:
    config = read_config(directory)
    check_is_moe(config, Path(name))
    skeleton = Skeleton(directory, backend, kv_cache_dtype=kv_cache_dtype)
    plain_bytes = float_bytes or _plain_bytes(config)
    costs = _costs(skeleton, config, plain_bytes)
    has_files = any(directory.glob("*.safetensors"))
    if has_files:
        weights = weight_bytes(directory, config, float_bytes, has_image_experts=backend.runs_image_experts)
        adapted = adapted_features(directory, config, adapted_modules)
    else:
        adapted = _adapted(skeleton, config, adapted_modules)
        weights = WeightBytes(costs.shared_bytes, costs.all_experts_bytes, costs.num_expert_layers)
    text = skeleton.model.config.get_text_config(decoder=True)
    heads = _Heads.of(config)
    return ReadModel(
        name=name,
        path=path,
        config=config,
        costs=costs,
        weights=weights,
        adapted=adapted,
        has_files=has_files,
        shapes=tuple(skeleton.cache_shapes),
        longest=model_length(text, max_model_len),
        heads=heads.num,
        value_dims=value_dims(config),
    )


def _plain_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes per number of a checkpoint on a CPU: bfloat16 is kept, all other types become float32."""
    dtype = field_of(config, "dtype") or field_of(config, "torch_dtype") or "bfloat16"
    return 2 if dtype == "bfloat16" else 4


class _Heads(NamedTuple):
    """Dimensions of attention from the configuration; 0 if it does not have one."""

    num: int
    latent: int
    unrotated_dim: int
    rotary_dim: int
    value_dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "_Heads":
        count = max(1, most(config, "num_attention_heads"))
        given_dim = max(most(config, "v_head_dim"), most(config, "head_dim"))
        return cls(
            num=count,
            latent=most(config, "kv_lora_rank"),
            unrotated_dim=most(config, "qk_nope_head_dim"),
            rotary_dim=most(config, "qk_rope_head_dim"),
            value_dim=given_dim or most(config, "hidden_size") // count,
        )


class _Storage:
    """The size of a weight, by its module's name and its shape."""

    def __init__(self, quantisation: Quantisation | None, plain_bytes: float) -> None:
        self._found, self._plain_bytes = quantisation, plain_bytes
        self.plain_kind = _PLAIN_KINDS[plain_bytes]

    def format_of(self, module: str, *, is_expert: bool) -> WeightFormat | None:
        """Return a weight's quantisation. Returns None if it is not quantised."""
        if self._found is None or (self._found.method == "mxfp4" and not is_expert):
            return None
        if self._found.leaves_plain(module):
            return None
        return self._found.formats[-1 if is_expert else 0]

    def num_bytes(self, shape: tuple[int, ...], stored: WeightFormat | None) -> int:
        """Return the size of a weight [..., outputs, inputs], including scales."""
        if stored is None:
            return int(prod(shape) * self._plain_bytes)
        *outer, rows, inputs = shape
        blocks = ceil(inputs / stored.block) if stored.block else 1
        blocks_of_rows = ceil(rows / stored.block_rows) if stored.block_rows else 1
        scales = prod(outer) * blocks_of_rows * blocks * _SCALE_BYTES[stored.name]
        zeros = prod(outer) * rows * blocks / 2 if stored.has_zeros else 0
        return int(prod(shape) * _CODE_BITS[stored.name] / 8 + scales + zeros)

    def kind(self, stored: WeightFormat | None) -> str:
        """Return the name of a storage format."""
        return self.plain_kind if stored is None else stored.name


class _Part(NamedTuple):
    """The costs of some modules."""

    weights: int = 0
    num_bytes: int = 0
    features: int = 0
    kind: str = ""

    def plus(self, other: "_Part") -> "_Part":
        return _Part(
            self.weights + other.weights,
            self.num_bytes + other.num_bytes,
            self.features + other.features,
            other.kind or self.kind,
        )


def _costs(skeleton: Skeleton, config: Mapping[str, Any], plain_bytes: float) -> ModelCosts:
    model = skeleton.model
    storage = _Storage(skeleton.quantisation, plain_bytes)
    layers = decoder_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    _check_layers(skeleton, [names[id(layer)] for layer in layers])
    heads, top_k = _Heads.of(config), experts_per_token(config) or 1
    counted: dict[LayerCosts, int] = {}
    own_kind = expert_kind = storage.plain_kind
    in_layers = 0
    for index, layer in enumerate(layers):
        own, [expert, *others], num_experts = _parts(layer, names[id(layer)], storage)
        own_kind, expert_kind = own.kind or own_kind, expert.kind or expert_kind
        in_layers += own.num_bytes
        costs = LayerCosts(
            own_weights=own.weights,
            own_bytes=own.num_bytes,
            own_features=own.features,
            num_experts=num_experts,
            top_k=top_k if num_experts else 0,
            expert_weights=expert.weights,
            expert_bytes=expert.num_bytes,
            expert_features=expert.features,
            **_context_costs(skeleton.cache_shapes, index, heads, config),
        )
        counted[costs] = counted.get(costs, 0) + 1
        for other in others:  # experts for images take part in every step, as a layer without attention
            apart = LayerCosts(*[0] * len(costs))._replace(
                num_experts=num_experts,
                top_k=top_k,
                expert_weights=other.weights,
                expert_bytes=other.num_bytes,
                expert_features=other.features,
            )
            counted[apart] = counted.get(apart, 0) + 1
    head = tuple(model.get_output_embeddings().weight.shape)
    outside = _outside_bytes(model, [names[id(layer)] for layer in layers], storage)
    return ModelCosts(
        name=str(config.get("model_type")),
        hidden_dim=int(head[1]),
        layers=tuple(Layers(count, each) for each, count in counted.items()),
        own_kind=own_kind,
        expert_kind=expert_kind,
        head_weights=prod(head),
        head_bytes=storage.num_bytes(head, None),
        shared_bytes=in_layers + outside,
    )


def _check_layers(skeleton: Skeleton, layers: list[str]) -> None:
    """Refuse a model if some layers were not found, because their weights would count as shared by all ranks."""
    begins = tuple(f"{layer}." for layer in layers)
    apart = [name for name in skeleton.experts if not name.startswith(begins)]
    if apart or len(layers) != len(skeleton.cache_shapes):
        kind = type(skeleton.model).__name__
        seen = f"{apart[0]} is in none of them" if apart else f"{len(skeleton.cache_shapes)} have a cache"
        raise UnsupportedModelError(
            f"the decoder layers of {kind} cannot be counted: {len(layers)} were found, and {seen}. The model may still be "
            "served; please report its model_type"
        )


def _parts(layer: nn.Module, name: str, storage: _Storage) -> tuple[_Part, list[_Part], int]:
    """Return a layer's own part, one expert of each experts module (an empty part if it has none), and the number of experts."""
    own, experts, num_experts = _Part(), [], 0
    for path, module in layer.named_modules():
        full = f"{name}.{path}" if path else name
        if hasattr(module, "is_concatenated"):
            num_experts = int(module.num_experts)
            experts.append(_expert(module, full, storage))
            continue
        for leaf, tensor in _tensors(module):
            own = own.plus(_own(full, leaf, tuple(tensor.shape), storage, is_linear=_is_linear(module)))
    return own, experts or [_Part()], num_experts


def _tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(recurse=False)
    kept = module.state_dict(keep_vars=True)
    yield from ((leaf, tensor) for leaf, tensor in module.named_buffers(recurse=False) if leaf in kept)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _own(module: str, leaf: str, shape: tuple[int, ...], storage: _Storage, *, is_linear: bool) -> _Part:
    if leaf != "weight" or len(shape) != 2:
        return _Part(num_bytes=storage.num_bytes(shape, None))
    is_plain = not is_linear or f"{module}.{leaf}".endswith(DEQUANTISED)
    stored = None if is_plain else storage.format_of(module, is_expert=False)
    return _Part(
        prod(shape), storage.num_bytes(shape, stored), sum(shape), storage.kind(stored) if stored else ""
    )


def _expert(module: Any, name: str, storage: _Storage) -> _Part:
    """Return one expert of an experts module, including biases; parameters that all experts share are not counted."""
    part, count = _Part(), int(module.num_experts)
    stored = storage.format_of(f"{name}.0.{leaves(module)[0].removeprefix('gate_')}", is_expert=True)
    for leaf in leaves(module):
        shape = tuple(getattr(module, leaf).shape)[1:]
        outputs_inputs = shape[::-1] if module.is_transposed else shape
        part = part.plus(
            _Part(prod(shape), storage.num_bytes(outputs_inputs, stored), sum(shape), storage.kind(stored))
        )
        if module.has_bias:
            bias = getattr(module, f"{leaf}_bias")
            part = part.plus(_Part(num_bytes=storage.num_bytes((bias.numel() // count,), None)))
    return part


def _context_costs(
    shapes: list[LayerShape], index: int, heads: _Heads, config: Mapping[str, Any]
) -> dict[str, int]:
    """Return the costs of a layer's attention per row and context token, and of a recurrence per sequence."""
    shape = shapes[index]
    state_bytes = shape.state.num_bytes if shape.state else 0
    read = shape if shape.source is None else shapes[shape.source]
    topk = most(config, "index_topk") if read.index_dim else 0
    numbers = read.num_kv_heads * (read.key_dim + read.value_dim)
    decode = 2 * heads.num * (read.key_dim + (heads.latent if read.latent else read.value_dim))
    expanded = 2 * heads.num * (heads.unrotated_dim + heads.rotary_dim + heads.value_dim)
    return {
        "attended_flops": decode if numbers else 0,
        "prefill_flops": (expanded if read.latent else decode) if numbers else 0,
        "cached_numbers": numbers,
        "kv_heads": read.num_kv_heads,
        "index_numbers": read.index_dim,
        "reach": shape.window or shape.chunk or topk,
        "state_bytes": state_bytes,
    }


def _adapted(skeleton: Skeleton, config: Mapping[str, Any], modules: Collection[str]) -> AdaptedFeatures:
    """Return what `adapted_features` would return for the model's files."""
    tied = set(getattr(skeleton.model, "all_tied_weights_keys", None) or {})
    shared = slot = 0
    for path, module in skeleton.model.named_modules():
        is_experts = path in skeleton.experts
        if modules and (EXPERTS if is_experts else path.rpartition(".")[2]) not in modules:
            continue
        if is_experts:
            for leaf in leaves(module):
                sides = getattr(module, leaf).shape[1:]
                inputs = sides[0] if module.is_transposed else sides[1]
                is_down = leaf == "down_proj"
                outer = sum(sides) - inputs if is_down else inputs
                slot += expert_features(outer, sum(sides) - outer, is_down=is_down, is_joint=True)
        elif f"{path}.weight" not in tied and getattr(getattr(module, "weight", None), "ndim", 0) == 2:
            shared += sum(module.weight.shape)
    return AdaptedFeatures(shared, slot, pair_features(config, modules))


def _outside_bytes(model: nn.Module, layers: list[str], storage: _Storage) -> int:
    """Return the size of embeddings, last norm and output projection; a tied weight counts once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return sum(
        storage.num_bytes(tuple(tensor.shape), None)
        for name, tensor in model.state_dict().items()
        if name not in tied and not any(name.startswith(f"{layer}.") for layer in layers)
    )
