"""A tiny dense Llama with seeded weights, which converts in milliseconds."""

import torch
from torch import Tensor
from transformers import LlamaConfig

from moe.demo_model.conversion import DenseMlp, Recipe

HIDDEN, NEURONS, LAYERS, VOCABULARY = 32, 24, 3, 64
RECIPE = Recipe(num_experts=6, experts_per_token=2, shared_neurons=12, expert_neurons=4)
EVERYTHING = Recipe(num_experts=4, experts_per_token=4, shared_neurons=12, expert_neurons=12)
"""Every expert holds every neuron that is not shared, and every token uses every expert."""


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=NEURONS,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Return fp32 weights that bf16 represents exactly."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).bfloat16().float()

    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, scale=1.0)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    shapes = {
        "self_attn.q_proj": (32, HIDDEN),
        "self_attn.k_proj": (16, HIDDEN),
        "self_attn.v_proj": (16, HIDDEN),
    }
    shapes |= {"self_attn.o_proj": (HIDDEN, 32), "mlp.gate_proj": (NEURONS, HIDDEN)}
    shapes |= {"mlp.up_proj": (NEURONS, HIDDEN), "mlp.down_proj": (HIDDEN, NEURONS)}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(*shape, scale=0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    return tensors


def dense_mlp(seed: int = 0) -> DenseMlp:
    generator = torch.Generator().manual_seed(seed)
    gate, up = torch.randn(2, NEURONS, HIDDEN, generator=generator)
    return DenseMlp(gate, up, torch.randn(HIDDEN, NEURONS, generator=generator))


def calibration_inputs(num_tokens: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs of two topics, each around a different direction. The second is labelled code."""
    generator = torch.Generator().manual_seed(seed)
    is_code = torch.arange(num_tokens) % 2 == 1
    directions = torch.randn(2, HIDDEN, generator=generator)
    return torch.randn(num_tokens, HIDDEN, generator=generator) + 2 * directions[is_code.long()], is_code
