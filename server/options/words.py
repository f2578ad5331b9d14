"""A command line as people type it, before it is parsed: underscores for dashes, JSON key by key; and words nobody knows.

vLLM's users write --max_model_len, --eplb-config.num_redundant_experts 32 and -O3. What is left over after parsing is
answered by a sentence that names the nearest flag there is.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from server.options.reading import known_words, nearest

_HELP_BY_GROUP = ("wideep serve", "wideep worker")


def spelled(words: Sequence[str]) -> list[str]:
    """Return a command's words with dashes in the names of flags, and JSON that came key by key as one value."""
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
                found += [base, ""]  # its place; the value is written below
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
    """Say what is wrong with the words that a parser has left over.

    Args:
        command: such as `wideep serve`.
        own: the flags of a command that is not a service's.
    """
    flag = next((word for word in left if word.startswith("-")), None)
    if flag is None:
        return f"{left[0]!r} is one word too many; `{command} --help` says what it takes"
    name = flag.partition("=")[0]
    question = nearest(name, list(own)) or nearest(name, known_words())
    listed = f"{command} --help=all" if command in _HELP_BY_GROUP else f"{command} --help"
    return f"{name} is no flag of `{command}`{question}; `{listed}` lists them"
