"""A whole day in Triton's interpreter, with tiny shapes, so that its first run is not on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.day import PARTS
from tests.support.gpu.interpreted import needs_triton

ROOT = Path(__file__).parents[3]
LIMIT_S = 900.0  # ten times what a quiet machine takes
# Parts that run together, and texts in the names of their units; none: all units run. All groups continue one day.
GROUPS = {
    "ceilings,compile,correctness,kernels,parity": "",
    "bits,launches,prompts,ranks,tests,tiles": "",
    # Engines of the other models run in parity and prompts.
    "step,throughput": "qwen3",
    "service": "",
}

pytestmark = [
    pytest.mark.slow,
    needs_triton,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the day's results."""
    return tmp_path_factory.mktemp("day")


def run_day(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [
        *("sh", "benchmarks/gpu_day.sh", "--device=interpreter", "--tiny", "--resume", f"--out={folder}"),
        *(f"--minutes={LIMIT_S / 60}", *options),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return done, json.loads(done.stdout.splitlines()[-1])


def units_of(folder: Path) -> dict[str, Any]:
    """Return the results of all units so far."""
    (path,) = folder.glob("gpu-day-*.json")
    units: dict[str, Any] = json.loads(path.read_text())["units"]
    return units


def test_the_groups_have_all_parts() -> None:
    assert sorted(",".join(GROUPS).split(",")) == sorted(part.name for part in PARTS)


@pytest.mark.parametrize("parts", GROUPS)
def test_units_of_every_part_run_and_are_right(parts: str, folder: Path) -> None:
    units = [f"--units={GROUPS[parts]}"] if GROUPS[parts] else []
    done, summary = run_day(folder, f"--parts={parts}", *units)
    wrong = {key: unit for key, unit in units_of(folder).items() if _is_wrong(unit)}
    (log,) = folder.glob("gpu-day-*.log")
    assert done.returncode == 0, (wrong, log.read_text()[-3000:])
    assert (summary["failed"], summary["wrong_rows"]) == (0, 0)
    assert "not reached" not in done.stdout
    for part in PARTS:
        assert (f"\n{part.title} ({part.name})\n" in done.stdout) is (part.name in parts.split(","))


def test_a_resumed_day_has_nothing_left_to_do(folder: Path) -> None:
    if not any(folder.iterdir()):  # this test runs alone
        run_day(folder, f"--parts={next(iter(GROUPS))}")
    num_units = len(units_of(folder))
    whole = {part for parts, units in GROUPS.items() for part in parts.split(",") if not units}
    have_run = sorted(whole & {unit.partition("/")[0] for unit in units_of(folder)})
    done, again = run_day(folder, f"--parts={','.join(have_run)}")
    assert done.returncode == 0
    assert again["units"] == num_units
    ended = [line.partition(":")[0] for line in done.stdout.splitlines() if ": done after" in line]
    assert {unit.partition("/")[0] for unit in ended} == {"ceilings"}


def _is_wrong(unit: dict[str, Any]) -> bool:
    return unit["status"] != "done" or not all(row["is_right"] for row in unit["rows"])
