"""Read the commands and scripts in code blocks of README and docs/, and the requirements of each.

`console` blocks have commands after "$ ", and their output. `bash` blocks have commands only, and `python` blocks are
scripts. A comment `# needs: WHAT` in a block informs readers and tests that the rest of the block cannot run everywhere (it
needs a GPU, several nodes, a large model, third-party packages). Blocks in other languages show files or output.
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

    line: int  # line of the page where its block starts
    language: str
    text: str
    needs: str  # requirements beyond an ordinary machine; may be empty


def documented(page: Path) -> list[Documented]:
    """Return all commands and scripts of a page in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in _BLOCK.finditer(text):
        line, language = text[: block.start()].count("\n") + 1, block[1]
        assert language in LANGUAGES, f"{page.name}:{line} is in {language!r}; supported: {LANGUAGES}"
        if language == "python":
            first, _, _ = block[2].partition("\n")
            needs = first.removeprefix(_NEEDS) if first.startswith(_NEEDS) else ""
            found.append(Documented(line, language, block[2], needs))
        elif language in ("console", "bash"):
            commands = list(_commands(block[2], has_prompts=language == "console"))
            assert commands, f"{page.name}:{line} has no command; use a `text` block for output"
            found += [Documented(line, language, command, needs) for command, needs in commands]
    return found


def _commands(block: str, *, has_prompts: bool) -> Iterator[tuple[str, str]]:
    """Yield a block's commands and their requirements. An open quote or a final backslash continues a command."""
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
    assert not command, f"unterminated command: {command}"


def _has_open_quote(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False
