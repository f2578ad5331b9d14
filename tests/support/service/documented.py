"""What README and docs/ tell people to run: the commands and scripts of their code blocks, and what each of them needs.

Blocks in `console` have commands after "$ ", and what they print; blocks in `bash` have commands only; blocks in `python` are
scripts. A comment `# needs: WHAT` in a block says, to readers and to us, that what follows in it cannot run everywhere (a
GPU, several nodes, a model that is large, packages of others). Blocks in other languages show what is written or printed.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LANGUAGES = ("console", "bash", "python", "json", "yaml", "text", "")
_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NEEDS = "# needs: "


class Documented(NamedTuple):
    """A command or a script."""

    line: int  # of the page, where its block begins
    language: str
    text: str
    needs: str  # what not every machine has; empty: nothing


def documented(page: Path) -> list[Documented]:
    """Return all that a page tells people to run, in its order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in _BLOCK.finditer(text):
        line, language = text[: block.start()].count("\n") + 1, block[1]
        assert language in LANGUAGES, f"{page.name}:{line} is in {language!r}; the languages are {LANGUAGES}"
        if language == "python":
            first, _, _ = block[2].partition("\n")
            needs = first.removeprefix(_NEEDS) if first.startswith(_NEEDS) else ""
            found.append(Documented(line, language, block[2], needs))
        elif language in ("console", "bash"):
            commands = list(_commands(block[2], has_prompts=language == "console"))
            assert commands, f"{page.name}:{line} has no command; what programs write is a block of `text`"
            found += [Documented(line, language, command, needs) for command, needs in commands]
    return found


def _commands(block: str, *, has_prompts: bool) -> Iterator[tuple[str, str]]:
    """Yield a block's commands with what they need; a command goes on while a quote is open or its line ends in a backslash."""
    needs, command = "", ""
    for line in block.splitlines():
        if command:
            command += f"\n{line}"
        elif line.startswith(_NEEDS):
            needs = line.removeprefix(_NEEDS)
            continue
        elif has_prompts and line.startswith("$ "):
            command = line.removeprefix("$ ")
        elif not has_prompts and line.strip():
            command = line
        if command and not command.endswith("\\") and not _has_open_quote(command):
            yield command, needs
            command = ""
    assert not command, f"a command has no end: {command}"


def _has_open_quote(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False
