"""Budgets, passes, resumption and failures of a day, with scripted workers that advance a clock."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.day import PARTS, Day, DayPart
from benchmarks.gpu.ranks.worker import DeadWorkerError, FailedUnitError, LateWorkerError
from benchmarks.gpu.results import Ledger, Row, Setting

CEILINGS = DayPart("ceilings", "c", "Ceilings", 100.0, is_repeated=True)
FIRST, LAST = DayPart("first", "f", "First", 100.0, share=0.5), DayPart("last", "l", "Last", 100.0)
ROW = Row(name="row", figures={"x": 1.0})


class Script:
    """Actions of workers, and a record of requests. Every unit takes `unit_s` on the clock."""

    def __init__(self, units: dict[str, list[str]], *, unit_s: float = 1.0) -> None:
        self.now_s, self.unit_s, self.module_units = 0.0, unit_s, units
        self.trouble: dict[str, Callable[[], Any]] = {}
        self.ran: list[str] = []
        self.starts: list[str] = []
        self.known: list[dict[str, float]] = []

    def start(self, module: str, setting: Setting) -> "ScriptedWorker":
        self.starts.append(module)
        return ScriptedWorker(self, module)


class ScriptedWorker:
    def __init__(self, script: Script, module: str) -> None:
        self.script, self.module, self.is_dead = script, module, False

    def units(self, timeout_s: float) -> list[str]:
        if self.module in self.script.trouble:
            self.script.trouble[self.module]()
        return self.script.module_units[self.module]

    def run(self, unit: str, known: Mapping[str, float], timeout_s: float, rows: list[Row]) -> None:
        assert not self.is_dead, "a dead or late worker must not get further units"
        assert timeout_s > 0
        self.script.ran.append(unit)
        self.script.known.append(dict(known))
        self.script.now_s += self.script.unit_s
        rows.append(ROW)
        try:
            self.script.trouble.get(unit, bool)()
        except (DeadWorkerError, LateWorkerError):
            self.is_dead = True
            raise

    def kill(self) -> None:
        self.is_dead = True

    def close(self) -> None:
        pass


def raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def run_day(
    script: Script, path: Path, parts: list[DayPart], *, minutes: float = 60.0, resumes: bool = False,
    wanted: Sequence[str] = (), device: str = "interpreter",
) -> tuple[Ledger, Day]:  # fmt: skip
    ledger = Ledger(path, {}, resumes=resumes)
    day = Day(
        ledger, Setting(device=device, is_tiny=True), script.start, minutes=minutes, wanted=wanted, clock=lambda: script.now_s,
        say=lambda _: None,
    )  # fmt: skip
    day.run(parts)
    return ledger, day


def statuses(ledger: Ledger) -> dict[str, str]:
    return {key: entry["status"] for key, entry in ledger.units.items()}


def test_failures_are_lines_and_everything_else_runs(tmp_path: Path) -> None:
    script = Script({"f": ["a", "b", "c", "d", "e"], "l": ["z"]})
    script.trouble = {
        "a": raising(FailedUnitError("ValueError: no such shape")),
        "b": raising(DeadWorkerError("the process ended with 1: segfault")),
        "c": raising(LateWorkerError("no answer within the time limit")),
        "d": raising(FailedUnitError("RuntimeError: CUDA error: an illegal memory access")),
    }
    ledger, day = run_day(script, tmp_path / "day.json", [FIRST, LAST])
    assert statuses(ledger) == {
        "first/a": "failed", "first/b": "failed", "first/c": "timed out", "first/d": "failed", "first/e": "done",
        "last/z": "done",
    }  # fmt: skip
    assert script.starts == ["f", "f", "f", "f", "l"], "a new worker must start after b, c and d, not after a"
    assert ledger.units["first/b"]["note"] == "the process ended with 1: segfault"
    assert day.not_reached == {"first": [], "last": []}
    assert ledger.summary() == {"units": 6, "failed": 4, "rows": 6, "wrong_rows": 0, "missed_goals": 0}


def test_only_wanted_units_run(tmp_path: Path) -> None:
    script = Script({"f": ["steps qwen3", "steps gpt-oss"], "l": ["qwen3 wideep", "copy"]})
    ledger, day = run_day(script, tmp_path / "day.json", [FIRST, LAST], wanted=["qwen3", "cop"])
    assert statuses(ledger) == {"first/steps qwen3": "done", "last/qwen3 wideep": "done", "last/copy": "done"}
    assert day.not_reached == {"first": [], "last": []}


@pytest.mark.parametrize(("device", "starts"), [("cuda", ["f", "f"]), ("interpreter", ["f"])])
def test_units_may_have_a_worker_each_on_a_device(device: str, starts: list[str], tmp_path: Path) -> None:
    script = Script({"f": ["a", "b"]})
    script.trouble = {"a": raising(FailedUnitError("ValueError: no such shape"))}
    ledger, _ = run_day(script, tmp_path / "day.json", [FIRST._replace(is_fresh=True)], device=device)
    assert statuses(ledger) == {"first/a": "failed", "first/b": "done"}
    assert script.starts == starts


def test_a_part_that_cannot_begin_is_one_line(tmp_path: Path) -> None:
    script = Script({"f": ["a"], "l": ["z"]})
    script.trouble = {"f": raising(RuntimeError("ImportError: No module named 'triton'"))}
    ledger, _ = run_day(script, tmp_path / "day.json", [FIRST, LAST])
    assert statuses(ledger) == {"first/start": "failed", "last/z": "done"}
    assert ledger.units["first/start"]["note"] == "ImportError: No module named 'triton'"


def test_a_part_that_cannot_begin_again_is_tried_once_more_and_says_what_it_did_not_reach(
    tmp_path: Path,
) -> None:
    script = Script({"f": ["a", "b"]})

    def die() -> Any:
        script.trouble["f"] = raising(LateWorkerError("no answer within the time limit"))
        raise DeadWorkerError("the process was killed by signal 9")

    script.trouble = {"a": die}
    ledger, day = run_day(script, tmp_path / "day.json", [FIRST])
    assert statuses(ledger) == {"first/a": "failed", "first/start": "timed out"}
    assert day.not_reached == {"first": ["b"]}
    assert script.starts == ["f", "f", "f"]


def test_a_part_that_can_begin_later_is_no_failure(tmp_path: Path) -> None:
    path, units = tmp_path / "day.json", {"f": ["a"]}
    script = Script(units)
    script.trouble = {"f": raising(RuntimeError("ImportError: No module named 'triton'"))}
    run_day(script, path, [FIRST])
    ledger, _ = run_day(Script(units), path, [FIRST], resumes=True)
    assert statuses(ledger) == {"first/a": "done"}


def test_a_part_has_its_share_first_and_the_rest_when_all_had_theirs(tmp_path: Path) -> None:
    script = Script({"f": list("abcdefgh"), "l": ["y", "z"]}, unit_s=10.0)
    _, day = run_day(script, tmp_path / "day.json", [FIRST, LAST], minutes=1.5)
    assert script.ran == [*"abcde", "y", "z", "f", "g"]
    assert day.not_reached == {"first": ["h"], "last": []}


def test_a_unit_that_would_be_cut_leaves_its_time_to_others(tmp_path: Path) -> None:
    script = Script({"h": ["big", "huge"], "l": ["z", "y"]}, unit_s=50.0)
    heavy = DayPart("heavy", "h", "Heavy", 100.0, least_s=100.0)
    ledger, day = run_day(script, tmp_path / "day.json", [heavy, LAST], minutes=1.7)
    assert script.ran == ["big", "z"], "52 s are left after big, too few for huge"
    assert day.not_reached == {"heavy": ["huge"], "last": ["y"]}
    again = Script(script.module_units)
    _, day = run_day(again, ledger.path, [heavy, LAST], minutes=1.0, resumes=True)
    assert again.ran == ["y"] and day.not_reached == {"heavy": ["huge"], "last": []}


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    script = Script({"f": ["a"], "l": ["z"]}, unit_s=60.0)
    _, day = run_day(script, tmp_path / "day.json", [FIRST, LAST], minutes=1.0)
    assert script.ran == ["a"]
    assert day.not_reached == {"first": [], "last": ["all"]}


def test_a_resumed_day_takes_up_what_is_missing_and_measures_ceilings_again(tmp_path: Path) -> None:
    path, parts = tmp_path / "day.json", [CEILINGS, FIRST]
    units = {"c": ["copy"], "f": ["a", "b", "c"]}
    script = Script(units, unit_s=30.0)
    script.trouble["a"] = raising(FailedUnitError("ValueError: not yet"))
    ledger, _ = run_day(script, path, parts, minutes=1.55)
    assert statuses(ledger) == {"ceilings/copy": "done", "first/a": "failed", "first/b": "done"}
    assert script.known == [
        {},
        {"ceilings/copy/row/x": 1.0},
        {"ceilings/copy/row/x": 1.0, "first/a/row/x": 1.0},
    ], "a unit must get all earlier figures, including those of a failed unit's rows"
    again = Script(units)
    ledger, _ = run_day(again, path, parts, resumes=True)
    assert again.ran == ["copy", "a", "c"]
    assert set(statuses(ledger).values()) == {"done"}
    assert json.loads(path.read_text())["units"] == ledger.units
    last = Script(units)
    run_day(last, path, parts, resumes=True)
    assert (last.ran, last.starts) == (["copy"], ["c"]), "no worker may start for a finished part"
    fresh = Script(units)
    run_day(fresh, path, parts)
    assert fresh.ran == ["copy", "a", "b", "c"], "without --resume all units must run again"


def test_what_is_no_result_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "day.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"day\.json cannot be resumed: it is not a day's result file"):
        Ledger(path, {}, resumes=True)


def test_parts_have_names_of_their_own_and_shares_that_are_shares() -> None:
    assert len({part.name for part in PARTS}) == len({part.module for part in PARTS}) == len(PARTS)
    assert all(0 < part.share <= 1 and part.limit_s > 0 for part in PARTS)
