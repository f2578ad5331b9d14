"""Writes the tokenizer as a Hugging Face fast tokenizer: tokenizer.json and tokenizer_config.json.

The pre-tokenizer is the one llama.cpp calls `smollm`: every digit by itself, then GPT-2's byte-level split.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moe.demo_model.gguf_weights import Vocabulary


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer; it adds no special tokens by itself."""
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


def write_tokenizer(vocabulary: Vocabulary, max_length: int, out: Path) -> None:
    """Write both files into `out`; `max_length` is the model's context in tokens."""
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
