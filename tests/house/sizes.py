"""`make sizes`: print lines, files and files per folder of each package, and the largest functions.

It counts files tracked by git, without generated ones. It prints sizes but enforces none: docs/README.md states the usual ones.
"""

import ast
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ("moe", "dispatch", "expert_placement", "attention", "kvcache", "scheduler", "server")
_NUM_LARGEST = 15
_FULL_FOLDER = 12


class Function(NamedTuple):
    """A function and its length."""

    lines: int
    name: str
    place: str


def main() -> None:
    """Print the tables."""
    files = _tracked()
    print(f"{'package':18}{'lines':>8}{'files':>7}{'folders':>9}{'lines/file':>12}  fullest folder")
    for package in (*SOURCE, "benchmarks", "tests"):
        _print_package(package, [file for file in files if file.parts[0] == package])
    source = [file for file in files if file.parts[0] in SOURCE]
    _print_package("all source", source)
    print(f"\nfolders with more than {_FULL_FOLDER} files:")
    for folder, count in sorted(_folders(source).items(), key=lambda item: -item[1]):
        if count > _FULL_FOLDER:
            print(f"{count:6} {folder}")
    print("\nlargest functions of the source, in lines:")
    functions = [function for file in source for function in _functions(file)]
    for function in sorted(functions, reverse=True)[:_NUM_LARGEST]:
        print(f"{function.lines:6} {function.name:40} {function.place}")


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in listed.stdout.splitlines()]


def _folders(files: list[Path]) -> Counter[str]:
    """Count the files of each folder, without package markers."""
    return Counter(str(file.parent) for file in files if file.name != "__init__.py")


def _print_package(name: str, files: list[Path]) -> None:
    lines = sum(_num_lines(file) for file in files)
    folders = _folders(files)
    modules = [file for file in files if file.name != "__init__.py"]
    folder, count = folders.most_common(1)[0] if folders else ("", 0)
    print(
        f"{name:18}{lines:8}{len(modules):7}{len(folders):9}{lines / max(len(modules), 1):12.0f}  {count} {folder}"
    )


def _num_lines(file: Path) -> int:
    return len((ROOT / file).read_text(encoding="utf-8").splitlines())


def _functions(file: Path) -> list[Function]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return [
        Function((node.end_lineno or node.lineno) - node.lineno + 1, node.name, f"{file}:{node.lineno}")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


if __name__ == "__main__":
    main()
