"""A model's tokens as bytes: all that a grammar needs to know of a tokenizer.

Whoever builds a vocabulary knows the tokenizer (`server.front.tokenizer`); ranks compile with it, and the front's checker
process gets it as JSON. Knows no library.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens by id."""

    tokens: tuple[bytes, ...]  # what each stands for; special tokens by their names, unused ids empty
    special_ids: frozenset[int]  # tokens that are no text
    end_ids: frozenset[int]  # of those, the ones that end an answer


LoadVocabulary = Callable[[], Vocabulary]


def vocabulary_to_json(vocabulary: Vocabulary) -> str:
    """Encode on one line."""
    return json.dumps(
        {
            "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
            "special_ids": sorted(vocabulary.special_ids),
            "end_ids": sorted(vocabulary.end_ids),
        }
    )


def vocabulary_from_json(text: str) -> Vocabulary:
    """Decode."""
    content = json.loads(text)
    return Vocabulary(
        tokens=tuple(token.encode("latin-1") for token in content["tokens"]),
        special_ids=frozenset(content["special_ids"]),
        end_ids=frozenset(content["end_ids"]),
    )
