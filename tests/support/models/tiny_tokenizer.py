"""A tiny byte-level tokenizer with a chat template, and the config files that turn its directory into a model's.

Every byte is a token, so that characters can be split over tokens. A few words are also tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MAX_LEN = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_TEXT = ["hello world the cat sat on the mat"] * 20


def write_tokenizer(
    directory: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    special_tokens: Sequence[str] = (),
) -> Path:
    """Write the files. Return `directory`. `more` special tokens follow the two default ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|start|>", "<|end|>", *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if chat_template is not None:
        described["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    (directory / "config.json").write_text(
        json.dumps({"model_type": "mixtral", "vocab_size": 320, "max_position_embeddings": MAX_LEN})
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "top_k": 7}))
    return directory
