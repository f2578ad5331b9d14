"""`wideep completion bash`: a completion script, generated from the parsers and so from the table of options.

The script contains the words of each command and the values of each flag with a fixed list of values. All other words
are completed as file names, which suits MODEL and most values. zsh runs the same script through its `bashcompinit`.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

SHELLS = ("bash", "zsh")
_ZSH_HEAD = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """\
_wideep() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" words="" at="" word
  if [ "$cur" = "=" ]; then cur=""; elif [ "$prev" = "=" ]; then prev="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$at/$word" in
{steps}
    esac
  done
  case "$at $prev" in
{values}
    *) case "$at $cur" in
{flags}
       esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _wideep wideep
"""


class _Command(NamedTuple):
    """A command, or a verb of one."""

    path: str  # such as /experts/load; empty for wideep itself
    below: Sequence[str]  # commands, verbs or other words that may follow
    flags: Sequence[str]
    values: Mapping[str, Sequence[str]]  # flag -> its values, for flags with a fixed list


def completion_script(shell: str, parser: argparse.ArgumentParser, shown: Sequence[str]) -> str:
    """Return the completion script for a shell.

    Args:
        shown: Commands that --help shows; the other ones are internal.
    """
    commands = [each for each in _commands(parser, "") if not each.path or each.path.split("/")[1] in shown]
    steps = [
        f'      "{path}/{word}") at="{path}/{word}" ;;'
        for path, words, _, _ in commands
        for word in words
        if path or word in shown
    ]
    values = [
        f'    "{each.path} {flag}") words="{" ".join(words)}" ;;'
        for each in commands
        for flag, words in each.values.items()
    ]
    flags = [f'         "{each.path} -"*) words="{" ".join(each.flags)}" ;;' for each in commands]
    flags += [
        f'         "{each.path} "*) words="{" ".join(word for word in each.below if each.path or word in shown)}" ;;'
        for each in commands
        if each.below
    ]
    script = _SCRIPT.format(steps="\n".join(steps), values="\n".join(values), flags="\n".join(flags))
    return _ZSH_HEAD + script if shell == "zsh" else script


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[_Command]:
    # argparse has no public method that lists the arguments of a parser.
    actions = [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction)
    ]
    below: dict[str, argparse.ArgumentParser] = {}
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            below.update(action.choices)
    flags = [name for action in actions for name in action.option_strings if name.startswith("--")]
    values = {
        name: words for action in actions if (words := _values_of(action)) for name in action.option_strings
    }
    following = [word for action in actions if not action.option_strings for word in action.choices or ()]
    yield _Command(path, following, flags, values)
    for name, inner in below.items():
        yield from _commands(inner, f"{path}/{name}")


def _values_of(action: argparse.Action) -> tuple[str, ...]:
    """Return the fixed values of a flag, from its choices or its metavar."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    shown = action.metavar if isinstance(action.metavar, str) else ""
    words = shown.strip("{}").split(",") if shown.startswith("{") else []
    return tuple(word for word in words if not word.isupper())  # FOLDER is a placeholder
