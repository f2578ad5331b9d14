"""Reading GGUF: names, layout and configuration, from a file written with the gguf package."""

from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from moe.demo_model.gguf_weights import TENSOR_NAMES, dense_llama, read_dense_model
from tests.moe.demo_model import tiny


def permute_as_llama_cpp(weight: Tensor, num_heads: int) -> Tensor:
    """Permute like llama.cpp's converter (convert_hf_to_gguf.py, LlamaModel.permute), as documented there."""
    rows = weight.shape[0]
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, weights: dict[str, Tensor]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    config = tiny.config()
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (config.vocab_size - 3))
    writer.add_token_merges(["t 4", "t 5"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")
    names = {ours: theirs for theirs, ours in TENSOR_NAMES.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in weights.items():
        parts = name.removesuffix(".weight").split(".")
        in_layer = parts[1] == "layers"
        kind = names[".".join(parts[3:] if in_layer else parts)]
        if kind in heads:
            weight = permute_as_llama_cpp(weight, heads[kind])
        writer.add_tensor(f"blk.{parts[2]}.{kind}.weight" if in_layer else f"{kind}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny.weights())
    return path


def test_all_weights_come_back_under_their_names(path: Path) -> None:
    read, expected = read_dense_model(path).weights, tiny.weights()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_configuration_and_vocabulary_come_from_the_file(path: Path) -> None:
    model = read_dense_model(path)
    expected = tiny.config().to_dict()
    assert {name: model.config.to_dict()[name] for name in expected} == expected
    vocabulary = model.vocabulary
    assert vocabulary.tokens[:2] == ["t0", "t1"] and len(vocabulary.tokens) == tiny.VOCABULARY
    assert vocabulary.merges == ["t 4", "t 5"]
    assert vocabulary.control_ids == [0, 1, 2]
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id, vocabulary.unk_id) == (1, 2, 2, 0)
    assert vocabulary.chat_template == "{{ messages }}"


def test_the_dense_model_computes_what_transformers_does(path: Path) -> None:
    oracle = LlamaForCausalLM(tiny.config()).eval()
    oracle.load_state_dict(tiny.weights(), strict=False)
    ids = torch.arange(20)[None] + 3
    with torch.inference_mode():
        assert torch.equal(dense_llama(read_dense_model(path))(ids).logits, oracle(ids).logits)
