"""A command of `wideep` as one record: its help, its flags, and the function that runs it."""

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SERVING, USING, PLANNING = "serve a model", "use a service", "plan and check"  # headings of `wideep --help`


def _pass_on(args: argparse.Namespace) -> tuple[Any, ...]:
    return (args,)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    `run` names its function as "module:function". The module is imported when the command runs, so `wideep --help` imports no
    torch. A verb's parser may name another function with `set_defaults(run=...)`.
    """

    name: str
    run: str
    group: str = ""  # heading in `wideep --help`; an empty one hides the command
    help: str = ""
    description: str = ""
    examples: str = ""
    usage: str | None = None
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda _parser: None
    # Returns the arguments of the function; raises OptionsError.
    prepare: Callable[[argparse.Namespace], tuple[Any, ...]] = _pass_on
    takes_options: bool = False  # the flags include those of a service
    has_own_help: bool = False  # `add_flags` adds --help
    needs_transformers: bool = False


def run_named(name: str, *arguments: Any) -> Any:
    """Import the module of "module:function", call the function and return its result."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(*arguments)
