"""The lowest versions that pyproject.toml allows, as a requirements file: `python -m tests.house.lowest` (see `make test-lowest`).

Not lowered, but as pinned in requirements-*.txt, are torch, of which package indices have the newest CPU build only, triton, which
belongs to it, and the tools that run the tests.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
NOT_LOWERED = ("torch", "triton")


def main() -> None:
    """Print one requirement per line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    tools = [Requirement(line).name for line in project["optional-dependencies"]["test"]]
    print(*_lowest([each for each in needed if each.name not in NOT_LOWERED]), sep="\n")
    print(*_pinned({canonicalize_name(name) for name in (*NOT_LOWERED, *tools)}), sep="\n")


def _lowest(requirements: list[Requirement]) -> Iterator[str]:
    for each in requirements:
        lowest = next((bound.version for bound in each.specifier if bound.operator == ">="), None)
        assert lowest is not None, f"pyproject.toml gives no lowest version of {each.name}"
        yield f"{each.name}=={lowest}"


def _pinned(names: set[str]) -> Iterator[str]:
    for file in ("requirements-cpu.txt", "requirements-dev.txt"):
        for line in (ROOT / file).read_text().splitlines():
            if line and not line.startswith("#") and canonicalize_name(Requirement(line).name) in names:
                yield line


if __name__ == "__main__":
    main()
