"""The results file and the card of a day, with a fake of the driver's program."""

from pathlib import Path

import pytest

from benchmarks.gpu.day import DayPart, day_lines
from benchmarks.gpu.device_card import NoDeviceError, day_card
from benchmarks.gpu.results import DONE, Ledger, Row, Setting, file_name, source_digest

SETTING = Setting(device="cuda", is_tiny=False)
ROOT = Path(__file__).parents[3]


def test_figures_are_known_by_part_unit_and_row_and_texts_are_not_figures(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "day.json", {}, resumes=True)
    rows = [
        Row(name="copy", figures={"copy_tb_per_s": 4, "how": "graph", "none": None}),
        Row(name="b", figures={"x": 2.5}),
    ]
    ledger.write("ceilings", "copy", DONE, rows, seconds=1.0, note="")
    known = ledger.known()
    assert known == {"ceilings/copy/copy/copy_tb_per_s": 4.0, "ceilings/copy/b/x": 2.5}
    assert Setting(device="cuda", is_tiny=False, known=known).ceiling("copy_tb_per_s") == 4.0
    assert SETTING.ceiling("copy_tb_per_s") is None


def test_wrong_rows_and_missed_goals_are_counted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "day.json", {}, resumes=False)
    rows = [
        Row(name="a", figures={"x": 0.5}, goals={"x": 0.85}),
        Row(name="b", figures={"x": 0.9}, goals={"x": 0.85}, is_right=False),
    ]
    ledger.write("kernels", "decode", DONE, rows, seconds=1.0, note="")
    assert ledger.summary() == {"units": 1, "failed": 0, "rows": 2, "wrong_rows": 1, "missed_goals": 1}


def test_a_file_is_of_a_device_and_of_sources(tmp_path: Path) -> None:
    assert file_name("NVIDIA H200", SETTING, "abc") == "gpu-day-nvidia-h200-abc.json"
    assert file_name("x", Setting(device="interpreter", is_tiny=True), "abc") == "gpu-day-x-tiny-abc.json"
    assert source_digest(ROOT) == source_digest(ROOT)
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "a.py").write_text("1")
    before = source_digest(tmp_path)
    (tmp_path / "moe" / "a.py").write_text("2")
    assert source_digest(tmp_path) != before


def test_the_card_of_an_interpreted_day_says_that_times_mean_nothing() -> None:
    card = day_card(Setting(device="interpreter", is_tiny=True), "abc")
    assert card["device"].endswith("(times mean nothing)")
    assert card["source"] == "abc"
    assert card["missing packages"] == "none"


PART = DayPart("kernels", "k", "Kernel times", 1.0)


def entry(*rows: Row, status: str = "done", note: str = "") -> dict[str, object]:
    return {"status": status, "note": note, "rows": [row.as_json() for row in rows]}


def test_rows_failures_and_what_was_not_reached_are_lines() -> None:
    goals = {"of_copy": 0.85}
    units = {
        "kernels/decode": entry(
            Row(name="qwen3 b1", figures={"us": 12.34, "of_copy": 0.5}, goals=goals),
            Row(name="qwen3 b32", figures={"us": 1234.5, "of_copy": 0.9}, goals=goals, note="eager"),
        ),
        "kernels/norm": entry(Row(name="norm", figures={"error": 2e-7, "peer": None}, is_right=False)),
        "kernels/prefill": entry(status="failed", note="ValueError: no such tile"),
        "others/x": entry(),
    }
    assert list(day_lines(units, [PART], {"kernels": ["rotary", "write"]})) == [
        "",
        "Kernel times (kernels)",
        "               us  of_copy",
        "  qwen3 b1   12.3     0.5-",
        "  qwen3 b32  1234     0.9+  eager",
        "           error  peer",
        "! norm  2.00e-07     .",
        "  prefill: FAILED: ValueError: no such tile",
        "  not reached: rotary, write",
    ]


REAL = Setting(device="cuda", is_tiny=False)
ANSWERS_ALL = 'echo "NVIDIA H200, 580.159, 143771 MiB, 345 MHz, 3201 MHz, 700.00 W, 31"'
KNOWS_THE_NAME = (
    'case "$1" in *,*) echo "Field is not a valid field to query."; exit 2;; esac; echo "NVIDIA H200"'
)


def put(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_card_has_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, monkeypatch, ANSWERS_ALL)
    card = day_card(REAL, "digest")
    assert (card["device"], card["driver_version"], card["temperature.gpu"]) == (
        "NVIDIA H200",
        "580.159",
        "31",
    )


def test_a_driver_that_does_not_know_every_fact_does_not_end_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch, KNOWS_THE_NAME)
    card = day_card(REAL, "digest")
    assert card["device"] == "NVIDIA H200" and "power.limit" not in card


def test_without_a_gpu_a_day_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, monkeypatch, "echo no devices were found; exit 6")
    with pytest.raises(NoDeviceError, match=r"^no GPU found \(.*exit status 6.*--device interpreter --tiny"):
        day_card(REAL, "digest")
