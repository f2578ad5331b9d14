"""How a checkpoint is quantised, read off its configuration: what is served, and what is refused by name.

Knows no torch, so that the check before the start uses it too. The files' own tensors have the last word about which
weight is quantised (`moe.load.stored_tensors`), so lists of modules that are left out are not asked; this says which formats
may be met. Rows are multiplied as they are: what a checkpoint says of quantising them is left alone, which is nearer to
the model. What would change the answer otherwise (rotations, sparse weights, smoothed rows) is refused.

Facts: the configurations that compressed-tensors, NVIDIA ModelOpt, AutoAWQ, GPTQModel and AMD Quark write.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = 16  # outputs that share an FP8 scale on CPU: a block's must be a multiple
MICRO_BLOCK, NVFP4_BLOCK = 32, 16
MODELOPT_FILE = "hf_quant_config.json"
SERVED = "fp8 (blocks, channels, tensors), mxfp8, mxfp4, nvfp4, int8 and int4 of compressed-tensors and ModelOpt, awq and gptq"
# What else is found under quant_method, for people who do not know the word in their config.json.
KNOWN = {
    "bitsandbytes": "bitsandbytes",
    "fbgemm_fp8": "FBGEMM FP8",
    "torchao": "torchao",
    "auto-round": "AutoRound",
    "nvfp4": "NVFP4",
    "hqq": "HQQ",
}


class UnservedQuantisationError(ValueError):
    """A quantisation that is not served; the message names it and says what is."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """One way in which weights of a checkpoint are stored."""

    name: str  # fp8, mxfp8, int8, int4, nvfp4 or mxfp4
    block_rows: int = 1  # outputs under one scale; 0: all
    block: int = 0  # inputs under one scale; 0: all
    has_zeros: bool = False  # codes are around numbers of their blocks', of int4


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """How the quantised weights of a checkpoint are stored."""

    method: str  # quant_method
    formats: tuple[WeightFormat, ...]  # that may be met
    plain_modules: tuple[str, ...] = ()  # patterns of modules that are not quantised, of fp8
    zeros_above: int = 0  # what a stored zero is less than it means (GPTQ's first format)
    quantises_rows: bool = False  # it says how rows would be quantised, which is left alone
    row_parts: tuple[str, int] | None = (
        None  # weights whose name ends so: in so many parts of rows with blocks of their own
    )

    def parts_of(self, name: str) -> int:
        """How many parts of a weight's rows have blocks of their own, of which the last may be short."""
        return self.row_parts[1] if self.row_parts and name.endswith(self.row_parts[0]) else 1

    def leaves_plain(self, module: str) -> bool:
        """Whether `plain_modules` names a module: as a regular expression of whole names from its start, or as its end.

        That is transformers' rule since 5.23; before, "mlp.gate" named "mlp.gate_proj" as well.
        """
        boundary = r"(?:(?<=\.)|(?=\.|$))"
        return any(
            re.match(f"(?:{pattern}){boundary}", module) or module.endswith(pattern)
            for pattern in self.plain_modules
        )

    @property
    def names(self) -> str:
        """The formats' names."""
        return " and ".join(dict.fromkeys(each.name for each in self.formats))

    @property
    def in_words(self) -> str:
        """What is said of it at start."""
        rows = "; rows, keys and values are not quantised: the checkpoint's scales for them are left unread"
        return f"{self.names}, kept in their codes{rows if self.quantises_rows else ''}"


def find_configuration(directory: Path, configured: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a checkpoint's `quantization_config`: the given one, or what ModelOpt writes in a file of its own."""
    if configured:
        return dict(configured)
    try:
        found = json.loads((directory / MODELOPT_FILE).read_bytes())["quantization"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UnservedQuantisationError(
            f"{directory / MODELOPT_FILE} is not what ModelOpt writes: {error!r}"
        ) from error
    return {"quant_method": "modelopt", **found} if found.get("quant_algo") else None


def read_quantisation(config: Mapping[str, Any] | None) -> Quantisation | None:
    """Read a `quantization_config`; None stands for a checkpoint that is not quantised.

    Raises:
        UnservedQuantisationError: it is of a kind that is not served.
    """
    if not config:
        return None
    method = str(config.get("quant_method", "unknown"))
    if method not in _READERS:
        name = f"{KNOWN[method]} ({method})" if method in KNOWN else f"{method!r}"
        raise UnservedQuantisationError(
            f"the checkpoint is quantised with {name}; served are {SERVED}, and bfloat16, float16 and float32"
        )
    return _READERS[method](config)


def _fp8(config: Mapping[str, Any]) -> Quantisation:
    """Of DeepSeek's, transformers' and MiniMax' files."""
    method, block = str(config["quant_method"]), config.get("weight_block_size")
    plain = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    if not isinstance(plain, list | tuple) or not all(_is_pattern(each) for each in plain):
        raise UnservedQuantisationError(
            f"the checkpoint's quantization_config has modules_to_not_convert = {plain!r}, which is no list of names or "
            f"regular expressions"
        )
    if (fmt := str(config.get("fmt", "e4m3"))) not in ("e4m3", "float8_e4m3fn"):
        raise _unserved(method, f"fmt = {fmt!r}", "'e4m3'")
    if (experts := str(config.get("expert_dtype", "fp8"))) not in ("fp8", "fp4"):
        raise _unserved(method, f"expert_dtype = {experts!r}", "'fp8' or 'fp4'")
    if config.get("modules_to_convert"):
        raise _unserved(
            method, f"modules_to_convert = {config['modules_to_convert']}", "linear layers and experts only"
        )
    if method == "mxfp8" or (block and _pair(block) == (1, MICRO_BLOCK)):
        formats = [WeightFormat(name="mxfp8", block=MICRO_BLOCK)]
    elif block:
        formats = [_blocks(method, "weight_block_size", block)]
    else:
        formats = [WeightFormat(name="fp8", block_rows=0), WeightFormat(name="fp8")]
    if experts == "fp4":
        formats.append(WeightFormat(name="mxfp4", block=MICRO_BLOCK))
    return Quantisation(
        method=method, formats=tuple(formats), plain_modules=tuple(plain),
        quantises_rows=config.get("activation_scheme") == "static",
    )  # fmt: skip


def _mxfp4(config: Mapping[str, Any]) -> Quantisation:
    """Of gpt-oss' files."""
    plain = config.get("modules_to_not_convert") or ()
    return Quantisation(
        method="mxfp4", formats=(WeightFormat(name="mxfp4", block=MICRO_BLOCK),), plain_modules=tuple(plain)
    )


def _compressed_tensors(config: Mapping[str, Any]) -> Quantisation:
    method = str(config["quant_method"])
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense" or "24" in str(config.get("format", "")):
        raise _unserved(method, "sparse weights", "dense ones")
    if config.get("transform_config"):
        raise _unserved(method, "transform_config (rotated weights)", "weights that are not rotated")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _unserved(method, f"config_groups = {groups!r}", "groups with targets and weights")
    weights = [(name, group["weights"]) for name, group in groups.items() if group.get("weights")]
    return Quantisation(
        method=method,
        formats=_known_once(_of_group(method, name, scheme) for name, scheme in weights),
        quantises_rows=bool(config.get("kv_cache_scheme"))
        or any(group.get("input_activations") for group in groups.values()),
    )


def _of_group(method: str, name: str, scheme: Mapping[str, Any]) -> WeightFormat:
    """Read the weights of one of config_groups."""
    bits, kind, size = scheme.get("num_bits"), str(scheme.get("type")), scheme.get("group_size") or 0
    # Where there is none, compressed-tensors tells by the size.
    strategy = scheme.get("strategy") or {0: "tensor", -1: "channel"}.get(size, "group")
    if (bits, kind) == (8, "float"):
        if strategy == "block":
            return _blocks(method, f"{name}.weights.block_structure", scheme.get("block_structure"))
        if strategy == "group" and size == MICRO_BLOCK:
            return WeightFormat(name="mxfp8", block=MICRO_BLOCK)
        if strategy in ("tensor", "channel"):
            return WeightFormat(name="fp8", block_rows=int(strategy == "channel"))
    if (bits, kind) == (4, "float") and size in (MICRO_BLOCK, NVFP4_BLOCK):
        return WeightFormat(name="nvfp4" if size == NVFP4_BLOCK else "mxfp4", block=size)
    zeros = not scheme.get("symmetric", True)
    if kind == "int" and (bits == 4 or (bits == 8 and not zeros)):
        if strategy == "channel" or (strategy == "tensor" and not zeros):
            return WeightFormat(name=f"int{bits}", block_rows=int(strategy == "channel"), has_zeros=zeros)
        if strategy == "group" and isinstance(size, int) and size > 0 and size % 2 == 0:
            return WeightFormat(name=f"int{bits}", block=size, has_zeros=zeros)
    symmetric = ", not symmetric" if zeros else ""
    raise _unserved(
        method,
        f"{name}: weights of {bits} bits, type {kind!r}, strategy {strategy!r}, groups of {size}{symmetric}",
        SERVED,
    )


_MODELOPT = {
    "FP8": WeightFormat(name="fp8", block_rows=0),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat(name="fp8"),
    "FP8_PB_WO": WeightFormat(name="fp8", block_rows=128, block=128),
    "FP8_BLOCK_SCALES": WeightFormat(name="fp8", block_rows=128, block=128),
    "NVFP4": WeightFormat(name="nvfp4", block=NVFP4_BLOCK),
    "W4A16_NVFP4": WeightFormat(name="nvfp4", block=NVFP4_BLOCK),
    "MXFP8": WeightFormat(name="mxfp8", block=MICRO_BLOCK),
    "MXFP4": WeightFormat(name="mxfp4", block=MICRO_BLOCK),
    "W4A8_MXFP4_FP8": WeightFormat(name="mxfp4", block=MICRO_BLOCK),
}


def _modelopt(config: Mapping[str, Any]) -> Quantisation:
    if config.get("quant_algo") not in (None, "MIXED_PRECISION"):
        algorithms = [config["quant_algo"]]
    else:
        listed = (*_values(config.get("quantized_layers")), *_weights_of_groups(config))
        algorithms = [
            layer["quant_algo"] for layer in listed if layer.get("quant_algo") not in (None, "UNQUANTIZED")
        ]
    unknown = [each for each in algorithms if each not in _MODELOPT]
    if unknown:
        raise _unserved("modelopt", f"quant_algo = {unknown[0]!r}", f"one of {', '.join(_MODELOPT)}")
    if algorithms:
        formats = _known_once(_MODELOPT[each] for each in algorithms)
    else:
        formats = _known_once(
            _of_group("modelopt", "config_groups", each) for each in _weights_of_groups(config)
        )
    if not formats:
        raise _unserved(
            "modelopt", "no quant_algo of any layer (quantized_layers, config_groups)", "one for each layer"
        )
    return Quantisation(method="modelopt", formats=formats, quantises_rows=True)


def _values(named: Any) -> list[Mapping[str, Any]]:
    return (
        [each for each in named.values() if isinstance(each, Mapping)] if isinstance(named, Mapping) else []
    )


def _weights_of_groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return _values(
        {name: group.get("weights") for name, group in enumerate(_values(config.get("config_groups")))}
    )


def _awq(config: Mapping[str, Any]) -> Quantisation:
    if (version := str(config.get("version", "gemm")).lower()) != "gemm":
        raise _unserved("awq", f"version = {version!r}", "'gemm'")
    return Quantisation(method="awq", formats=(_grouped("awq", config, bits=(4,)),))


def _gptq(config: Mapping[str, Any]) -> Quantisation:
    layout = str(config.get("checkpoint_format") or "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _unserved("gptq", f"checkpoint_format = {layout!r}", "'gptq' or 'gptq_v2'")
    if [rule for rule in config.get("dynamic") or () if not str(rule).startswith("-:")]:
        raise _unserved("gptq", "dynamic (modules with bits of their own)", "one number of bits")
    only = _grouped("gptq", config, bits=(4, 8))
    return Quantisation(method="gptq", formats=(only,), zeros_above=int(layout == "gptq"))


def _grouped(method: str, config: Mapping[str, Any], bits: tuple[int, ...]) -> WeightFormat:
    seen, size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    if seen not in bits:
        raise _unserved(method, f"bits = {seen!r}", " or ".join(map(str, bits)))
    if not isinstance(size, int) or size == 0 or size < -1 or (size % 2 and size > 0):
        raise _unserved(method, f"group_size = {size!r}", "an even number, or -1")
    has_zeros = seen == 4 and bool(config.get("zero_point", True))
    return WeightFormat(name=f"int{seen}", block=max(size, 0), has_zeros=has_zeros)


def _quark(config: Mapping[str, Any]) -> Quantisation:
    named = (config.get("layer_quant_config"), config.get("layer_type_quant_config"))
    parts = _values({"global": config.get("global_quant_config")}) + [
        part for each in named for part in _values(each)
    ]
    schemes = [part["weight"] for part in parts if part.get("weight")]
    return Quantisation(
        method="quark", formats=_known_once(_of_quark(scheme) for scheme in schemes), quantises_rows=True
    )


def _of_quark(scheme: Any) -> WeightFormat:
    seen = scheme if isinstance(scheme, Mapping) else {}
    kind, how, size = seen.get("dtype"), seen.get("qscheme"), seen.get("group_size")
    if (
        kind == "fp4"
        and how in ("per_group", None)
        and (size, seen.get("scale_format")) == (MICRO_BLOCK, "e8m0")
    ):
        return WeightFormat(name="mxfp4", block=MICRO_BLOCK)
    if kind in ("fp8_e4m3", "int8") and how in ("per_tensor", "per_channel"):
        return WeightFormat(
            name="fp8" if kind == "fp8_e4m3" else "int8", block_rows=int(how == "per_channel")
        )
    raise _unserved(
        "quark", f"weights of dtype {kind!r}, qscheme {how!r}, groups of {size}",
        "'fp4' in groups of 32 under e8m0, 'fp8_e4m3' or 'int8' per tensor or channel",
    )  # fmt: skip


_READERS = {
    "fp8": _fp8, "mxfp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt,
    "awq": _awq, "gptq": _gptq, "quark": _quark,
}  # fmt: skip


def _known_once(formats: Iterable[WeightFormat]) -> tuple[WeightFormat, ...]:
    return tuple(dict.fromkeys(formats))


def _blocks(method: str, field: str, block: Any) -> WeightFormat:
    """FP8 under a scale per block."""
    pair = _pair(block)
    if pair is None or pair[0] % ROWS:
        raise _unserved(method, f"{field} = {block}", f"[multiple of {ROWS}, any] such as [128, 128]")
    return WeightFormat(name="fp8", block_rows=pair[0], block=pair[1])


def _pair(block: Any) -> tuple[int, int] | None:
    if isinstance(block, list | tuple) and len(block) == 2:
        rows, columns = block
        if isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0:
            return rows, columns
    return None


def _is_pattern(pattern: Any) -> bool:
    try:
        re.compile(pattern)
    except (re.error, TypeError):
        return False
    return True


def _unserved(method: str, seen: str, allowed: str) -> UnservedQuantisationError:
    return UnservedQuantisationError(
        f"the checkpoint is quantised as {method} with {seen}; served is {allowed}. Give such a checkpoint, or one in "
        f"bfloat16, float16 or float32"
    )
