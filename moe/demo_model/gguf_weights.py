"""Read a Llama model from a GGUF file: dense fp32 weights with transformers' names, and the tokenizer's tables.

Supports the layout of llama.cpp's converter. transformers can read GGUF too,
but needs `accelerate` for it, ignores the pre-tokenizer's digit split, and takes twice as long.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf import GGUFReader, dequantize
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufVocabulary(NamedTuple):
    """A byte-level BPE tokenizer's tables and special ids."""

    tokens: list[str]  # by id
    merges: list[str]  # "left right", best first
    control_ids: list[int]  # tokens that plain text never produces, such as <|im_end|>
    bos_id: int
    eos_id: int
    pad_id: int
    unk_id: int
    chat_template: str


class DenseModel(NamedTuple):
    """A dense Llama model from a GGUF file."""

    config: LlamaConfig
    weights: dict[str, Tensor]  # fp32, transformers' names; no lm_head, the embedding is tied
    vocabulary: GgufVocabulary


def read_dense_model(path: Path) -> DenseModel:
    """Read and dequantise the whole file."""
    reader = GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    vocabulary = read_vocabulary(field)
    config = read_config(field, vocabulary)
    return DenseModel(config=config, weights=read_weights(reader.tensors, config), vocabulary=vocabulary)


def dense_llama(model: DenseModel) -> LlamaForCausalLM:
    """Return transformers' model with these weights, in fp32, for inference. It shares their memory."""
    return LlamaForCausalLM.from_pretrained(
        None,
        config=model.config,
        state_dict=dict(model.weights),
        dtype=torch.float32,
        trust_remote_code=False,
    ).eval()


def read_vocabulary(field: Callable[[str], Any]) -> GgufVocabulary:
    """Read the tokenizer's tables; `field` returns the value of a GGUF key."""
    control = 3  # gguf.TokenType.CONTROL
    return GgufVocabulary(
        tokens=field("tokenizer.ggml.tokens"),
        merges=field("tokenizer.ggml.merges"),
        control_ids=[i for i, kind in enumerate(field("tokenizer.ggml.token_type")) if kind == control],
        bos_id=field("tokenizer.ggml.bos_token_id"),
        eos_id=field("tokenizer.ggml.eos_token_id"),
        pad_id=field("tokenizer.ggml.padding_token_id"),
        unk_id=field("tokenizer.ggml.unknown_token_id"),
        chat_template=field("tokenizer.chat_template"),
    )


def read_config(field: Callable[[str], Any], vocabulary: GgufVocabulary) -> LlamaConfig:
    """Return the dense model's configuration; `field` returns the value of a GGUF key."""
    return LlamaConfig(
        vocab_size=len(vocabulary.tokens),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        head_dim=field("llama.rope.dimension_count"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # fp32 1e-5 in the file
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=vocabulary.bos_id,
        eos_token_id=vocabulary.eos_id,
        pad_token_id=vocabulary.pad_id,
    )


def read_weights(tensors: list[Any], config: LlamaConfig) -> dict[str, Tensor]:
    """Dequantise every tensor to fp32, with transformers' names."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for packed in tensors:
        *layer, kind, _ = packed.name.split(".")  # blk.3.attn_q.weight, or output_norm.weight
        weight = torch.from_numpy(dequantize(packed.data, packed.tensor_type).copy())
        if kind in heads:
            weight = undo_rope_permutation(weight, heads[kind])
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{TENSOR_NAMES[kind]}.weight"] = weight
    return weights


def undo_rope_permutation(weight: Tensor, num_heads: int) -> Tensor:
    """Convert the rows of a q or k projection from llama.cpp's order to transformers'.

    llama.cpp rotates neighbouring rows (0,1), (2,3), ...; transformers rotates row i with row i + head_dim / 2.

    Args:
        weight: [num_heads * head_dim, hidden], as stored in GGUF.
        num_heads: Number of query heads for q, key heads for k.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(rows, hidden).contiguous()
