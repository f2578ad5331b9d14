"""The results' file and the card of a day."""

from pathlib import Path

import pytest

from benchmarks.gpu import device_card
from benchmarks.gpu.device_card import NoDeviceError, day_card
from benchmarks.gpu.ledger import DONE, Ledger, file_name, source_digest
from benchmarks.gpu.rows import Row, Setting

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


def test_without_a_driver_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoDeviceError, match=r"no GPU answers .*give --device interpreter --tiny"):
        day_card(SETTING, "abc")


def test_the_driver_is_asked_for_the_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = "NVIDIA H200, 580.159.03, 143771 MiB, 345 MHz, 3201 MHz, 700.00 W, 31"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(device_card, "NEEDED", ("torch", "no_such_package"))
    card = day_card(SETTING, "abc")
    assert (card["device"], card["driver_version"], card["clocks.mem"]) == (
        "NVIDIA H200",
        "580.159.03",
        "3201 MHz",
    )
    assert card["missing packages"] == "no_such_package"
