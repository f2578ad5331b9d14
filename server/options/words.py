"""Preparation of a command line for the parser (underscores for dashes, JSON key by key), and messages for unknown words.

Users of vLLM write --max_model_len, --eplb-config.num_redundant_experts 32 and -O3. The message for a word that the
parser does not know suggests the nearest flag.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from server.options.reading import known_words, nearest

_HELP_BY_GROUP = ("wideep serve", "wideep worker")


def spelled(words: Sequence[str]) -> list[str]:
    """Return a command's words with dashes in flag names and with JSON keys joined to one value."""
    found: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*found, word, *rest]
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            base, dot, keys = name.partition(".")
            name = base.replace("_", "-") + dot + keys
        base, _, keys = name.partition(".")
        if name[:2] == "-O" and name[2:].isdecimal():
            found += ["--optimization-level", name[2:]]
        elif keys and name.startswith("-") and base in known_words():
            if base not in objects:
                found += [base, ""]  # reserves the position; the value is filled in below
            given = value if equals else next(rest, "")
            _put(objects.setdefault(base, {}), keys.split("."), given)
        else:
            found.append(name + equals + value)
    for base, content in objects.items():
        found[found.index(base) + 1] = json.dumps(content)
    return found


def _put(content: dict[str, Any], keys: Sequence[str], given: str) -> None:
    for key in keys[:-1]:
        inner = content.setdefault(key, {})
        content = inner if isinstance(inner, dict) else {}
    try:
        content[keys[-1]] = json.loads(given)
    except ValueError:
        content[keys[-1]] = given


def why_unknown(left: Sequence[str], command: str, own: Iterable[str] = ()) -> str:
    """Return the message about words that the parser did not recognise.

    Args:
        command: Such as `wideep serve`.
        own: Flags of a command that does not start a service.
    """
    flag = next((word for word in left if word.startswith("-")), None)
    if flag is None:
        return f"unexpected argument {left[0]!r}; `{command} --help` lists the arguments"
    name = flag.partition("=")[0]
    question = nearest(name, list(own)) or nearest(name, known_words())
    listed = f"{command} --help=all" if command in _HELP_BY_GROUP else f"{command} --help"
    return f"{name} is not a flag of `{command}`{question}; `{listed}` lists them"
