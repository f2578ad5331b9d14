"""Match modules against a checkpoint's list of unquantised modules. Does not use torch.

Each tool has its own rule for such a list:

- transformers (fp8, mxfp8, mxfp4): a regular expression of whole name parts from a module's start, or the end of its name.
- compressed-tensors: a name, or a regular expression after "re:".
- ModelOpt and Quark: a name with wildcards, or a regular expression after "re:".
- AutoAWQ: any part of a name.
- GPTQModel: regular expressions (the "-:" rules of `dynamic`).

The lists of published checkpoints have hundreds of entries (712 in GLM-5-FP8, 978 in Qwen3.8-FP8) and are used for
every weight. So entries without wildcards are looked up in sets, and all others are compiled once.
A list names modules as in the published code. transformers may put the same layer under another stem:
`language_model.model.layers.3`, `model.language_model.layers.3` and `model.layers.3` are the same layer.
Rejected: matching every entry with `re.match`. Its cache holds 512 expressions, so GLM-5-FP8 took 45 ms per weight.
"""

import fnmatch
import re
from collections.abc import Iterator, Sequence
from enum import Enum

_STEMS = (
    "", "model.", "language_model.", "language_model.model.", "model.language_model.", "backbone.", "model.backbone.",
)  # fmt: skip
_STEM = re.compile(r"(?:(?:model|language_model|backbone)\.)*")
_IS_NAME = re.compile(r"[\w.-]*\Z")
_REGEX = "re:"


class Rule(Enum):
    """How a tool interprets the entries of its list."""

    TRANSFORMERS = "regular expression of whole names, or the end of a name"
    WILDCARDS = "name with wildcards, or regular expression after re:"
    SUBSTRING = "part of a name"
    REGEX = "regular expression"


class Exclusions:
    """A compiled list of modules that are not quantised: `module in exclusions`."""

    def __init__(self, entries: Sequence[str], rule: Rule) -> None:
        """Compile the list.

        Raises:
            re.error: An entry is not a valid regular expression.
        """
        names, others = _split(entries, rule)
        self._parts = tuple(entries) if rule is Rule.SUBSTRING else ()
        self._names = frozenset(map(_without_stem, names))
        self._names_parents = rule is Rule.TRANSFORMERS
        # transformers compares ends of names as text. Names of other tools may lack their first parts.
        front = "" if rule is Rule.TRANSFORMERS else "."
        self._ends = frozenset(front + each for each in names)
        self._lengths = sorted({len(each) for each in self._ends})
        self._begins: tuple[str, ...] = ()
        self._patterns: list[re.Pattern[str]] = []
        if rule is Rule.TRANSFORMERS:
            boundary = r"(?:(?<=\.)|(?=\.|$))"
            self._patterns = [re.compile(f"(?:{each}){boundary}") for each in others]
        elif rule is Rule.REGEX:
            self._patterns = [re.compile(each) for each in others]
        elif rule is Rule.WILDCARDS:
            self._compile_wildcards(others)

    def __contains__(self, module: str) -> bool:
        """Return whether the list names a module, given by its name in the model or in the checkpoint."""
        if self._is_named(module) or self._is_named(_without_stem(module)) or self._has_end(module):
            return True
        if not (self._begins or self._patterns or self._parts):
            return False
        return any(
            spelled.startswith(self._begins)
            or any(pattern.match(spelled) for pattern in self._patterns)
            or any(part in spelled for part in self._parts)
            for spelled in _spellings(module)
        )

    def _compile_wildcards(self, entries: list[str]) -> None:
        expressions = [each.removeprefix(_REGEX) for each in entries if each.startswith(_REGEX)]
        globs = [each for each in entries if not each.startswith(_REGEX)]
        is_begin = {each: each.endswith("*") and bool(_IS_NAME.match(each[:-1])) for each in globs}
        self._begins = tuple(each[:-1] for each in globs if is_begin[each])
        inner = [fnmatch.translate(each) for each in globs if not is_begin[each]]
        self._patterns = [re.compile(each) for each in (*expressions, *(["|".join(inner)] if inner else []))]

    def _is_named(self, tail: str) -> bool:
        if tail in self._names:
            return True
        return self._names_parents and any(parent in self._names for parent in _parents(tail))

    def _has_end(self, module: str) -> bool:
        return any(module[-length:] in self._ends for length in self._lengths)


def _split(entries: Sequence[str], rule: Rule) -> tuple[list[str], list[str]]:
    """Separate plain names from patterns."""
    if rule is Rule.SUBSTRING:
        return [], []
    is_name = [rule is not Rule.REGEX and bool(_IS_NAME.match(each)) for each in entries]
    pairs = list(zip(entries, is_name, strict=True))
    return [each for each, named in pairs if named], [each for each, named in pairs if not named]


def _without_stem(module: str) -> str:
    found = _STEM.match(module)
    return module[found.end() :] if found else module


def _spellings(module: str) -> Iterator[str]:
    tail = _without_stem(module)
    yield module
    yield from (spelled for stem in _STEMS if (spelled := f"{stem}{tail}") != module)


def _parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module
