"""What a model must be for us to serve it, read off its configuration and modules, not its name.

There is no list of supported families: a model fits when its experts go through `transformers`' experts
interface and every layer's attention goes through its attention interface with keys and values per token (which
`moe.rehearsal` finds out).
"""

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

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
from moe.text_part import is_wrapped, keep_text

# What the code of transformers' configurations and models raises for values that make no model: lists that are too short,
# numbers that are null, zero or text, a padding token outside the vocabulary, a package that is not installed.
FOREIGN_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
# One entry for each decoder layer.
_PER_LAYER = (
    "layer_types", "mlp_layer_types", "indexer_types", "layers_block_type", "kv_sharing_modes", "no_rope_layers",
    "layer_rope_theta",
)  # fmt: skip


class UnsupportedModelError(ValueError):
    """A model that cannot be served; the message says why."""


def read_config(directory: Path) -> Any:
    """Read a model directory's configuration.

    Raises:
        UnsupportedModelError: there is none, it is damaged, or `transformers` does not know the model.
    """
    if not (directory / "config.json").is_file():
        raise UnsupportedModelError(f"{directory} is not a model directory: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        config.get_text_config(decoder=True)  # where Gemma 4 looks at its values
    except (OSError, StrictDataclassError, *FOREIGN_ERRORS) as error:
        raise UnsupportedModelError(
            f"transformers cannot use {directory / 'config.json'}: {_said(error)} (code that comes with a "
            f"checkpoint is not run)"
        ) from error
    check_config(config)
    return config


def build_on_meta(
    config: Any, dtype: torch.dtype = torch.float32, mtp_layers: Sequence[Sequence[MtpBlock]] = ()
) -> PreTrainedModel:
    """Build a model's modules without their weights, to compute in `dtype`.

    Args:
        mtp_layers: the decoder layers of each of its multi-token-prediction layers; empty: it is to have none.

    Raises:
        UnsupportedModelError: `transformers` has no causal language model for it, or its values do not fit.
    """
    wrapped = is_wrapped(config)
    kinds = (AutoModelForMultimodalLM, AutoModelForCausalLM)[:: 1 if wrapped else -1]
    kind = next((each for each in kinds if type(config) in each._model_mapping), None)
    if kind is None:
        raise UnsupportedModelError(
            f"{config.model_type} is not a model that transformers can run as a causal language model; give a "
            f"decoder-only text model"
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
            f"{config.model_type}: {type(model).__name__} does not hold its text decoder apart from what sees images, as other "
            f"models do; give a checkpoint of the text model alone"
        )
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
    """Let `dynamic` rotary embeddings not look at the batch: they only change past the positions that are served."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", ())
        if any("dynamic" in kind for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,))):
            forward = inspect.unwrap(type(module).forward)
            module.forward = MethodType(forward, module)


def _widen(model: PreTrainedModel) -> None:
    """Declare float32 what a family keeps so whatever it computes in: biases that correct a router, say."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    pattern = re.compile("|".join(rf"(^|\.){name}($|\.)" for name in kept))
    for module_name, module in model.named_modules() if kept else ():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and pattern.search(f"{module_name}.{name}"):
                    tensor.data = tensor.data.float()


def find_mtp_layers(directory: Path, config: Any) -> tuple[tuple[MtpBlock, ...], ...]:
    """Find the multi-token-prediction layers of a model directory: the decoder layers of each.

    Raises:
        UnsupportedModelError: it has none.
        CheckpointError: its files cannot be read.
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
    """A sentence that transformers wrote, or the kind of an error that it did not foresee."""
    if isinstance(error, StrictDataclassError):  # the reason is in the second line
        return " ".join(str(error).split())
    is_sentence = isinstance(error, OSError | ValueError)
    return _first_line(error) if is_sentence else f"{type(error).__name__}: {_first_line(error)}"


def check_config(config: Any) -> None:
    """Refuse what the configuration already rules out.

    Raises:
        UnsupportedModelError: an encoder-decoder, a list without an entry for each layer, or a rotary embedding that depends
            on the whole batch.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders are served")
    if problem := _why_too_short(config.get_text_config(decoder=True)):
        raise UnsupportedModelError(f"{name}: {problem}")
    if KIND in rotary_types(config) and limit_of(config) is None:
        raise UnsupportedModelError(
            f"{name} has rotary embeddings of type {KIND} in some kinds of layers, which change with the longest sequence "
            f"of a batch: served are those that all layers share"
        )


def _why_too_short(text: Any) -> str | None:
    """Name a list of the configuration that ends before the last layer; longer ones may speak of MTP layers too."""
    num_layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        return None
    for name in _PER_LAYER:
        listed = getattr(text, name, None)
        if isinstance(listed, list | tuple) and 0 < len(listed) < num_layers:
            return (
                f"{name} in config.json lists {len(listed)} of {num_layers} layers (num_hidden_layers); it takes an entry for "
                "each: correct it, or get config.json again"
            )
    return None


def quantisation_of(directory: Path, config: Any) -> Quantisation | None:
    """Read how a checkpoint is quantised.

    Raises:
        UnsupportedModelError: in a way that is not served.
    """
    parts = (config, config.get_text_config(decoder=True))
    configured = next(
        (found for part in parts if (found := getattr(part, "quantization_config", None))), None
    )
    try:
        return read_quantisation(find_configuration(directory, configured))
    except UnservedQuantisationError as error:
        raise UnsupportedModelError(f"{config.model_type}: {error}") from error


def rotary_types(config: Any) -> set[str]:
    """Return the kinds of rotary embedding of a configuration, whose parameters may be per layer type."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return {part["rope_type"] for part in parts if "rope_type" in part}


def experts_modules(model: PreTrainedModel) -> dict[str, Any]:
    """Find the experts modules, by name, in layer order.

    Raises:
        UnsupportedModelError: there are none (not a MoE, or experts outside the interface), or they hold what the
            experts organ does not serve.
    """
    found = {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}
    if not found:
        raise UnsupportedModelError(
            f"{model.config.model_type} has no experts that transformers lets us serve: it is not a "
            f"Mixture-of-Experts model, or its experts do not use the experts interface"
        )
    for name, module in found.items():
        _check_experts(name, module)
    counts = sorted({int(module.num_experts) for module in found.values()})
    if len(counts) > 1:
        raise UnsupportedModelError(
            f"{model.config.model_type} has layers of {' and '.join(map(str, counts))} experts; all layers must "
            f"have as many"
        )
    return found


def leaves(module: Any) -> tuple[str, str]:
    """Return the names of an experts module's two weights."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def _check_experts(name: str, module: Any) -> None:
    wanted = {*leaves(module)}
    if module.has_bias:
        wanted |= {f"{leaf}_bias" for leaf in wanted}
    if getattr(module, "has_post_expert_norm", False):  # one for all experts, which stays its module
        wanted |= {name for name, _ in module.named_parameters() if name.startswith("post_expert_norm.")}
    held = {leaf for leaf, _ in (*module.named_parameters(), *module.named_buffers())}
    if held != wanted:
        raise UnsupportedModelError(
            f"{name} holds {', '.join(sorted(held))}; the experts organ serves {', '.join(sorted(wanted))}"
        )
