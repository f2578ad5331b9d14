"""A made-up tiktoken tokenizer in the form that Kimi publishes, and tiktoken's algorithm in plain Python as its oracle.

Some ranks are learnt from a text by byte-pair encoding. Others are drawn at random, so that some tokens are out of reach
of merges.
"""

import base64
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex  # type: ignore[import-untyped]

# As in the published tokenization_kimi.py (moonshotai/Kimi-Linear-48B-A3B-Instruct, revision 919416f).
PUBLISHED_SPLIT = (
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
)
_PATTERN = regex.compile("|".join(PUBLISHED_SPLIT), regex.V1)
_TEXT = (
    "The router picks experts. I'll say WE'VE seen DON'T and it's 1234567 times 89. 中文abc 你好世界 中文English混合。"
    "日本語のテキスト 한국어 Привет, мир!  two  spaces\n\n\ttab    \r\n aaaaaaaa abababab 中文中文 3.14 x=y+z; // 😀😀\n"
)
NAMED = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>", 17: "<|im_middle|>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
NOT_SPECIAL = ("<|tool_calls_section_begin|>",)  # in the published files too
CODE = """import tiktoken


class TikTokenTokenizer(PreTrainedTokenizer):
    num_reserved_special_tokens = 256
    pat_str = "|".join([
%s
    ])


raise AssertionError("code of a checkpoint was run")
"""


def made_up_ranks(num_learnt: int = 120, num_drawn: int = 40, seed: int = 5) -> dict[bytes, int]:
    """Return ranks of all single bytes, of pairs learnt from a text, and of tokens drawn at random."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    pieces = [[bytes([byte]) for byte in piece.encode()] for piece in _PATTERN.findall(_TEXT * 2)]
    for _ in range(num_learnt):
        pairs = Counter(pair for piece in pieces for pair in pairwise(piece))
        (left, right), _ = max(pairs.items(), key=lambda counted: (counted[1], counted[0]))
        ranks[left + right] = len(ranks)
        pieces = [_joined(piece, left, right) for piece in pieces]
    draw = random.Random(seed)
    while len(ranks) < 256 + num_learnt + num_drawn:
        ranks.setdefault(bytes(draw.choices(b"ab 's\n1\xe4\xb8\xad", k=draw.randint(2, 5))), len(ranks))
    return ranks


def _joined(piece: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    joined: list[bytes] = []
    for each in piece:
        if joined and joined[-1] == left and each == right:
            joined[-1] = left + right
        else:
            joined.append(each)
    return joined


def write_tiktoken(
    directory: Path,
    config: dict[str, Any] | None = None,
    *,
    ranks: dict[bytes, int] | None = None,
    chat_template: str | None = None,
    split: Iterable[str] = PUBLISHED_SPLIT,
) -> Path:
    """Write tiktoken.model, tokenizer_config.json, tokenization_kimi.py and config.json. Return `directory`."""
    ranks = made_up_ranks() if ranks is None else ranks
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokens = {
        str(len(ranks) + place): {"content": name, "special": name not in NOT_SPECIAL, **flags}
        for place, name in NAMED.items()
    }
    described = {
        "added_tokens_decoder": tokens,
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False, "model_max_length": 1_000_000,
    }  # fmt: skip
    if chat_template is not None:
        described["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    alternatives = "\n".join(f'        r"""{part}""",' for part in split)
    (directory / "tokenization_kimi.py").write_text(CODE % alternatives)
    written = {"model_type": "kimi_k2", "vocab_size": len(ranks) + 256, "max_position_embeddings": 256}
    (directory / "config.json").write_text(json.dumps(written if config is None else config))
    return directory


def oracle(ranks: dict[bytes, int]) -> Callable[[str], list[int]]:
    """Return tiktoken's encoding of text without special tokens (`_byte_pair_merge` of its lib.rs)."""

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for piece in _PATTERN.findall(text):
            whole = piece.encode()
            parts = [whole] if whole in ranks else _merged([bytes([byte]) for byte in whole], ranks)
            ids += [ranks[part] for part in parts]
        return ids

    return encode


def _merged(parts: list[bytes], ranks: dict[bytes, int]) -> list[bytes]:
    """Merge the adjacent pair of lowest rank, the first one on ties, until no pair is a token."""
    while True:
        found = [
            (ranks[left + right], place)
            for place, (left, right) in enumerate(pairwise(parts))
            if left + right in ranks
        ]
        if not found:
            return parts
        _, place = min(found)
        parts = [*parts[:place], parts[place] + parts[place + 1], *parts[place + 2 :]]
