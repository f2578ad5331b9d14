"""The tests that need a GPU: every file of the suite that has some, by pytest in a process of its own.

Only files that speak of the mark are opened: others may import packages that a machine with a GPU lacks.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.rows import Row, Setting

_MARK = "pytest.mark.gpu"
_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 240.0
_NONE_COLLECTED = 5  # pytest's exit code


def units(setting: Setting) -> list[str]:
    """One."""
    return ["pytest -m gpu"]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Run them all."""
    yield from run_marked(_ROOT)


def run_marked(root: Path) -> Iterator[Row]:
    """Run the marked tests of a tree's files, a file after another."""
    paths = [path for path in sorted((root / "tests").rglob("test_*.py")) if _MARK in path.read_text()]
    for path in paths:
        yield _run_file(root, path)
    if not paths:
        yield Row(name="no test is marked", figures={})


def _run_file(root: Path, path: Path) -> Row:
    name = str(path.relative_to(root))
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report.name}", name]
        done = subprocess.run(
            command, cwd=root, stdout=sys.stderr, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode not in (0, 1, _NONE_COLLECTED):
            return Row(
                name=name,
                figures={},
                is_right=False,
                note=f"pytest ended with {done.returncode}; see the log",
            )
        suite = next(ElementTree.parse(report.name).iter("testsuite"))
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    figures = {"passed": total - skipped - failed, "failed": failed, "skipped": skipped}
    return Row(name=name, figures=figures, is_right=not failed)
