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
LIMIT_S = 1800.0  # ten times what a quiet machine takes

pytestmark = [
    pytest.mark.slow,
    needs_triton,
]


def run_day(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [
        "sh",
        "benchmarks/gpu_day.sh",
        "--device",
        "interpreter",
        "--tiny",
        f"--out={folder}",
        *options,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return done, json.loads(done.stdout.splitlines()[-1])


def test_every_part_runs_and_is_right_and_a_resumed_day_has_nothing_left_to_do(tmp_path: Path) -> None:
    done, summary = run_day(tmp_path, f"--minutes={LIMIT_S / 60}")
    (path,) = tmp_path.glob("gpu-day-*.json")
    wrong = {key: unit for key, unit in json.loads(path.read_text())["units"].items() if _is_wrong(unit)}
    assert done.returncode == 0, (wrong, path.with_suffix(".log").read_text()[-3000:])
    assert (summary["failed"], summary["wrong_rows"]) == (0, 0)
    assert "not reached" not in done.stdout
    for part in PARTS:
        assert f"\n{part.title} ({part.name})\n" in done.stdout
    done, again = run_day(tmp_path, "--resume", "--minutes=5")
    assert done.returncode == 0
    assert again["units"] == summary["units"]
    ended = [line.partition(":")[0] for line in done.stdout.splitlines() if ": done after" in line]
    assert {unit.partition("/")[0] for unit in ended} == {"ceilings"}


def _is_wrong(unit: dict[str, Any]) -> bool:
    return unit["status"] != "done" or not all(row["is_right"] for row in unit["rows"])
