"""Read flags about adapters: NAME=PATH or the JSON of vLLM and SGLang, and the modules that adapters may change."""

import json
from typing import Any

from server.options.flag import OptionsError, texts

_NAMES, _PATHS = ("name", "lora_name"), ("path", "lora_path")
_OTHER_KEYS = {"base_model_name", "pinned", "is_3d_lora_weight"}


def read_modules(name: str, given: Any) -> tuple[str, ...]:
    """Read the values of a flag. Returns NAME=PATH for each.

    Raises:
        OptionsError: A value is neither, or a name is given twice.
    """
    words = texts(name, given)
    modules: dict[str, str] = {}
    for word in words:
        named, path = _of_json(name, word) if word.lstrip().startswith("{") else _of_word(name, word)
        if named in modules:
            raise OptionsError(f"{name} has the name {named!r} twice; give every adapter its own name")
        modules[named] = path
    return tuple(f"{named}={path}" for named, path in modules.items())


def read_targets(name: str, given: Any) -> tuple[str, ...]:
    """Read the names of modules. Returns () for all of them, which SGLang calls `all`.

    Raises:
        OptionsError: A value is not the last part of a module's name.
    """
    words = tuple(dict.fromkeys(texts(name, given)))
    if words == ("all",):
        return ()
    for word in words:
        if not word.isidentifier() or word == "all":
            raise OptionsError(
                f"{name} is {word!r}; give the last parts of modules' names, such as q_proj or experts, or only `all`"
            )
    return words


def modules_of(words: tuple[str, ...]) -> dict[str, str]:
    """Return the directories of the adapters by name, from the output of `read_modules`."""
    parts = (word.partition("=") for word in words)
    return {name: path for name, _, path in parts}


def _of_word(name: str, word: str) -> tuple[str, str]:
    named, sign, path = word.partition("=")
    if not sign:  # SGLang: the path is the name
        named = path = word
    if not named or not path:
        raise OptionsError(f"{name} is {word!r}; give NAME=PATH, such as sql=/adapters/sql")
    return named, path


def _of_json(name: str, word: str) -> tuple[str, str]:
    try:
        fields = json.loads(word)
    except ValueError as error:
        raise OptionsError(f"{name} is {word!r}, which is not JSON: {error}") from error
    strangers = sorted(fields.keys() - {*_NAMES, *_PATHS} - _OTHER_KEYS)
    named = next((fields[key] for key in _NAMES if key in fields), None)
    path = next((fields[key] for key in _PATHS if key in fields), None)
    if strangers or not isinstance(named, str) or not isinstance(path, str) or "=" in named:
        raise OptionsError(
            f'{name} is {word!r}; give NAME=PATH or {{"name": NAME, "path": PATH}}, where NAME has no ='
        )
    return named, path
