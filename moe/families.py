"""What a model must be for us to serve it, and what its layers cache; read off its modules, not its name.

There is no list of supported families: a model fits when its experts go through `transformers`' experts
interface and every layer's attention goes through its attention interface with keys and values per token.
"""

from typing import Any

from transformers import PreTrainedModel

from kvcache.paged_cache import LayerShape

RECURRENT = ("linear_attention", "conv", "mamba", "recurrent", "hybrid")


class UnsupportedModelError(ValueError):
    """A model that cannot be served; the message says why."""


def check_config(config: Any) -> None:
    """Refuse what the configuration already rules out.

    Raises:
        UnsupportedModelError: recurrent layers, sparse-index attention, an encoder-decoder, or quantised weights.
    """
    name = config.model_type
    recurrent = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind in RECURRENT})
    if recurrent:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(recurrent)}: they keep a recurrent state instead of keys and "
            f"values, which the paged KV cache cannot hold"
        )
    if getattr(config, "index_topk", None):
        raise UnsupportedModelError(
            f"{name} picks the tokens it attends to with a sparse index (index_topk = {config.index_topk}), "
            f"which the attention kernels do not have"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders are served")
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"{name} is quantised ({config.quantization_config.get('quant_method', 'unknown method')}); "
            f"give a checkpoint in bfloat16, float16 or float32"
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise UnsupportedModelError(f"{name} soft-caps its attention scores, which the kernels do not have")


def experts_modules(model: PreTrainedModel) -> dict[str, Any]:
    """Find the experts modules, by name, in layer order.

    Raises:
        UnsupportedModelError: there are none (not a MoE, or experts outside the interface).
    """
    found = {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}
    if not found:
        raise UnsupportedModelError(
            f"{model.config.model_type} has no experts that transformers lets us serve: it is not a "
            f"Mixture-of-Experts model, or its experts do not use the experts interface"
        )
    for name, module in found.items():
        if getattr(module, "has_post_expert_norm", False):
            raise UnsupportedModelError(
                f"{name} normalises each expert's output, which the experts organ does not do"
            )
    return found


def cache_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """What each layer caches per token, in layer order.

    Raises:
        UnsupportedModelError: a layer without an attention that caches keys and values per token.
    """
    shapes: dict[int, LayerShape] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if layer is None or not hasattr(module, "scaling"):
            continue
        if hasattr(module, "expand_kv"):
            latent = module.kv_lora_rank + module.qk_rope_head_dim
            shapes[layer] = LayerShape(num_kv_heads=1, key_dim=latent, value_dim=0, latent=True)
        elif hasattr(module, "k_proj") and hasattr(module, "v_proj"):
            dim = module.head_dim
            heads = module.k_proj.out_features // dim
            shapes[layer] = LayerShape(
                num_kv_heads=heads, key_dim=dim, value_dim=module.v_proj.out_features // heads
            )
    layers = model.config.num_hidden_layers
    odd = sorted(set(range(layers)) - set(shapes))
    if odd:
        raise UnsupportedModelError(
            f"{model.config.model_type}: layers {odd[:8]} have no attention that caches keys and values per token"
        )
    return [shapes[layer] for layer in range(layers)]
