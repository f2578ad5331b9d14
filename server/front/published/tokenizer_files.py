"""Load a tokenizer from its files, and refuse one that cannot be built exactly.

`tokenizer.json` holds everything: vocabulary, split, special tokens. SentencePiece models and vocab.json with merges.txt
are read by transformers' own classes. A tiktoken file lacks the split, and only Kimi's is known (`kimi_tokenizer`). Code
from a checkpoint is never run, and no option allows it.
"""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from server.front.published.kimi_tokenizer import RANKS_FILE, UnknownTokenizerError, load_kimi

_CONFIG_FILE = "tokenizer_config.json"
_WHOLE_FILE = "tokenizer.json"
# transformers' classes for these need no code. `tokenizer.model` may also be a tiktoken file, as published for Llama 3.
_OTHER_FILES = ("spiece.model", "sentencepiece*.model", "vocab.json", "vocab.txt", "tekken.json")
_INSTEAD = "give a folder with this model's tokenizer.json and tokenizer_config.json as --tokenizer"


def load_tokenizer(directory: Path, vocab_size: int | None) -> Any:
    """Load a tokenizer with transformers, or build it.

    Args:
        vocab_size: Vocabulary size of the model.

    Raises:
        UnknownTokenizerError: Its files do not define it completely.
        OSError, ValueError, KeyError, ImportError, AttributeError: transformers cannot read it.
    """
    config = _read_config(directory)
    ranks = _ranks_file(directory)
    if ranks is not None and ranks.name == RANKS_FILE:
        try:
            return load_kimi(directory, config, vocab_size)
        except UnknownTokenizerError as error:
            raise UnknownTokenizerError(f"{error}; {_INSTEAD}") from error
    if ranks is not None:
        raise UnknownTokenizerError(
            f"{ranks.name} does not define how text is split; the checkpoint's code does, and such code is not run; "
            f"{_INSTEAD}"
        )
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        # tokenizer.json needs no code; transformers only checks the name of the class.
        if (directory / _WHOLE_FILE).is_file():
            return PreTrainedTokenizerFast.from_pretrained(directory, trust_remote_code=False)
        raise UnknownTokenizerError(
            f"its class {config.get('tokenizer_class')} is defined by the checkpoint's code, which is not run; {_INSTEAD}"
        ) from error


def _ranks_file(directory: Path) -> Path | None:
    """Return the tiktoken file of a tokenizer that has no other form, or None."""
    if (directory / _WHOLE_FILE).is_file():
        return None
    if (directory / RANKS_FILE).is_file():
        return directory / RANKS_FILE
    if any(path for pattern in _OTHER_FILES for path in directory.glob(pattern)):
        return None
    candidates = [*sorted(directory.glob("*.tiktoken")), directory / "tokenizer.model"]
    return next((path for path in candidates if path.is_file() and _is_tiktoken(path)), None)


def _is_tiktoken(path: Path) -> bool:
    """Return whether the first line is base64 and rank 0. A SentencePiece model is a binary message."""
    with path.open("rb") as file:
        parts = file.readline(256).split()
    return len(parts) == 2 and parts[1] == b"0"


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / _CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise UnknownTokenizerError(f"{path} is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}
