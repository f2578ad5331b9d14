"""The command line's options as keyword arguments, for scripts: the same names, defaults and checks."""

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from server.options.checks import OptionsError
from server.options.command_line import Options, options_from
from server.options.flags import add_model_arguments

PRIVATE_DEFAULTS = {"port": 0, "access_log": False}  # of a service that belongs to one script or batch


class _Parser(argparse.ArgumentParser):
    """Raises where a command line would end the process."""

    def error(self, message: str) -> NoReturn:
        raise OptionsError(message)


def options_from_keywords(model: str, keywords: Mapping[str, Any]) -> Options:
    """Return the options of `wideep serve MODEL`, each flag given as a keyword with underscores.

    Args:
        keywords: numbers and strings as they are, a flag without a value as a bool (enable_prefix_caching=False is
            --no-enable-prefix-caching), a flag that repeats as a list, JSON as a list or dict; None is not said. The
            port is a free one and nothing is logged of every request, unless said.

    Raises:
        OptionsError: no such option, or a value that its flag would not take.
    """
    parser = _Parser(prog="LLM", allow_abbrev=False, add_help=False)
    add_model_arguments(parser)
    parser.set_defaults(**PRIVATE_DEFAULTS)
    defaults = vars(parser.parse_args([]))
    unknown = sorted(set(keywords) - set(defaults))
    if unknown:
        known = ", ".join(sorted(set(defaults) - {"model"}))
        raise OptionsError(f"{unknown[0]!r} is no option; the options are {known}")
    switches = {name: value for name, value in keywords.items() if isinstance(defaults[name], bool)}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise OptionsError(f"{name} is {value!r}; it must be True or False")
    words = [
        word
        for name, value in keywords.items()
        if name not in switches and value is not None
        for word in _words(name, value, defaults[name])
    ]
    args = parser.parse_args(words, argparse.Namespace(**defaults))
    vars(args).update(switches, model=model)
    return options_from(args)


def _words(name: str, value: Any, default: Any) -> Iterator[str]:
    """Write one option as the command line has it."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        raise OptionsError(f"{name} is {value!r}; it takes a value and is no switch")
    is_json = isinstance(default, str) and default[:1] in ("[", "{")
    if not isinstance(value, list | tuple) or is_json:
        value = [value]
    for each in value:
        yield f"{flag}={json.dumps(each) if isinstance(each, list | tuple | dict) else each}"
