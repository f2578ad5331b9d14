"""How a day runs the suite's tests for GPUs, on trees of a test's own."""

from pathlib import Path

from benchmarks.gpu.marked_tests import marked_files, run_file, units
from benchmarks.gpu.results import Setting

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


BY_FIXTURE = """
import pytest

OnDevice = object

@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on_device(request): return request.param

def test_one(on_device: OnDevice) -> None: assert on_device == "cuda"

@pytest.mark.slow
def test_dear(on_device: OnDevice) -> None: assert on_device == "cuda"
"""
REAL = Setting(device="cuda", is_tiny=False)


def test_marked_tests_run_and_no_others(tmp_path: Path) -> None:
    write(tmp_path, "test_a.py", MARKED)
    write(tmp_path, "test_b.py", "import a_package_that_this_machine_lacks\n")
    (path,) = marked_files(tmp_path)
    row = run_file(tmp_path, path)
    assert (row.name, row.is_right) == ("tests/test_a.py (gpu)", False)
    assert row.figures == {"passed": 1, "failed": 1, "skipped": 1}


def test_a_fixture_that_brings_the_mark_is_found_too(tmp_path: Path) -> None:
    write(tmp_path, "test_a.py", BY_FIXTURE)
    (path,) = marked_files(tmp_path)
    fast = run_file(tmp_path, path, "gpu and not slow")
    assert (fast.figures, fast.is_right) == ({"passed": 1, "failed": 0, "skipped": 0}, True)


def test_the_suites_own_kernel_tests_are_units_and_what_is_slow_comes_last() -> None:
    names = units(REAL)
    assert "tests/attention/gpu/test_decode.py" in names
    assert [name.endswith(", slow") for name in names] == sorted(name.endswith(", slow") for name in names)
