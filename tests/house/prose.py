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
HABITS = {
    "machines that tell": r"\b(?:told|tells|telling|tell)\b",
    "machines that say": r"\b(?:said|says|saying|say)\b",
    "machines that ask": r"\b(?:asked|asks|asking)\b",
    "wish": r"\bwish(?:es|ed)?\b",
    "whoever, whatever": r"\b(?:whoever|whatever|whichever|however many|however)\b",
    "likewise": r"\b[Ll]ikewise\b",
    "nobody, somebody": r"\b(?:nobody|somebody|everybody|anybody)\b",
    "there is none": r"\b(?:is none|are none|is no )\b",
    "come to": r"\b(?:comes to|came to|come to)\b",
    "made of": r"\b(?:makes? of|made of)\b",
    "be had": r"\b(?:be had|is had)\b",
    "where for if": r"\b[Ww]here (?:nobody|there|it|they|one|a |an )\b",
    "in words": r"\bin words\b",
    "for ever": r"\bfor ever\b",
    "wait out": r"\bwaits? out\b|\bwaited out\b",
    "of its own": r"\bof (?:its|our|their|his) own\b",
    "whose": r"\bwhose\b",
    "at the most": r"\bat the (?:most|soonest|least)\b",
    "so many": r"\bso many\b",
    "pass over": r"\b(?:passed|passes|pass) over\b",
    "give up": r"\b(?:given|gives|give|gave) up\b",
    "amid": r"\bamid\b",
    "but for": r"\bbut for\b",
    "else behind a semicolon": r"[;,] else\b",
    "aloud": r"\baloud\b",
    "somebody's matter": r"\b(?:is|are) .{1,30}'s? (?:own )?(?:matter|business)\b",
    "anew": r"\banew\b",
    "foretell": r"\bforetold\b|\bforetell",
    "beside": r"\bbeside\b",
    "due": r"\bis due\b",
    "stand": r"\bstands?\b",
}
_PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in HABITS.values()))
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
