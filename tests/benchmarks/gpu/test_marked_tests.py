"""How a day runs the suite's tests for GPUs, on trees of a test's own."""

from pathlib import Path

from benchmarks.gpu.marked_tests import run_marked

MARKED = """
import pytest

@pytest.mark.gpu
def test_right() -> None: ...

@pytest.mark.gpu
def test_wrong() -> None: assert not 1

@pytest.mark.gpu
def test_for_others() -> None: pytest.skip("another device")

def test_of_the_cpu() -> None: raise RuntimeError
"""


def write(root: Path, name: str, text: str) -> None:
    path = root / "tests" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def test_marked_tests_run_and_no_others(tmp_path: Path) -> None:
    write(tmp_path, "test_a.py", MARKED)
    write(tmp_path, "test_b.py", "import a_package_that_this_machine_lacks\n")
    (row,) = run_marked(tmp_path)
    assert (row.name, row.is_right) == ("tests/test_a.py", False)
    assert row.figures == {"passed": 1, "failed": 1, "skipped": 1}


def test_a_suite_without_any_says_so(tmp_path: Path) -> None:
    write(tmp_path, "test_a.py", "def test_a(): ...\n")
    (row,) = run_marked(tmp_path)
    assert (row.name, row.is_right) == ("no test is marked", True)
