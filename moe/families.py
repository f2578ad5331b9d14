"""Check from a model's configuration and modules, not from its name, whether it can be served.

There is no list of supported families. A model is accepted if its experts use `transformers`' experts interface, and
every attention layer uses its attention interface with keys and values per token (`moe.rehearsal` checks the latter).
"""

import inspect
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from moe import scaled_experts
from moe.load.checkpoint import Checkpoint
from moe.load.quantisation import (
    Quantisation,
    UnservedQuantisationError,
    find_configuration,
    read_quantisation,
)
from moe.long_rotary import KIND, limit_of
from moe.mtp.layers import add_drafting
from moe.mtp.names import MtpBlock, MtpNames, layers_of_config, why_no_mtp
from moe.published_types import PublishedTypeError, read_published, row_parts, settle
from moe.text_part import is_wrapped, keep_text

# Errors that transformers' configurations and models raise for invalid values: lists that are too short; numbers that are
# null, zero or text; a padding token outside the vocabulary; a missing package.
FOREIGN_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
# Fields with one entry for each decoder layer.
_PER_LAYER = (
    "layer_types", "mlp_layer_types", "indexer_types", "layers_block_type", "kv_sharing_modes", "no_rope_layers",
    "layer_rope_theta",
)  # fmt: skip


class UnsupportedModelError(ValueError):
    """A model that cannot be served; the message gives the reason."""


def read_config(directory: Path) -> Any:
    """Read the configuration of a model directory.

    Raises:
        UnsupportedModelError: It is missing or damaged, or `transformers` does not recognise the model.
    """
    if not (directory / "config.json").is_file():
        raise UnsupportedModelError(f"{directory} is not a model directory: it has no config.json")
    try:
        config = read_published(directory / "config.json")
        if config is None:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        config.get_text_config(decoder=True)  # Gemma 4 checks its values here
    except PublishedTypeError as error:
        raise UnsupportedModelError(f"{directory / 'config.json'} cannot be served: {error}") from error
    except (OSError, StrictDataclassError, *FOREIGN_ERRORS) as error:
        raise UnsupportedModelError(
            f"transformers cannot use {directory / 'config.json'}: {_said(error)} (code that comes with a "
            f"checkpoint is not run)"
        ) from error
    check_config(config)
    return config


def import_model(directory: Path) -> None:
    """Import a model's modules and transformers' table of renamed weights, so that processes that are forked later share them.

    Raises:
        UnsupportedModelError: As `read_config`.
    """
    config = read_config(directory)
    get_checkpoint_conversion_mapping(config.model_type)
    for kind in (AutoModelForMultimodalLM, AutoModelForCausalLM):
        with suppress(*FOREIGN_ERRORS):  # `build_on_meta` reports them
            kind._model_mapping.get(type(config), None)


def build_on_meta(
    config: Any, dtype: torch.dtype = torch.float32, mtp_layers: Sequence[Sequence[MtpBlock]] = ()
) -> PreTrainedModel:
    """Build a model's modules without their weights. They will compute in `dtype`.

    Args:
        mtp_layers: Decoder layers of each multi-token-prediction layer. Empty builds the model without them.

    Raises:
        UnsupportedModelError: `transformers` has no causal language model for it, or its values are invalid.
    """
    wrapped = is_wrapped(config)
    kinds = (AutoModelForMultimodalLM, AutoModelForCausalLM)[:: 1 if wrapped else -1]
    kind = next((each for each in kinds if type(config) in each._model_mapping), None)
    if kind is None:
        raise UnsupportedModelError(
            f"{config.model_type} has no causal language model in transformers; use a decoder-only text model"
        )
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(config, dtype=dtype)
        is_text = not wrapped or keep_text(model)
    except FOREIGN_ERRORS as error:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be built from its config.json: {type(error).__name__}: {_first_line(error)}"
        ) from error
    if not is_text:
        raise UnsupportedModelError(
            f"{config.model_type}: {type(model).__name__} does not separate its text decoder from the image parts, as other "
            f"models do; use a checkpoint of the text model alone"
        )
    settle(model)
    if mtp_layers:
        _add_drafting(model, mtp_layers)
    scaled_experts.exchange(model)
    _widen(model)
    _settle_rotary(model)
    return model.eval()


def _add_drafting(model: PreTrainedModel, layers: Sequence[Sequence[MtpBlock]]) -> None:
    try:
        add_drafting(model, layers)
    except (*FOREIGN_ERRORS, StopIteration) as error:
        raise UnsupportedModelError(
            f"{model.config.model_type}: its multi-token-prediction layers cannot be built like the decoder's: "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error


def _settle_rotary(model: PreTrainedModel) -> None:
    """Unwrap `dynamic` rotary embeddings, which look at the whole batch. This only matters past the served positions."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", ())
        if any("dynamic" in kind for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,))):
            forward = inspect.unwrap(type(module).forward)
            module.forward = MethodType(forward, module)


def _widen(model: PreTrainedModel) -> None:
    """Declare float32 those tensors that a family keeps in float32 in every dtype, such as a router's correction bias."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    pattern = re.compile("|".join(rf"(^|\.){name}($|\.)" for name in kept))
    for module_name, module in model.named_modules() if kept else ():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and pattern.search(f"{module_name}.{name}"):
                    tensor.data = tensor.data.float()


def find_mtp_layers(directory: Path, config: Any) -> tuple[tuple[MtpBlock, ...], ...]:
    """Return the decoder layers of each multi-token-prediction layer of a model directory.

    Raises:
        UnsupportedModelError: The model has no such layers.
        CheckpointError: Its files cannot be read.
    """
    text = config.get_text_config(decoder=True)
    first = int(text.num_hidden_layers)
    if any(directory.glob("*.safetensors")):
        layers = MtpNames(Checkpoint(directory).names(), first).layers
    else:
        layers = layers_of_config(text)
    if not layers:
        raise UnsupportedModelError(why_no_mtp(config.model_type, directory))
    return layers


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _said(error: Exception) -> str:
    """Return the message of an error that transformers raised on purpose; prefix other errors with their type."""
    if isinstance(error, StrictDataclassError):  # the reason is in the second line
        return " ".join(str(error).split())
    is_sentence = isinstance(error, OSError | ValueError)
    return _first_line(error) if is_sentence else f"{type(error).__name__}: {_first_line(error)}"


def check_config(config: Any) -> None:
    """Refuse a model that its configuration already rules out.

    Raises:
        UnsupportedModelError: It is an encoder-decoder, a list lacks layers, or a rotary embedding depends on the whole
            batch.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders are served")
    if problem := _why_too_short(config.get_text_config(decoder=True)):
        raise UnsupportedModelError(f"{name}: {problem}")
    if KIND in rotary_types(config) and limit_of(config) is None:
        raise UnsupportedModelError(
            f"{name} has rotary embeddings of type {KIND} in only some kinds of layers, so they change with the longest "
            f"sequence of a batch; only those that all layers share can be served"
        )


def _why_too_short(text: Any) -> str | None:
    """Name a list of the configuration that ends before the last layer. Longer lists are valid: they may cover MTP layers."""
    num_layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        return None
    for name in _PER_LAYER:
        listed = getattr(text, name, None)
        if isinstance(listed, list | tuple) and 0 < len(listed) < num_layers:
            return (
                f"{name} in config.json lists {len(listed)} of {num_layers} layers (num_hidden_layers); it needs an entry for "
                "each layer: correct config.json, or download it again"
            )
    return None


def quantisation_of(directory: Path, config: Any) -> Quantisation | None:
    """Read the quantisation of a checkpoint.

    Raises:
        UnsupportedModelError: The quantisation is not supported.
    """
    parts = (config, config.get_text_config(decoder=True))
    configured = next(
        (found for part in parts if (found := getattr(part, "quantization_config", None))), None
    )
    try:
        found = read_quantisation(find_configuration(directory, configured))
    except UnservedQuantisationError as error:
        raise UnsupportedModelError(f"{config.model_type}: {error}") from error
    return None if found is None else replace(found, row_parts=row_parts(config))


def rotary_types(config: Any) -> set[str]:
    """Return the kinds of rotary embedding in a configuration; it may have parameters per layer type."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return {part["rope_type"] for part in parts if "rope_type" in part}


def experts_modules(model: PreTrainedModel) -> dict[str, Any]:
    """Return the experts modules by name, in layer order.

    Raises:
        UnsupportedModelError: The model has none (it is not a MoE, or its experts do not use the interface), or they hold
            parameters that the experts organ does not support.
    """
    found = {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}
    if not found:
        raise UnsupportedModelError(
            f"{model.config.model_type} has no experts that can be served: it is not a Mixture-of-Experts "
            f"model, or its experts do not use the experts interface of transformers"
        )
    for name, module in found.items():
        _check_experts(name, module)
    counts = sorted({int(module.num_experts) for module in found.values()})
    if len(counts) > 1:
        raise UnsupportedModelError(
            f"{model.config.model_type} has layers of {' and '.join(map(str, counts))} experts; all layers must "
            f"have the same number"
        )
    return found


def leaves(module: Any) -> tuple[str, str]:
    """Return the names of an experts module's two weights."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def _check_experts(name: str, module: Any) -> None:
    wanted = {*leaves(module)}
    if module.has_bias:
        wanted |= {f"{leaf}_bias" for leaf in wanted}
    if getattr(module, "has_post_expert_norm", False):  # one norm for all experts, which stays in its module
        wanted |= {name for name, _ in module.named_parameters() if name.startswith("post_expert_norm.")}
    held = {leaf for leaf, _ in (*module.named_parameters(), *module.named_buffers())}
    if held != wanted:
        raise UnsupportedModelError(
            f"{name} holds {', '.join(sorted(held))}; experts with {', '.join(sorted(wanted))} are supported"
        )
