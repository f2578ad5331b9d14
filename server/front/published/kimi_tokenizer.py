"""Kimi's tokenizer, built from `tiktoken.model` without running the checkpoint's `tokenization_kimi.py`.

A tiktoken file holds ranks only: the bytes of each token, and the order in which pairs merge. The text split and the
special tokens are in the Python file next to it. Kimi-K2, K2-Thinking, K2.5, K2.6, K2.7-Code and Kimi-Linear publish
the same split (`pat_str` in tokenization_kimi.py, for example revision 919416f of
moonshotai/Kimi-Linear-48B-A3B-Instruct). A checkpoint with another split, or of another family, is refused: transformers
would silently use its default split and return other tokens.

The ranks become a byte-level BPE of the `tokenizers` package. tiktoken merges any two neighbours that together are a
token, lowest rank first, so each way to cut a token in two is a merge of that token's rank. A piece that is a
token as a whole is never merged (`ignore_merges`). Rejected: the tiktoken package, an additional dependency, which yields
no object that the detokenizer and structured output could use.
"""

import ast
import base64
import binascii
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

RANKS_FILE = "tiktoken.model"
_CODE_FILE = "tokenization_kimi.py"
_CODE_CLASS = "tokenization_kimi.TikTokenTokenizer"
_KEPT = (  # fields of tokenizer_config.json
    "bos_token", "eos_token", "unk_token", "pad_token", "additional_special_tokens", "model_max_length",
    "clean_up_tokenization_spaces",
)  # fmt: skip
_NUM_RESERVED = 256  # ids after the ranks, `num_reserved_special_tokens` in tokenization_kimi.py
# `pat_str` of tokenization_kimi.py: runs of Han characters, separate from all other letters.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
KIMI_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDINGS}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# tokenization_kimi.py cuts longer text into parts and encodes them one by one: by length, and inside long runs of white
# space or of other characters.
_MAX_PART_CHARS = 400_000
_MAX_RUN_CHARS = 25_000
_RUNS = re.compile(r"\s+|\S+")


class UnknownTokenizerError(ValueError):
    """A tokenizer that cannot be built exactly. The message has the reason."""


def load_kimi(directory: Path, config: dict[str, Any], vocab_size: int | None) -> PreTrainedTokenizerFast:
    """Build Kimi's tokenizer.

    Args:
        config: Content of tokenizer_config.json.
        vocab_size: Vocabulary size of the model, which ends the reserved ids.

    Raises:
        UnknownTokenizerError: It is another tokenizer, or its files are damaged.
    """
    _check_is_kimi(directory, config)
    ranks = read_ranks(directory / RANKS_FILE)
    tokenizer = byte_pair_tokenizer(ranks, KIMI_SPLIT)
    named = {int(token_id): AddedToken(**token) for token_id, token in config["added_tokens_decoder"].items()}
    end = min(len(ranks) + _NUM_RESERVED, vocab_size or len(ranks) + _NUM_RESERVED)
    if outside := sorted(token_id for token_id in named if not len(ranks) <= token_id < end):
        raise UnknownTokenizerError(
            f"{directory / 'tokenizer_config.json'} gives names to the ids {outside}; {RANKS_FILE} leaves "
            f"{len(ranks)} to {end - 1} for such tokens"
        )
    unnamed = (f"<|reserved_token_{token_id}|>" for token_id in range(len(ranks), end))
    tokenizer.add_tokens(
        [
            named.get(token_id, AddedToken(name, normalized=False))
            for token_id, name in enumerate(unnamed, len(ranks))
        ]
    )
    said = {name: _content(config[name]) for name in _KEPT if config.get(name) is not None}
    return _KimiTokenizer(tokenizer_object=tokenizer, chat_template=_template(directory, config), **said)


class _KimiTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers has no type for it
    """Marks a tokenizer as Kimi's, so that long texts are encoded in parts and tools are sorted."""


def _content(said: Any) -> Any:
    """Return a setting of tokenizer_config.json, reduced to its text if it is a token's long form."""
    if isinstance(said, list):
        return [_content(each) for each in said]
    return said["content"] if isinstance(said, dict) else said


def _template(directory: Path, config: dict[str, Any]) -> Any:
    """Return the chat template, or several by name. chat_template.jinja takes precedence over tokenizer_config.json."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    said = config.get("chat_template")
    return {each["name"]: each["template"] for each in said} if isinstance(said, list) else said


def is_kimi(tokenizer: Any) -> bool:
    """Return whether a tokenizer was built by `load_kimi`."""
    return isinstance(tokenizer, _KimiTokenizer)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a tiktoken file. Each line has a token's bytes in base64, and its rank, which is its id.

    Raises:
        UnknownTokenizerError: The file is damaged, or lacks single bytes.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UnknownTokenizerError(
                f"{path}: line {number} is not a token and its rank: {error}"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UnknownTokenizerError(f"{path}: ranks are not 0 to {len(ranks) - 1}, each once")
    if lacking := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UnknownTokenizerError(
            f"{path}: the bytes {lacking} are not tokens, so some texts cannot be encoded"
        )
    return ranks


def byte_pair_tokenizer(ranks: dict[bytes, int], split: str) -> Tokenizer:
    """Return a tokenizer that splits by a regular expression and merges bytes by rank."""
    spelling = byte_level_alphabet()
    spelled = {token: "".join(map(spelling.__getitem__, token)) for token in ranks}
    model = models.BPE(
        vocab={text: ranks[token] for token, text in spelled.items()},
        merges=[(spelled[left], spelled[right]) for left, right in _merges(ranks)],
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield all pairs of tokens that join to a token, in the order of its rank."""
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            if token[:cut] in ranks and token[cut:] in ranks:
                yield token[:cut], token[cut:]


def parts_of(text: str) -> Iterator[str]:
    """Yield the parts that Kimi encodes one by one. Most texts are one part."""
    for start in range(0, len(text), _MAX_PART_CHARS):
        yield from _short_runs(text[start : start + _MAX_PART_CHARS])


def _short_runs(text: str) -> Iterator[str]:
    """Cut long runs of white space or of other characters."""
    start = 0
    for run in _RUNS.finditer(text):
        for cut in range(run.start() + _MAX_RUN_CHARS, run.end(), _MAX_RUN_CHARS):
            yield text[start:cut]
            start = cut
    yield text[start:]


def is_long(text: str) -> bool:
    """Return whether a text may have more than one part."""
    return len(text) > _MAX_RUN_CHARS


def byte_level_alphabet() -> dict[int, str]:
    """Return GPT-2's alphabet: printable bytes map to themselves, the others to U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable}
    return spelled | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


def _check_is_kimi(directory: Path, config: dict[str, Any]) -> None:
    """Raise if the tokenizer has a tiktoken file but is not Kimi's."""
    auto_map = config.get("auto_map")
    names = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    classes = names if isinstance(names, list) else [names]
    if _CODE_CLASS not in [str(name).rpartition("--")[2] for name in classes]:
        raise UnknownTokenizerError(
            f"{RANKS_FILE} does not define how text is split, and tokenizer_config.json does not name {_CODE_CLASS}, "
            f"the only class with a known split"
        )
    if not isinstance(config.get("added_tokens_decoder"), dict):
        raise UnknownTokenizerError(
            "tokenizer_config.json has no added_tokens_decoder, which names the special tokens"
        )
    code = directory / _CODE_FILE
    if code.is_file() and _split_in(code) != KIMI_SPLIT:
        raise UnknownTokenizerError(f"{code} splits text differently from Kimi's published split (`pat_str`)")


def _split_in(code: Path) -> str | None:
    """Read `pat_str = "|".join([...])` from Python source without running it. Returns None if it has another form."""
    try:
        tree = ast.parse(code.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Name(id="pat_str")],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Constant(value="|"), attr="join"), args=[ast.List() as parts]
                ),
            ):
                return "|".join(str(part.value) for part in parts.elts if isinstance(part, ast.Constant))
    return None
