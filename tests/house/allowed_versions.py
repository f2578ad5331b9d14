"""Print pyproject.toml's version ranges as a requirements file: `python -m tests.house.allowed_versions lowest` or `newest`.

`make test-lowest` and `make test-newest` install them. The pins of requirements-*.txt stay for torch (package indices have only
the newest CPU build), for triton, which belongs to it, and for the tools that run the tests.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINNED = ("torch", "triton")


def main() -> None:
    """Print one requirement per line."""
    (which,) = sys.argv[1:]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    tools = [Requirement(line).name for line in project["optional-dependencies"]["test"]]
    moving = [each for each in needed if each.name not in PINNED]
    print(*({"lowest": _lowest, "newest": _ranges}[which](moving)), sep="\n")
    print(*_pinned({canonicalize_name(name) for name in (*PINNED, *tools)}), sep="\n")


def _lowest(requirements: list[Requirement]) -> Iterator[str]:
    for each in requirements:
        lowest = next((bound.version for bound in each.specifier if bound.operator == ">="), None)
        assert lowest is not None, f"pyproject.toml has no lowest version of {each.name}"
        yield f"{each.name}=={lowest}"


def _ranges(requirements: list[Requirement]) -> Iterator[str]:
    """Yield the ranges. With its upgrade option, pip installs the newest versions in them."""
    return map(str, requirements)


def _pinned(names: set[str]) -> Iterator[str]:
    for file in ("requirements-cpu.txt", "requirements-dev.txt"):
        for line in (ROOT / file).read_text().splitlines():
            if line and not line.startswith("#") and canonicalize_name(Requirement(line).name) in names:
                yield line


if __name__ == "__main__":
    main()
