"""The campaign of faults: its disk is as slow, full or damaged as ordered, and a small campaign over moves and tiers ends well."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.__main__ import main
from benchmarks.faults.disk import FaultyDisk
from benchmarks.faults.kinds import FAULTS, OF_TIERS, OUTAGES
from tests.support.service.real_service import REPOSITORY, write_tiny_model

USE_STORE = """
import os, sys, time
from kvcache.tiers.records import ReadResult, RecordLayout, RecordStore

fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
store = RecordStore(fd, RecordLayout(bytes(32), bytes(32), 4096), 1 << 20, name=sys.argv[1])
data, read = bytes(range(256)) * 16, bytearray(4096)
begun_s = time.perf_counter()
try:
    store.write(b"k" * 16, [memoryview(data)], 7)
    outcome = store.read(b"k" * 16, [memoryview(read)], lambda: 7 if bytes(read) == data else 8).name
except OSError as error:
    outcome = error.strerror
print(outcome, time.perf_counter() - begun_s)
"""


def use(disk: FaultyDisk) -> tuple[str, float]:
    """Write and read a record in a process that starts like the service's. Return the outcome and the seconds."""
    disk.folder.mkdir(exist_ok=True)
    environment = {**os.environ, **disk.environment}
    ended = subprocess.run(
        [sys.executable, "-c", USE_STORE, str(disk.folder / "blocks.kv")],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    outcome, _, seconds = ended.stdout.rpartition(" ")
    return outcome, float(seconds)


def test_the_disk_does_what_the_campaign_orders(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    assert use(disk)[0] == "WHOLE"
    (disk.folder / "blocks.kv").unlink()
    disk.slow_down(0.2)
    outcome, seconds = use(disk)
    assert outcome == "WHOLE" and seconds >= 0.4
    (disk.folder / "blocks.kv").unlink()
    disk.fill()
    assert use(disk)[0] == "No space left on device"
    disk.repair()
    assert use(disk)[0] == "WHOLE"


def test_damage_changes_records_and_leaves_the_header(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    use(disk)
    path = disk.folder / "blocks.kv"
    before = path.read_bytes()
    disk.damage(random.Random(1))
    after = path.read_bytes()
    assert after != before and after[: len(after) // 2] == before[: len(after) // 2]


def test_every_kind_has_one_name() -> None:
    assert not FAULTS.keys() & OF_TIERS.keys() and {*OUTAGES} <= FAULTS.keys()


@pytest.mark.slow
def test_a_campaign_over_tiers_and_moves_loses_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    kinds = (
        "drain two ranks",
        "kill during a drain",
        "clients leave during a drain",
        "sleep and wake",
        *OF_TIERS,
    )
    words = [str(model), "--ranks=2", "--tiers", "--open=6", "--tokens=80", f"--kinds={','.join(kinds)}"]
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
    main(words)
    *_, told = capsys.readouterr().out.splitlines()
    result = json.loads(told)
    assert result["faults"] == len(kinds) and result["answers"] > len(kinds)
    # On a busy machine, streams may pause for longer than a campaign allows.
    assert (result["lost"], result["changed"], result["left_behind"]) == (0, 0, {}), told
    assert result["moves"] > 0
