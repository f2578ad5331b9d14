"""Which files make a tokenizer, and those that cannot be built exactly: they are refused, never read another way.

`tokenizer.json` holds everything: vocabulary, split, special tokens. SentencePiece models and vocab.json with merges.txt
are read by transformers' own classes. A tiktoken file lacks the split; only Kimi's is known (`kimi_tokenizer`). Code that
comes with a checkpoint is never run, and nobody is asked whether to run it.
"""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from server.front.published.kimi_tokenizer import RANKS_FILE, UnknownTokenizerError, load_kimi

_CONFIG_FILE = "tokenizer_config.json"
_WHOLE_FILE = "tokenizer.json"
# transformers' classes for them need no code; `tokenizer.model` may also be tiktoken's form, which Llama 3 published.
_OTHER_FILES = ("spiece.model", "sentencepiece*.model", "vocab.json", "vocab.txt", "tekken.json")
_INSTEAD = "give a folder with this model's tokenizer.json and tokenizer_config.json as --tokenizer"


def load_tokenizer(directory: Path, vocab_size: int | None) -> Any:
    """Load a tokenizer with transformers, or build it.

    Args:
        vocab_size: of the model.

    Raises:
        UnknownTokenizerError: its files do not say all of it.
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
            f"{ranks.name} does not say how text is split, the code that comes with the checkpoint does, and is not "
            f"run; {_INSTEAD}"
        )
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        if (
            directory / _WHOLE_FILE
        ).is_file():  # it needs no code; transformers looks at the class's name only
            return PreTrainedTokenizerFast.from_pretrained(directory, trust_remote_code=False)
        raise UnknownTokenizerError(
            f"its class {config.get('tokenizer_class')} is code that comes with the checkpoint, which is not run; {_INSTEAD}"
        ) from error


def _ranks_file(directory: Path) -> Path | None:
    """Find the tiktoken file of a tokenizer that has nothing else; None if it has, or has no such file."""
    if (directory / _WHOLE_FILE).is_file():
        return None
    if (directory / RANKS_FILE).is_file():
        return directory / RANKS_FILE
    if any(path for pattern in _OTHER_FILES for path in directory.glob(pattern)):
        return None
    candidates = [*sorted(directory.glob("*.tiktoken")), directory / "tokenizer.model"]
    return next((path for path in candidates if path.is_file() and _is_tiktoken(path)), None)


def _is_tiktoken(path: Path) -> bool:
    """Tell by its first line: base64 and rank 0. A SentencePiece model is a binary message."""
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
