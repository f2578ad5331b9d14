"""Recorded durations of tests, and the ceilings that follow from them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import durations
from tests.support.durations import (
    FAST_S,
    LONG_FILE_S,
    MARGIN,
    ROOT,
    SLOW_S,
    UNLISTED_S,
    Duration,
    above_ceiling,
    merged,
    put_long_files_first,
    read_durations,
)

HERE = "tests/support/test_durations.py"


def test_no_recorded_test_takes_longer_than_its_suite_allows() -> None:
    most_s = {False: FAST_S, True: SLOW_S}
    assert not [each for each in read_durations().values() if each.seconds > most_s[each.is_slow]]


def test_a_record_replaces_what_ran_and_keeps_the_rest(tmp_path: Path) -> None:
    ran, kept = f"{HERE}::test_a_record", f"{HERE}::test_a_ceiling_is_a_multiple_of_the_record[2]"
    # In two parts, because a test is gone if its file does not contain its name.
    gone = (f"{HERE}::test_" + "gone", "tests/gone/test_x.py::c")
    former = f"{ran}[a parameter of former tests]"
    recorded = {name: Duration(9.0, True, name) for name in (ran, former, kept, *gone)}
    taken = {name: Duration(seconds, False, name) for name, seconds in ((ran, 11.25), (f"{HERE}::d", 0.5))}
    file = tmp_path / "durations.txt"
    file.write_text(merged(recorded, taken))
    assert list(read_durations(file).values()) == [Duration(11.2, False, ran), recorded[kept]]


def test_long_files_start_first_and_the_others_keep_their_order() -> None:
    names = ["b.py::1", "a.py::1", "long.py::1", "long.py::2", "longest.py::1", "b.py::2"]
    seconds = {"b.py::1": LONG_FILE_S - 1.0, "long.py::1": LONG_FILE_S - 1.0, "long.py::2": 1.0}
    recorded = {name: Duration(each, False, name) for name, each in seconds.items()}
    recorded["longest.py::1"] = Duration(LONG_FILE_S + 1.0, True, "longest.py::1")
    recorded["a.py::gone"] = Duration(9 * LONG_FILE_S, True, "a.py::gone")  # it does not run now
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    put_long_files_first(items, recorded)
    assert [item.nodeid for item in items] == [names[each] for each in (4, 2, 3, 0, 1, 5)]


@pytest.mark.parametrize(
    ("recorded_s", "ceiling_s"), [(None, UNLISTED_S), (2.0, UNLISTED_S), (2 * UNLISTED_S, 2 * UNLISTED_S)]
)
def test_a_ceiling_is_a_multiple_of_the_record(recorded_s: float | None, ceiling_s: float) -> None:
    recorded = {} if recorded_s is None else {"a": Duration(recorded_s, True, "a")}
    for excess_s, names in ((-1.0, []), (1.0, ["a took"])):
        lines = above_ceiling(recorded, {"a": Duration(MARGIN * ceiling_s + excess_s, True, "a")})
        assert [line[:6] for line in lines] == names


@pytest.mark.parametrize(("flags", "status"), [(("--ceilings",), 1), ((), 0)])
def test_a_test_above_its_ceiling_is_named_and_fails_the_session_in_ci(
    flags: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    """The session's ceilings are 0."""
    (tmp_path / "conftest.py").write_text(
        "from tests.support import durations\n"
        "durations.MARGIN = 0.0\n"
        "pytest_addoption, pytest_configure = durations.add_options, durations.register\n"
    )
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:schemathesis",
        "-p",
        "no:cacheprovider",
        *flags,
    ]
    ran = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == status, ran.stdout
    assert "tests above their ceilings" in ran.stdout and "test_it.py::test_it took 0.0 s" in ran.stdout
    assert durations.MARGIN > 0
