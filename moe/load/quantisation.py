"""How a checkpoint is quantised, read off its configuration: what is served, and what is refused by name.

Knows no torch, so that the check before the start uses it too. The files' own tensors have the last word about which
weight is quantised (`moe.load.stored_tensors`); this says how to read those that are. Activations are never quantised here:
a format that wants them quantised by numbers of the checkpoint would give other answers, and is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_BLOCK = 128  # inputs under one scale that the CPU kernels take
ROWS = 16  # outputs that share an FP8 scale on CPU: a block's must be a multiple
SERVED = "fp8 with weight blocks (DeepSeek-V3's, transformers' fine-grained FP8) and mxfp4 (gpt-oss)"
# What else is found under quant_method, for people who do not know the word in their config.json.
KNOWN = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "NVIDIA ModelOpt",
    "fbgemm_fp8": "FBGEMM FP8",
    "quark": "AMD Quark",
    "torchao": "torchao",
    "auto-round": "AutoRound",
    "nvfp4": "NVFP4",
}


class UnservedQuantisationError(ValueError):
    """A quantisation that is not served; the message names it and says what is."""


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """How the quantised weights of a checkpoint are stored."""

    method: str  # fp8 or mxfp4
    block_rows: int  # outputs under one scale
    block: int  # inputs under one scale
    plain_modules: tuple[str, ...] = ()  # patterns of modules that are not quantised

    def leaves_plain(self, module: str) -> bool:
        """Whether `plain_modules` names a module: as a regular expression of whole names from its start, or as its end.

        That is transformers' rule since 5.23; before, "mlp.gate" named "mlp.gate_proj" as well.
        """
        boundary = r"(?:(?<=\.)|(?=\.|$))"
        return any(
            re.match(f"(?:{pattern}){boundary}", module) or module.endswith(pattern)
            for pattern in self.plain_modules
        )


def read_quantisation(config: Mapping[str, Any] | None) -> Quantisation | None:
    """Read a `quantization_config`; None stands for a checkpoint that is not quantised.

    Raises:
        UnservedQuantisationError: it is of a kind that is not served.
    """
    if not config:
        return None
    method = str(config.get("quant_method", "unknown"))
    plain = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    if not isinstance(plain, list | tuple) or not all(_is_pattern(each) for each in plain):
        raise UnservedQuantisationError(
            f"the checkpoint's quantization_config has modules_to_not_convert = {plain!r}, which is no list of names or "
            f"regular expressions"
        )
    if method == "mxfp4":
        return Quantisation(method=method, block_rows=1, block=32, plain_modules=tuple(plain))
    if method == "fp8":
        rows, block = _fp8_block(config)
        return Quantisation(method=method, block_rows=rows, block=block, plain_modules=tuple(plain))
    name = f"{KNOWN[method]} ({method})" if method in KNOWN else f"{method!r}"
    raise UnservedQuantisationError(
        f"the checkpoint is quantised with {name}; served are {SERVED}, and bfloat16, float16 and float32"
    )


def _fp8_block(config: Mapping[str, Any]) -> tuple[int, int]:
    """Check what FP8 leaves open; returns outputs and inputs under one scale."""
    block = config.get("weight_block_size")
    if not block:
        raise _unserved("one scale per tensor (no weight_block_size)", "scales per block of the weight")
    if not _is_block(block):
        raise _unserved(
            f"weight_block_size = {block}", f"[multiple of {ROWS}, up to {MAX_BLOCK}] such as [128, 128]"
        )
    if (scheme := str(config.get("activation_scheme", "dynamic"))) != "dynamic":
        raise _unserved(
            f"activation_scheme = {scheme!r}", "'dynamic', which leaves activations to the server"
        )
    if (fmt := str(config.get("fmt", "e4m3"))) not in ("e4m3", "float8_e4m3fn"):
        raise _unserved(f"fmt = {fmt!r}", "'e4m3'")
    if (experts := str(config.get("expert_dtype", "fp8"))) != "fp8":
        raise _unserved(f"expert_dtype = {experts!r}", "'fp8'")
    if config.get("modules_to_convert"):
        raise _unserved(
            f"modules_to_convert = {config['modules_to_convert']}", "linear layers and experts only"
        )
    return block[0], block[1]


def _is_pattern(pattern: Any) -> bool:
    try:
        re.compile(pattern)
    except (re.error, TypeError):
        return False
    return True


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
        and block[0] % ROWS == 0
        and block[1] <= MAX_BLOCK
    )


def _unserved(seen: str, allowed: str) -> UnservedQuantisationError:
    return UnservedQuantisationError(
        f"the checkpoint is quantised as fp8 with {seen}; served is {allowed}. Give such a checkpoint, or one in "
        f"bfloat16, float16 or float32"
    )
