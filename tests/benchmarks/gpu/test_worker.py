"""A worker process and its parent, over real pipes (the part is `sample_part`, which needs no torch), and the suite's own GPU
tests as units of a day, on trees created by tests."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.marked_tests import marked_files, run_file, units
from benchmarks.gpu.ranks.worker import (
    DeadWorkerError,
    FailedUnitError,
    LateWorkerError,
    Worker,
    answer_lines,
)
from benchmarks.gpu.results import Row, Setting
from tests.benchmarks.gpu import sample_part

SETTING = Setting(device="interpreter", is_tiny=True)
KNOWN = {"ceilings/copy/copy/copy_tb_per_s": 4.25, "kernels/copy/copy/copy_tb_per_s": 1.0}
LIMIT_S = 60.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    with (
        tempfile.NamedTemporaryFile() as log,
        Worker("tests.benchmarks.gpu.sample_part", SETTING, log) as worker,
    ):
        yield worker


def test_a_worker_answers_with_rows_and_failures_and_its_death_is_told_with_its_last_words(
    worker: Worker,
) -> None:
    assert worker.units(LIMIT_S) == ["good", "bad", "gone", "slow"]
    rows: list[Row] = []
    worker.run("good", KNOWN, LIMIT_S, rows)
    with pytest.raises(FailedUnitError, match=r"^ValueError: a kernel that takes no such thing$"):
        worker.run("bad", KNOWN, LIMIT_S, rows)
    with pytest.raises(FailedUnitError, match=r"^TritonError: out of resource: shared memory$"):
        worker.run("unfit", KNOWN, LIMIT_S, rows)  # which is not a RuntimeError
    with pytest.raises(FailedUnitError, match=r"^EOFError$"):
        worker.run("childless", KNOWN, LIMIT_S, rows)
    worker.run("good", {}, LIMIT_S, rows)  # an exception leaves the worker running
    pid = worker.process.pid
    assert [row.figures for row in rows] == [{"ceiling": 4.25, "pid": pid}, {"ceiling": None, "pid": pid}]
    with pytest.raises(DeadWorkerError, match="the process ended with 3: the last words"):
        worker.run("gone", KNOWN, LIMIT_S, rows)


def test_a_worker_that_is_late_is_given_up(worker: Worker) -> None:
    worker.units(LIMIT_S)
    with pytest.raises(LateWorkerError, match="no answer within the time limit"):
        worker.run("slow", KNOWN, 0.05, [])
    worker.kill()
    assert worker.process.returncode == -9


def test_a_part_whose_packages_are_missing_says_which() -> None:
    with (
        tempfile.NamedTemporaryFile() as log,
        Worker("benchmarks.gpu.no_such_part", SETTING, log) as worker,
        pytest.raises(RuntimeError, match=r"No module named 'benchmarks[.]gpu[.]no_such_part'"),
    ):
        worker.units(LIMIT_S)


def test_rows_are_answers_of_their_own_before_a_units_end() -> None:
    answers: list[dict[str, Any]] = []
    lines = [
        json.dumps(SETTING.as_json()),
        *(json.dumps({"unit": unit, "known": {}}) for unit in ("good", "bad")),
    ]
    answer_lines(sample_part, iter(lines), answers.append)
    assert [next(iter(answer)) for answer in answers] == ["units", "row", "end", "failed"]


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
