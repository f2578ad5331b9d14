"""The text decoder of a multimodal model. Only the decoder is kept, and only its weights are read.

`transformers`' conditional-generation classes hold a decoder and towers for images and audio, and merge the towers'
output into the embedded tokens before the decoder runs. Without images there is nothing to merge: the class's own forward
(output projection, scalings, caps) is kept, and the part that merges runs only the decoder, on plain positions.
Rejected: building the decoder's own class. A quarter of the types have none, and its names are not the checkpoint's.
"""

from collections.abc import Callable, Container
from typing import Any
from weakref import ref

from torch import nn
from transformers import AutoModelForMultimodalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from attention.transformers_names import CACHE

# Arguments that a decoder takes, of all that the class's forward passes on.
_PASSED = ("input_ids", "position_ids", CACHE, "use_cache", "logits_to_keep", "pages")


def is_wrapped(config: Any) -> bool:
    """Return whether a configuration is of a multimodal model that contains a text decoder."""
    return (
        config.get_text_config(decoder=True) is not config
        and type(config) in AutoModelForMultimodalLM._model_mapping
    )


def keep_text(model: PreTrainedModel) -> bool:
    """Remove everything but a model's decoder and its own forward after the decoder; tensor names stay the same.

    Returns:
        Whether the model's structure allows this. If not, the model is unchanged.
    """
    # Llama 4's class merges in its own forward, which without images runs the decoder on the embedded tokens.
    joining, decoder = getattr(model, model.base_model_prefix, model), model.get_decoder()
    if not isinstance(joining, nn.Module) or decoder not in list(joining.children()):
        return False
    if model.get_output_embeddings() is None:  # the decoder has its own projection (Nemotron-H Omni)
        model.get_output_embeddings = decoder.get_output_embeddings
    whole, head = set(model.state_dict()), model.get_output_embeddings()
    model.conversions = get_model_conversion_mapping(model)
    for name, part in [*joining.named_children()]:
        if part is not decoder and part is not head:
            delattr(joining, name)
    if joining is model:
        # In transformers 5.24 the class reads image outputs from this output. They are absent, so every text would fail.
        decoder.forward = _with_output(decoder)
    else:
        joining.forward = _running(decoder)
    model.left_out = frozenset(whole - set(model.state_dict()))
    return True


def body_of(model: PreTrainedModel) -> nn.Module:
    """Return the module with the hidden states that a model's output projection takes."""
    if hasattr(model, model.base_model_prefix):
        body: nn.Module = getattr(model, model.base_model_prefix)
        return body
    head = model.get_output_embeddings()  # Llama 4 has another name for the module next to it
    siblings = next(list(module.children()) for module in model.modules() if head in list(module.children()))
    found: nn.Module = next(part for part in siblings if part is not head)
    return found


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model's decoder in order, or an empty list if it has no list of this name.

    Llama 4's decoder is a causal language model, so its layers are one level deeper than usual.
    """
    lists = (
        module
        for name, module in model.get_decoder().named_modules()
        if isinstance(module, nn.ModuleList) and f".{name}".endswith(".layers")
    )
    return list(next(lists, ()))


def leave_idle_experts(model: PreTrainedModel, called: Container[nn.Module]) -> None:
    """Remove parts of a model with experts that no text reaches (ERNIE-4.5-VL's image experts).

    Args:
        called: Modules that ran when the model was given a text.
    """
    whole, idle = set(model.state_dict()), set()
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated") and module not in called:
            path = name.split(".")
            parents = [".".join(path[:depth]) for depth in range(1, len(path) + 1)]
            # Lists of layers are never called themselves; their layers are.
            idle.add(next(each for each in parents if not _is_reached(model.get_submodule(each), called)))
    for name in idle:
        holder, _, leaf = name.rpartition(".")
        delattr(model.get_submodule(holder), leaf)
    if idle:
        model.left_out = left_out(model) | (whole - set(model.state_dict()))


def _is_reached(module: nn.Module, called: Container[nn.Module]) -> bool:
    return any(part in called for part in module.modules())


def left_out(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the parameters that `keep_text` and `leave_idle_experts` removed from a model."""
    names: frozenset[str] = getattr(model, "left_out", frozenset())
    return names


def conversions(model: PreTrainedModel) -> list[Any]:
    """Return the conversions from a checkpoint's names to a model's, including parts that `keep_text` removed."""
    whole: list[Any] | None = getattr(model, "conversions", None)
    return get_model_conversion_mapping(model) if whole is None else whole


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Let a model attend through the function registered as `name`."""
    attending: Any = model.get_decoder() if is_wrapped(model.config) else model
    attending.set_attn_implementation(name)


class Output:
    """A decoder's output, with None for every field that a removed part would have filled."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def __getitem__(self, index: int) -> Any:
        return self._output[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name, None)


def _with_output(decoder: nn.Module) -> Callable[..., Any]:
    own = ref(decoder)

    def forward(*inputs: Any, **options: Any) -> Any:
        run: Any = own()
        return Output(type(run).forward(run, *inputs, **options))

    return forward


def _running(decoder: nn.Module) -> Callable[..., Any]:
    own = ref(decoder)

    def forward(**inputs: Any) -> Any:
        passed = {name: inputs[name] for name in _PASSED if name in inputs}
        run: Any = own()
        return Output(run(**passed))

    return forward
