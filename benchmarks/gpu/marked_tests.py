"""Tests that need a GPU: every file of the suite with such tests, run by pytest in a separate process.

A test has the mark, or a fixture that marks one of its parameters (`on_device`). Only files with either text are opened: others
may import packages that a machine with a GPU lacks. The fast tests of all files run first, then the slow ones.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.results import Row, Setting

_MARKS = ("@pytest.mark.gpu", ": OnDevice")
_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 150.0
_NONE_COLLECTED = 5  # pytest's exit code
_SLOW = ", slow"


def units(setting: Setting) -> list[str]:
    """Return two units per file: its fast and its slow tests. Tiny shapes run without a GPU: one file suffices."""
    names = [str(path.relative_to(_ROOT)) for path in marked_files(_ROOT)][: 1 if setting.is_tiny else None]
    return [*names, *(name + _SLOW for name in names)]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Run one unit."""
    name = unit.removesuffix(_SLOW)
    yield run_file(_ROOT, _ROOT / name, "gpu and slow" if unit.endswith(_SLOW) else "gpu and not slow")


def marked_files(root: Path) -> list[Path]:
    """Return the files in a tree that have such tests."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [path for path in files if any(mark in path.read_text() for mark in _MARKS)]


def run_file(root: Path, path: Path, mark: str = "gpu") -> Row:
    """Run the tests in a file that have a mark."""
    name = str(path.relative_to(root))
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "-m", mark, f"--junitxml={report.name}", name]
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
    return Row(name=f"{name} ({mark})", figures=figures, is_right=not failed)
