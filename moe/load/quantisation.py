"""Read a checkpoint's quantisation from its configuration; refuse unsupported ones by name.

Does not use torch, so the check before the start can use it too. The tensors in the files decide which weights are
quantised (`moe.load.stored_tensors`); this module lists the formats that may occur. The list of modules that are not
quantised (`moe.load.exclusions`) is for `wideep size`, which may have no files, and to find contradictions in FP8 files.
A CPU multiplies activations as they are, which is closer to the original model. A GPU with FP8 units quantises the rows of
FP8 weights if the checkpoint does so at run time (`WeightFormat.fp8_rows`); other quantisation of activations is ignored. Settings that would otherwise change answers (rotated or smoothed activations, sparse weights) are refused.

Sources: the configurations that compressed-tensors, NVIDIA ModelOpt, AutoAWQ, GPTQModel, AMD Quark and AutoRound write,
and those that SGLang (w8a8_int8, w8a8_fp8) and transformers (fbgemm_fp8) read.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moe.load.exclusions import Exclusions, Rule

ROWS = 16  # outputs that share an FP8 scale on CPU; a block's rows must be a multiple of this
MICRO_BLOCK, NVFP4_BLOCK = 32, 16
FP8_ROW_BLOCK = 128  # inputs of a row that share a scale, if not all do
MODELOPT_FILE = "hf_quant_config.json"
SERVED = "fp8 (blocks, channels, tensors), mxfp8, mxfp4, nvfp4, int8 and int4 of compressed-tensors and ModelOpt, awq and gptq"
# Other values of quant_method: the tool's or format's full name, and the reason why it is not supported.
KNOWN = {
    "bitsandbytes": "bitsandbytes: its codes index a table of values (NF4, FP4) with quantised scales, or outliers are separate",
    "torchao": "torchao: its tensors use custom classes",
    "blockwise_int8": "int8 in blocks: no kernel supports int8 scales that rows share",
    "nvfp4": "NVFP4 of an unknown tool: ModelOpt's and compressed-tensors' are supported",
    "hqq": "HQQ: its zeros are floating-point numbers, which no kernel supports",
}  # fmt: skip


class UnservedQuantisationError(ValueError):
    """A quantisation that is not supported; the message names it and lists the supported ones."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """A storage format of weights in a checkpoint."""

    name: str  # fp8, mxfp8, int8, int4, nvfp4 or mxfp4
    block_rows: int = 1  # outputs that share a scale; 0: all
    block: int = 0  # inputs that share a scale; 0: all
    has_zeros: bool = False  # int4 codes with a zero point per block
    # The checkpoint quantises the rows that it multiplies to e4m3 at run time, with a scale for `block` inputs.
    fp8_rows: bool = False


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """Storage of the quantised weights of a checkpoint."""

    method: str  # quant_method
    formats: tuple[WeightFormat, ...]  # that may occur
    plain_modules: tuple[str, ...] = ()  # the configuration's list of modules that are not quantised
    zeros_above: int = 0  # to add to a stored zero (GPTQ's first format)
    quantises_rows: bool = False  # the checkpoint quantises activations, which is ignored
    # Name suffix of weights that consist of this many parts of rows, each with its own blocks.
    row_parts: tuple[str, int] | None = None

    def parts_of(self, name: str) -> int:
        """Return the number of parts of a weight's rows with their own blocks; the last block of each may be short."""
        return self.row_parts[1] if self.row_parts and name.endswith(self.row_parts[0]) else 1

    def leaves_plain(self, module: str) -> bool:
        """Return whether `plain_modules` names a module."""
        return module in self._exclusions

    @cached_property
    def _exclusions(self) -> Exclusions:
        return Exclusions(self.plain_modules, _RULES[self.method])

    @property
    def names(self) -> str:
        """Names of the formats."""
        return " and ".join(dict.fromkeys(each.name for each in self.formats))

    @property
    def in_words(self) -> str:
        """Description for the log at start."""
        rows = "; activations, keys and values are not quantised: their scales in the checkpoint are ignored"
        return f"{self.names}, kept as stored{rows if self.quantises_rows else ''}"

    def described(self, *, fp8_rows: bool) -> str:
        """Return the description for a device that may quantise the rows of FP8 weights."""
        blocks = [each.block for each in self.formats if each.fp8_rows]
        if not (fp8_rows and blocks):
            return self.in_words
        per = f"token and {blocks[0]} inputs" if blocks[0] else "token"
        return (
            f"{self.names}, kept as stored; rows of FP8 weights are quantised to FP8 per {per}, as in the checkpoint's "
            "configuration (--activation-dtype bf16 disables this)"
        )


def find_configuration(directory: Path, configured: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return `quantization_config`: the given one, or ModelOpt's file. Raises UnservedQuantisationError if damaged."""
    if configured:
        return dict(configured)
    try:
        found = json.loads((directory / MODELOPT_FILE).read_bytes())["quantization"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UnservedQuantisationError(
            f"{directory / MODELOPT_FILE} is not a ModelOpt file: {error!r}"
        ) from error
    return {"quant_method": "modelopt", **found} if found.get("quant_algo") else None


def read_quantisation(config: Mapping[str, Any] | None) -> Quantisation | None:
    """Read a `quantization_config`. Return None if the checkpoint is not quantised.

    Raises:
        UnservedQuantisationError: The quantisation is not supported.
    """
    if not config:
        return None
    method = str(config.get("quant_method", "unknown"))
    if method not in _READERS:
        name, _, why = KNOWN.get(method, repr(method)).partition(": ")
        reason = f" ({method}: {why})" if why else ""
        raise UnservedQuantisationError(
            f"the checkpoint is quantised with {name}{reason}; supported: {SERVED}, and bfloat16, float16 and float32"
        )
    return _READERS[method](config)


def _fp8(config: Mapping[str, Any]) -> Quantisation:
    """Read configurations of DeepSeek, transformers and MiniMax."""
    method, block = str(config["quant_method"]), config.get("weight_block_size")
    if (fmt := str(config.get("fmt", "e4m3"))) not in ("e4m3", "float8_e4m3fn"):
        raise _unserved(method, f"fmt = {fmt!r}", "'e4m3'")
    if (experts := str(config.get("expert_dtype", "fp8"))) not in ("fp8", "fp4"):
        raise _unserved(method, f"expert_dtype = {experts!r}", "'fp8' or 'fp4'")
    if config.get("modules_to_convert"):
        raise _unserved(
            method, f"modules_to_convert = {config['modules_to_convert']}", "linear layers and experts only"
        )
    scheme = config.get("activation_scheme")
    if method == "mxfp8" or (block and _pair(block) == (1, MICRO_BLOCK)):
        formats = [WeightFormat(name="mxfp8", block=MICRO_BLOCK)]
    elif block:
        formats = [_blocks(method, "weight_block_size", block, has_dynamic_rows=scheme == "dynamic")]
    else:
        formats = [WeightFormat(name="fp8", block_rows=rows, fp8_rows=scheme == "dynamic") for rows in (0, 1)]
    if experts == "fp4":
        formats.append(WeightFormat(name="mxfp4", block=MICRO_BLOCK))
    return Quantisation(
        method=method, formats=tuple(formats), plain_modules=_plain(method, config, "modules_to_not_convert", "ignored_layers"),
        quantises_rows=scheme == "static" or (scheme == "dynamic" and bool(block) and not formats[0].fp8_rows),
    )  # fmt: skip


def _mxfp4(config: Mapping[str, Any]) -> Quantisation:
    """Read gpt-oss configurations."""
    return Quantisation(
        method="mxfp4",
        formats=(WeightFormat(name="mxfp4", block=MICRO_BLOCK),),
        plain_modules=_plain("mxfp4", config, "modules_to_not_convert"),
    )


# compressed-tensors' TransformLocation. vLLM applies the others to activations ("input", "output"), keys and queries.
_STORED_TRANSFORMS = ("weight_input", "weight_output")


def _compressed_tensors(config: Mapping[str, Any]) -> Quantisation:
    method = str(config["quant_method"])
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense" or "24" in str(config.get("format", "")):
        raise _unserved(method, "sparse weights", "dense ones")
    if rotated := _rotates_rows(config.get("transform_config")):
        raise _unserved(
            method, rotated, "transforms at weight_input and weight_output, which are already in the weights"
        )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _unserved(method, f"config_groups = {groups!r}", "groups with targets and weights")
    weights = [(name, group["weights"]) for name, group in groups.items() if group.get("weights")]
    return Quantisation(
        method=method,
        formats=_known_once(
            _of_group(method, name, scheme, groups[name].get("input_activations")) for name, scheme in weights
        ),
        plain_modules=_plain(method, config, "ignore"),
        quantises_rows=bool(config.get("kv_cache_scheme"))
        or any(group.get("input_activations") for group in groups.values()),
    )


def _rotates_rows(transforms: Any) -> str | None:
    """Name a transform that must be applied to activations. Transforms of weights were applied before they were stored."""
    if not transforms:
        return None
    schemes = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    if not isinstance(schemes, Mapping):
        return f"transform_config = {transforms!r}"
    for name, scheme in schemes.items():
        listed = scheme.get("apply") if isinstance(scheme, Mapping) else None
        if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
            return f"transform_config: {name} = {scheme!r}"
        for each in listed:
            if each.get("location") not in _STORED_TRANSFORMS:
                return f"transform_config: {name} transforms activations at {each.get('location')!r} (rotated weights)"
    return None


def _of_group(method: str, name: str, scheme: Mapping[str, Any], rows: Any = None) -> WeightFormat:
    """Read the weights of one entry of config_groups, and its `input_activations`."""
    bits, kind, size = scheme.get("num_bits"), str(scheme.get("type")), scheme.get("group_size") or 0
    # Without a strategy, compressed-tensors derives it from the size.
    strategy = scheme.get("strategy") or {0: "tensor", -1: "channel"}.get(size, "group")
    if (bits, kind) == (8, "float"):
        if strategy == "block":
            structure, dynamic = scheme.get("block_structure"), _has_fp8_rows(rows, FP8_ROW_BLOCK)
            return _blocks(method, f"{name}.weights.block_structure", structure, has_dynamic_rows=dynamic)
        if strategy == "group" and size == MICRO_BLOCK:
            return WeightFormat(name="mxfp8", block=MICRO_BLOCK)
        if strategy in ("tensor", "channel"):
            return WeightFormat(
                name="fp8", block_rows=int(strategy == "channel"), fp8_rows=_has_fp8_rows(rows, 0)
            )
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


def _has_fp8_rows(scheme: Any, block: int) -> bool:
    """Return whether compressed-tensors quantises rows to e4m3 at run time, per token and `block` inputs (0: all)."""
    if not isinstance(scheme, Mapping) or (scheme.get("num_bits"), scheme.get("type")) != (8, "float"):
        return False
    wanted = ("group", block) if block else ("token", 0)
    is_dynamic = scheme.get("dynamic") is True and bool(scheme.get("symmetric", True))
    return is_dynamic and (scheme.get("strategy"), scheme.get("group_size") or 0) == wanted


_MODELOPT = {
    "FP8": WeightFormat(name="fp8", block_rows=0),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat(name="fp8", fp8_rows=True),
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
            "modelopt", "no quant_algo for any layer (quantized_layers, config_groups)", "one for each layer"
        )
    plain = _plain("modelopt", config, "exclude_modules", "ignore", "exclude")
    return Quantisation(method="modelopt", formats=formats, plain_modules=plain, quantises_rows=True)


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
    plain = _plain("awq", config, "modules_to_not_convert")
    return Quantisation(method="awq", formats=(_grouped("awq", config, bits=(4,)),), plain_modules=plain)


def _gptq(config: Mapping[str, Any]) -> Quantisation:
    layout = str(config.get("checkpoint_format") or "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _unserved("gptq", f"checkpoint_format = {layout!r}", "'gptq' or 'gptq_v2'")
    rules = [str(rule) for rule in config.get("dynamic") or ()]
    if not all(rule.startswith("-:") for rule in rules):
        raise _unserved("gptq", "dynamic (different bits for some modules)", "one number of bits")
    plain = _plain("gptq", {"dynamic": [rule.removeprefix("-:") for rule in rules]}, "dynamic")
    only = _grouped("gptq", config, bits=(4, 8))
    return Quantisation(
        method="gptq", formats=(only,), plain_modules=plain, zeros_above=int(layout == "gptq")
    )


# AutoRound's packings that match GPTQ's. Its own (auto_round) and AWQ's are not supported.
_AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2"}


def _auto_round(config: Mapping[str, Any]) -> Quantisation:
    """Read AutoRound configurations with GPTQ's layout (source: its export_to_autoround)."""
    packing, kind = config.get("packing_format", "auto_round:auto_gptq"), config.get("data_type", "int")
    if packing not in _AUTO_ROUND:
        raise _unserved("auto-round", f"packing_format = {packing!r}", " or ".join(map(repr, _AUTO_ROUND)))
    if kind != "int" or (config.get("act_bits") or 16) < 16:
        seen = f"data_type = {kind!r}, act_bits = {config.get('act_bits')!r}"
        raise _unserved("auto-round", seen, "'int' with act_bits = 16")
    layers = config.get("extra_config") or {}
    if not isinstance(layers, Mapping) or not all(isinstance(each, Mapping) for each in layers.values()):
        raise _unserved("auto-round", f"extra_config = {layers!r}", "an object of layers")
    bits = {name: layer.get("bits", config.get("bits")) for name, layer in layers.items()}
    others = [name for name, own in bits.items() if own != config.get("bits")]
    quantised = [name for name in others if not (isinstance(bits[name], int) and bits[name] >= 16)]
    if quantised:
        seen = f"extra_config of {quantised[0]} (different bits)"
        raise _unserved("auto-round", seen, "one number of bits, or 16")
    plain: dict[str, Any] = {f"-:(?:{name})$": {} for name in others}
    return _gptq({**config, "checkpoint_format": _AUTO_ROUND[packing], "dynamic": plain})


def _per_channel(method: str, name: str, *fields: str) -> Callable[[Mapping[str, Any]], Quantisation]:
    """Return a reader for tools with one format: a scale per output; activations quantised at inference."""

    def read(config: Mapping[str, Any]) -> Quantisation:
        return Quantisation(
            method=method,
            formats=(WeightFormat(name=name),),
            plain_modules=_plain(method, config, *fields),
            quantises_rows=True,
        )

    return read


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
        method="quark",
        formats=_known_once(_of_quark(scheme) for scheme in schemes),
        plain_modules=_plain("quark", config, "exclude"),
        quantises_rows=True,
    )


def _of_quark(scheme: Any) -> WeightFormat:
    if isinstance(scheme, list):
        kinds = [str(each.get("dtype")) for each in scheme if isinstance(each, Mapping)]
        raise _unserved("quark", f"weights quantised {len(scheme)} times ({', '.join(kinds)})", "once")
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


_RULES = {
    "fp8": Rule.TRANSFORMERS, "mxfp8": Rule.TRANSFORMERS, "mxfp4": Rule.TRANSFORMERS, "awq": Rule.SUBSTRING,
    "fbgemm_fp8": Rule.TRANSFORMERS, "w8a8_int8": Rule.WILDCARDS, "w8a8_fp8": Rule.WILDCARDS,
    "gptq": Rule.REGEX, "compressed-tensors": Rule.WILDCARDS, "modelopt": Rule.WILDCARDS, "quark": Rule.WILDCARDS,
}  # fmt: skip
_READERS = {
    "fp8": _fp8, "mxfp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt,
    "awq": _awq, "gptq": _gptq, "quark": _quark, "auto-round": _auto_round,
    "fbgemm_fp8": _per_channel("fbgemm_fp8", "fp8", "modules_to_not_convert"),
    "w8a8_int8": _per_channel("w8a8_int8", "int8", "ignore"), "w8a8_fp8": _per_channel("w8a8_fp8", "fp8", "ignore"),
}  # fmt: skip


def _known_once(formats: Iterable[WeightFormat]) -> tuple[WeightFormat, ...]:
    return tuple(dict.fromkeys(formats))


def _blocks(method: str, field: str, block: Any, *, has_dynamic_rows: bool = False) -> WeightFormat:
    """Return the format of FP8 with a scale per block."""
    pair = _pair(block)
    if pair is None or pair[0] % ROWS:
        raise _unserved(method, f"{field} = {block}", f"[multiple of {ROWS}, any] such as [128, 128]")
    fp8_rows = has_dynamic_rows and pair[1] == FP8_ROW_BLOCK
    return WeightFormat(name="fp8", block_rows=pair[0], block=pair[1], fp8_rows=fp8_rows)


def _pair(block: Any) -> tuple[int, int] | None:
    if isinstance(block, list | tuple) and len(block) == 2:
        rows, columns = block
        if isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0:
            return rows, columns
    return None


def _plain(method: str, config: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    """Read the list of modules that are not quantised, from the first of the fields that is set."""
    field = next((each for each in fields if config.get(each)), fields[0])
    listed, why = config.get(field) or (), ""
    if isinstance(listed, list | tuple) and all(isinstance(each, str) for each in listed):
        try:
            Exclusions(listed, _RULES[method])
            return tuple(listed)
        except re.error as error:
            why = f" ({error})"
    raise UnservedQuantisationError(
        f"the checkpoint's quantization_config has {field} = {listed!r}, which is not a list of names or regular expressions{why}"
    )


def _unserved(method: str, seen: str, allowed: str) -> UnservedQuantisationError:
    return UnservedQuantisationError(
        f"the checkpoint is quantised as {method} with {seen}; supported: {allowed}. Use such a checkpoint, or one in "
        f"bfloat16, float16 or float32"
    )
