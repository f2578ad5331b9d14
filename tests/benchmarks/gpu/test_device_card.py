"""What the card of a day says of the device, with a stand-in for the driver's program."""

from pathlib import Path

import pytest

from benchmarks.gpu.device_card import NoDeviceError, day_card
from benchmarks.gpu.results import Setting

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
    with pytest.raises(
        NoDeviceError, match=r"^no GPU answers \(.*exit status 6.*--device interpreter --tiny"
    ):
        day_card(REAL, "digest")
