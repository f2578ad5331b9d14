"""Count prose habits that make a native reader read twice, by package: `python -m tests.house.prose [--lines PACKAGE]`.

Prose is docstrings, comments, every string literal with a blank, and the text of Markdown pages outside code blocks. The
habits are those of rule 5a of the house style that a pattern can find. A count of zero does not imply good English.
"""

import argparse
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Each begins at the start of a word. One search of a text for all of them is cheap: few words begin like one.
HABITS = {
    "machines that tell": r"(?:told|tells|telling|tell)\b",
    "machines that say": r"(?:said|says|saying|say)\b",
    "machines that ask": r"(?:asked|asks|asking)\b",
    "wish": r"wish(?:es|ed)?\b",
    "whoever, whatever": r"(?:whoever|whatever|whichever|however many|however)\b",
    "likewise": r"[Ll]ikewise\b",
    "nobody, somebody": r"(?:nobody|somebody|everybody|anybody)\b",
    "there is none": r"(?:is none|are none|is no )\b",
    "come to": r"(?:comes to|came to|come to)\b",
    "made of": r"(?:makes? of|made of)\b",
    "be had": r"(?:be had|is had)\b",
    "where for if": r"[Ww]here (?:nobody|there|it|they|one|a |an )\b",
    "in words": r"in words\b",
    "for ever": r"for ever\b",
    "wait out": r"waits? out\b|waited out\b",
    "of its own": r"of (?:its|our|their|his) own\b",
    "whose": r"whose\b",
    "at the most": r"at the (?:most|soonest|least)\b",
    "so many": r"so many\b",
    "pass over": r"(?:passed|passes|pass) over\b",
    "give up": r"(?:given|gives|give|gave) up\b",
    "amid": r"amid\b",
    "but for": r"but for\b",
    "aloud": r"aloud\b",
    "somebody's matter": r"(?:is|are) .{1,30}'s? (?:own )?(?:matter|business)\b",
    "anew": r"anew\b",
    "foretell": r"foretold\b|foretell",
    "beside": r"beside\b",
    "due": r"is due\b",
    "stand": r"stands?\b",
}
# A condition behind a semicolon.
_ELSE = r"[;,] else\b"
_PATTERN = re.compile(rf"\b(?:{'|'.join(HABITS.values())})|{_ELSE}")
_FENCED = re.compile(r"```.*?```", re.DOTALL)
# This file holds the patterns as data. The change log and the lab log are history.
_LEFT_OUT = {"tests/house/prose.py", "CHANGELOG.md", "docs/LOG.md"}


class Habit(NamedTuple):
    """One occurrence of a habit."""

    package: str
    file: str
    line: int
    text: str


def package_of(file: str) -> str:
    """Return the package that a file counts for. Each folder of the server is one package, and all pages together are one."""
    parts = file.split("/")
    if file.endswith(".md"):
        return "docs"
    return "/".join(parts[:2]) if parts[0] == "server" and len(parts) > 2 else parts[0]


def habits() -> Iterator[Habit]:
    """Yield every habit in the repository's prose."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for file in listed.stdout.split():
        if file not in _LEFT_OUT and (ROOT / file).is_file():
            yield from _habits_of(file)


def _habits_of(file: str) -> Iterator[Habit]:
    source = (ROOT / file).read_text(encoding="utf-8")
    if not _PATTERN.search(source):  # most files; taking the others apart is slow
        return
    for first, text in _prose_of(source) if file.endswith(".py") else [(1, _without_code(source))]:
        for number, line in enumerate(text.split("\n"), first):
            for _ in _PATTERN.finditer(line):
                yield Habit(package_of(file), file, number, line.strip())


def _prose_of(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            yield token.start[0], token.string


def _without_code(page: str) -> str:
    """Remove code blocks but keep line numbers."""
    return _FENCED.sub(lambda found: "\n" * found[0].count("\n"), page)


def main() -> None:
    """Print the counts of all packages, or the lines of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", metavar="PACKAGE", help="print this package's finds instead of counts")
    wanted = parser.parse_args().lines
    found = list(habits())
    if wanted:
        for each in found:
            if each.package == wanted:
                print(f"{each.file}:{each.line}: {each.text}")
        return
    for package in sorted({each.package for each in found}):
        print(f"    {package!r}: {sum(each.package == package for each in found)},")


if __name__ == "__main__":
    main()
