"""`wideep serve --help`: the common flags; `--help=GROUP`, `--help=FLAG` or `--help=all` show the others.

A service has over a hundred flags, of which most readers need about fifteen. vLLM's `--help=ConfigGroup` has the same
form. docs/options.md, generated from the same table, lists all flags with their defaults.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from server.options.flag import Group, Option, OptionsError, add_flags, words_of
from server.options.table import OPTIONS

ALL = "all"
_COMMON = Group("common flags", "")
_COMMON_KEYWORDS = (
    "model", "data_parallel_size", "device", "dtype", "quantization", "max_model_len", "kv_cache_memory",
    "gpu_memory_utilization", "host", "port", "served_model_name", "api_key_file", "tool_call_parser",
    "reasoning_parser", "enable_eplb", "speculative_config",
)  # fmt: skip


class HelpAction(argparse.Action):
    """Print the requested flags and exit with status 0, or with status 2 if the topic is unknown."""

    def __init__(self, option_strings: Sequence[str], dest: str = argparse.SUPPRESS, **_: Any) -> None:
        super().__init__(
            option_strings, dest, nargs="?", default=argparse.SUPPRESS, metavar="GROUP",
            help="show the common flags, the flags of a group, flags with a word in their name, or all flags",
        )  # fmt: skip

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: Any, topic: Any, _flag: str | None = None
    ) -> None:
        """Print the help and exit."""
        if topic == ALL:
            parser.print_help()
            parser.exit()
        try:
            shown = _options_on(topic)
        except OptionsError as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
        brief = argparse.ArgumentParser(
            prog=parser.prog, usage=parser.usage, add_help=False, formatter_class=parser.formatter_class,
            description=parser.description if topic is None else None,
            epilog=f"{_groups_text(parser.prog)}\n{parser.epilog or ''}" if topic is None else None,
        )  # fmt: skip
        add_flags(brief, shown, {})
        brief.print_help()
        parser.exit()


def group_words() -> tuple[str, ...]:
    """Return the names of the groups for `--help=NAME`."""
    return tuple(dict.fromkeys(_word_of(option.flag.group) for option in OPTIONS))


def _options_on(topic: str | None) -> list[Option]:
    """Return the options to show.

    Raises:
        OptionsError: The topic is neither a group nor part of a flag's name.
    """
    if topic is None:
        return [
            option._replace(flag=dataclasses.replace(option.flag, group=_COMMON))
            for name in _COMMON_KEYWORDS
            for option in OPTIONS
            if option.keyword == name
        ]
    wanted = topic.lower().replace("_", "-")
    shown = [option for option in OPTIONS if _word_of(option.flag.group) == wanted]
    shown = shown or [
        option for option in OPTIONS if any(wanted in word.lower() for word in words_of(option))
    ]
    if not shown:
        raise OptionsError(
            f"--help={topic} is neither a group nor part of a flag's name; the groups are {', '.join(group_words())}, and "
            f"{ALL} shows every flag"
        )
    return shown


def _groups_text(prog: str) -> str:
    titles = dict.fromkeys(option.flag.group for option in OPTIONS)
    rows = "\n".join(f"  {prog} --help={_word_of(group):12} {group.title}" for group in titles)
    return f"more flags:\n{rows}\n  {prog} --help={ALL:12} every flag"


def _word_of(group: Group) -> str:
    """Return a group's title as one word."""
    return {
        "HTTP endpoint": "http",
        "tool calls and reasoning": "tools",
        "expert placement": "placement",
        "fault tolerance": "faults",
        "logs and traces": "logs",
    }.get(group.title, group.title.replace(" ", "-").lower())
